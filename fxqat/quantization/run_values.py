"""What one run of a model computes, and how far two runs are apart."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fxqat.utils.tensors import is_close, largest_magnitude

TOLERANCE = 1e-3
"""Of outputs and buffers, relative to each value and to the largest value of its tensor."""

GRADIENT_TOLERANCE = 1e-2
"""Of gradients, relative to the largest value of the parameter's gradient."""

GRADIENT_FLOOR = 1e-5
"""Gradients that are smaller than this share of the largest of all are rounding (a bias before BatchNorm)."""

FINE_TOLERANCE = 1e-5
"""Of outputs in eval mode, if the difference is no rounding: a branch of a network may contribute as little."""


class Values(NamedTuple):
    """What one run computes: tensors by what they are."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def gradient_of(leaf: Tensor, gradients: Mapping[int, Tensor]) -> Tensor:
    """The gradient of a leaf among those by the ``id`` of their leaves; zeros if it has none."""
    found = gradients.get(id(leaf))
    return torch.zeros_like(leaf) if found is None else found


def different_in(expected: Values, found: Values, tolerance: float = TOLERANCE) -> list[str]:
    """The names of the tensors that differ; the tolerance is that of outputs and buffers."""
    if expected.outputs.keys() != found.outputs.keys():
        return [f"{len(found.outputs)} instead of {len(expected.outputs)} output tensors"]
    largest = max((largest_magnitude(g) for g in expected.gradients.values() if not g.is_meta), default=0.0)
    exact, other = expected.outputs | expected.buffers, found.outputs | found.buffers
    result = [name for name in exact if not is_close(exact[name], other[name], tolerance)]
    floor = GRADIENT_FLOOR * largest
    for name, gradient in expected.gradients.items():
        if not is_close(gradient, found.gradients[name], GRADIENT_TOLERANCE, floor):
            result.append(name)
    return result


def distances(expected: Values, found: Values) -> dict[str, float]:
    """The largest difference of each tensor, infinite if it has another shape."""
    result: dict[str, float] = {}
    for part, other in zip(expected, found, strict=True):
        for name, tensor in part.items():
            same = name in other and tensor.shape == other[name].shape
            gap = (tensor.double() - other[name].double()).abs() if same and not tensor.is_complex() else None
            result[name] = (
                math.inf if gap is None else float(torch.nan_to_num(gap, nan=0.0).max()) if gap.numel() else 0.0
            )
    return result

"""The keys of ``node.meta`` that fxqat writes, the kinds of values, and what tracing reports."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

import torch
from torch import Tensor, fx

VALUE = "fxqat_value"
"""Key in ``node.meta``: the kind of a node's value, see :func:`describe`."""

SHAPE = "fxqat_shape"
"""Key in ``node.meta``: the shape of a node's tensor on the example inputs."""

ADDRESS = "fxqat_address"
"""Key in ``node.meta``: the address of the memory of a node's tensor, or of the first of a tuple, while tracing."""

IS_MASK = "fxqat_is_mask"
"""Key in ``node.meta``: whether the value holds infinity on the example inputs."""

SPELLING = "fxqat_spelling"
"""Key in ``node.meta``: the target that a standardized node had in the user's code."""

PART_OF = "fxqat_part_of"
"""Key in ``node.meta``: the path and the type of the user's module that became several nodes."""

KEPT_WHOLE = "fxqat_kept_whole"
"""Key in ``node.meta``: why a recurrent module was not split up, so that it stays float."""

SPLIT_FROM = "fxqat_split_from"
"""Key in ``node.meta``: the name of the node that became this one and others."""

NOT_SPLIT = "fxqat_not_split"
"""Key in ``node.meta``: why an op was not split although that was asked for."""

MODE = "fxqat_mode"
"""Key in ``node.meta``: True if the node runs in training only, False if in eval mode only; absent if in both."""

WITHOUT_GRADIENTS = "fxqat_without_gradients"
"""Key in ``node.meta``: the line of forward that runs with gradients off, where the graph does not follow that."""

ANNOTATION = "fxqat"
"""Key in ``node.meta``: the quantizer's decision, an :class:`~fxqat.quantization.annotation.Annotation`."""

INFINITE = 1e4
"""A constant of this magnitude counts as infinity: models write masks with -1e4, -1e9 or the smallest float."""

INFINITE_INPUT = 1e8
"""The same for inputs, which may be data with a wide range."""

INFINITE_SCORE = 30.0
"""The same for what is added to scores before a softmax: models also write masks with -100. exp(-30) is below 1e-13."""

QUANTIZABLE = (torch.float32, torch.float16, torch.bfloat16)
"""The types that ONNX QuantizeLinear takes."""


class Kind(Enum):
    """The kind of a value."""

    FLOAT = "float tensor"
    CONTAINER = "tuple of float tensors"
    UNKNOWN = "result of an operator outside the table"
    WIDE = "tensor of float64 or complex numbers, which is never quantized"
    OTHER = "size, index, boolean, constant or structure"


@dataclass(frozen=True)
class ForcedNumber:
    """A size that Python needed as a number, so that it is a constant in the graph.

    Args:
        expression: the node that computed it.
        value: the number.
        source: ``"file.py:12"``.
    """

    expression: str
    value: Any
    source: str


@dataclass(frozen=True)
class FloatLeaf:
    """A module that could not be traced and is called as a whole, in float.

    Args:
        path: its path in the model.
        reason: the error that tracing it raised.
        source: ``"file.py:12"``.
    """

    path: str
    reason: str
    source: str


def describe(value: Any) -> str:
    """The kind of a value.

    ``"float"``: a tensor of a type in ``QUANTIZABLE``; ``"float64"``, ``"complex"``: of such numbers; ``"tensor"``: of
    integers or booleans; ``"tuple"``: a tuple or list of ``"float"``; ``"plain"``: numbers, strings and the like,
    without tensors; ``"object"``: anything else. A tuple or list of ``"float64"`` or of ``"complex"`` is described as
    its items are.
    """
    if isinstance(value, Tensor):
        if value.dtype in QUANTIZABLE:
            return "float"
        return "complex" if value.is_complex() else "float64" if value.dtype == torch.float64 else "tensor"
    if isinstance(value, (tuple, list)):
        kinds = {describe(item) for item in value}
        if kinds == {"float"}:
            return "tuple"
        if len(kinds) == 1 and kinds <= {"float64", "complex"}:
            return kinds.pop()
        return "plain" if kinds <= {"plain"} else "object"
    if value is None or isinstance(value, (bool, int, float, complex, str, torch.dtype, torch.device, slice)):
        return "plain"
    return "object"


def holds_infinity(value: object, magnitude: float = INFINITE) -> bool:
    """Whether a tensor holds infinity, or negative numbers of at least this magnitude."""
    if not isinstance(value, Tensor) or value.dtype not in (*QUANTIZABLE, torch.float64):
        return False
    if value.is_meta or value.layout != torch.strided or not value.numel():
        return False
    low, high = torch.aminmax(value)
    return low.item() <= -magnitude or high.item() == math.inf


def is_additive_mask(value: object) -> bool:
    """Whether a tensor holds infinity, or nothing but 0 and one number that is infinite as a score."""
    if holds_infinity(value, INFINITE_INPUT):
        return True
    if not holds_infinity(value, INFINITE_SCORE):
        return False
    mask = cast("Tensor", value)
    low, high = torch.aminmax(mask)
    return bool(high == 0 and ((mask == low) | (mask == high)).all())


def kind_of(node: fx.Node) -> str | None:
    """The kind of a node's value, as :func:`describe` found it while tracing; None if it is not known."""
    found = node.meta.get(VALUE)
    return found if isinstance(found, str) else None

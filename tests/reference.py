"""Float64 references, written down from the papers and independent of the package."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch


class Gradients(NamedTuple):
    """Gradients of a loss to the input, the scale and the zero point of a fake-quant."""

    x: np.ndarray
    scale: np.ndarray
    zero_point: np.ndarray


def as_float64(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's values in float64."""
    return tensor.detach().double().numpy()


def on_axis(values: np.ndarray, dim: int, axis: int | None) -> np.ndarray:
    """Values of shape ``(channels,)`` shaped to broadcast along ``axis``."""
    if axis is None or values.ndim == 0:
        return values
    shape = [1] * dim
    shape[axis] = -1
    return values.reshape(shape)


def fake_quantize_reference(
    x: np.ndarray, scale: np.ndarray, zero_point: np.ndarray, limits: tuple[int, int], axis: int | None = None
) -> np.ndarray:
    """``(clamp(round(x / s) + z) - z) * s`` in float64, with numpy's half-to-even rounding."""
    scale, zero_point = on_axis(scale, x.ndim, axis), on_axis(zero_point, x.ndim, axis)
    return (np.clip(np.rint(x / scale) + zero_point, *limits) - zero_point) * scale


def lsq_reference(
    x: np.ndarray,
    scale: np.ndarray,
    zero_point: np.ndarray,
    limits: tuple[int, int],
    grad: np.ndarray,
    axis: int | None = None,
    factor: np.ndarray | None = None,
) -> Gradients:
    """Gradients of ``fq(x * factor) / factor``: LSQ equations 2 to 4, LSQ+ equations 4 and 5, straight-through for x.

    With ``v = x * factor / s``: to x ``g`` inside; to s ``g / factor * (round(v) - v)`` inside and
    ``g / factor * (limit - z)`` outside; to z ``-g / factor * s`` outside; inside includes the limits, with
    1/128 of a step for the error of a float32 quotient.
    """
    channel = 0 if axis is None else axis
    f = np.ones(()) if factor is None else on_axis(factor, x.ndim, channel)
    s, z = on_axis(scale, x.ndim, axis), on_axis(zero_point, x.ndim, axis)
    v = x * f / s
    inside = (v + z > limits[0] - 1 / 128) & (v + z < limits[1] + 1 / 128)
    to_scale = grad / f * np.where(inside, np.rint(v) - v, np.clip(np.rint(v) + z, *limits) - z)
    to_zero_point = np.where(inside, 0.0, -grad / f * s)
    others = tuple(d for d in range(x.ndim) if scale.ndim == 0 or d != channel % x.ndim)
    return Gradients(np.where(inside, grad, 0.0), to_scale.sum(others), to_zero_point.sum(others))


def away_from_ties(
    shape: tuple[int, ...], limits: tuple[int, int], seed: int, low: float = -0.3, high: float = 1.3
) -> np.ndarray:
    """Random values in steps, over and beyond the limits, whose fraction is at least 0.05 away from 0, 1/2 and 1.

    A float32 and a float64 computation then agree on which integer a value rounds to, and on whether it is inside.
    """
    random = np.random.default_rng(seed)
    span = limits[1] - limits[0]
    whole = np.floor(limits[0] + span * random.uniform(low, high, shape))
    fraction = random.uniform(0.05, 0.45, shape) + 0.5 * random.integers(0, 2, shape)
    return whole + fraction

"""The numbers: integers from reals and back, exactly as ONNX QuantizeLinear / DequantizeLinear compute them.

Pure functions without state or autograd. The two rules everything else leans on:

* division is a true division. Multiplying by ``1 / scale`` lands on another integer for some inputs;
* rounding is half to even, on the float32 quotient.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from fxqat.scheme import FLOAT32_BITS, QuantizeScheme

SCALE_MIN = 2.0**-40
"""Smallest scale there is. The product of two such scales, a bias scale, is still a normal float32."""

SCALE_MAX = 2.0**40
"""Largest scale there is."""


def _bit_pattern(value: float) -> int:
    return int.from_bytes(struct.pack(">f", value), "big")


SCALE_PATTERNS = (_bit_pattern(SCALE_MIN), _bit_pattern(SCALE_MAX))
"""The limits as the integers that have their bits."""


def _rounding(bits: int, up: bool) -> tuple[int, int]:
    """What to add to the bit pattern of a float32, and which bits to keep, to round it to its significant bits."""
    unit = 1 << (FLOAT32_BITS - bits)
    return unit - 1 if up else unit >> 1, 0x7FFFFFFF & -unit


ROUNDING_TENSORS = {
    (bits, up): tuple(torch.tensor(number, dtype=torch.int32) for number in _rounding(bits, up))
    for bits in range(1, FLOAT32_BITS + 1)
    for up in (False, True)
}
"""The same as tensors: out of a Python number, torch would make one at every call."""


def valid_scale(scale: Tensor, bits: int = FLOAT32_BITS, up: bool = False) -> Tensor:
    """The scale as it is used: float32, positive, finite and of few significant bits, whatever was trained.

    Formula: ``clamp(round(|scale|), SCALE_MIN, SCALE_MAX)``, with NaN and infinity read as ``SCALE_MAX``
    (NaN as ``SCALE_MIN`` if a single bit is left).

    Args:
        scale: any shape.
        bits: significant bits that are left.
        up: round upwards instead of to the nearest (halves up).

    Example:
        >>> valid_scale(torch.tensor([-0.5, 0.0, float("nan")])).tolist() == [0.5, SCALE_MIN, SCALE_MAX]
        True
        >>> valid_scale(torch.tensor([1.1, 1.3, 1.6]), bits=2).tolist()
        [1.0, 1.5, 1.5]
        >>> valid_scale(torch.tensor([1.1, 1.3, 1.6]), bits=1, up=True).tolist()
        [2.0, 2.0, 2.0]
    """
    # without its sign bit, the bit pattern of a float32 is an integer that is ordered as the absolute values are; in
    # it, a carry out of the mantissa goes into the exponent
    half, mask = _rounding(bits, up) if torch.compiler.is_compiling() else ROUNDING_TENSORS[bits, up]
    pattern = torch.add(scale.float().view(torch.int32), half).bitwise_and_(mask).clamp_(*SCALE_PATTERNS)
    return pattern.view(torch.float32)


def valid_zero_point(zero_point: Tensor, quant_min: int, quant_max: int) -> Tensor:
    """The zero point as it is used: an integer within the range, so that 0 is represented exactly."""
    return torch.nan_to_num(zero_point, nan=float(quant_min)).round_().clamp_(quant_min, quant_max)


def per_axis(values: Tensor, dim: int, axis: int | None) -> Tensor:
    """Shape ``(channels,)`` values so that they broadcast along ``axis`` of a ``dim``-dimensional tensor."""
    if axis is None or values.dim() == 0:
        return values
    shape = [1] * dim
    shape[axis] = -1
    return values.reshape(shape)


def quantize(
    x: Tensor, scale: Tensor, zero_point: Tensor | None, quant_min: int, quant_max: int, axis: int | None = None
) -> Tensor:
    """Integers of a real tensor, kept in float32.

    Formula: ``q = clamp(round_half_even(x / scale) + zero_point, quant_min, quant_max)``.

    Args:
        x: any shape, real values.
        scale: ``()`` or ``(channels,)``, real units per step, positive.
        zero_point: integers of the scale's shape or ``()``; None is 0.
        quant_min: smallest integer, inclusive.
        quant_max: largest integer, inclusive.
        axis: the axis that ``(channels,)`` values belong to; None per tensor.

    Returns:
        Integer values in float32, of x's shape.

    Source: ONNX QuantizeLinear, opset 13.
    """
    q = torch.div(x.float(), per_axis(scale, x.dim(), axis)).round_()
    if zero_point is not None:
        q.add_(per_axis(zero_point, x.dim(), axis))
    return q.clamp_(quant_min, quant_max)


def dequantize(q: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int | None = None) -> Tensor:
    """Reals of integers: ``x_hat = (q - zero_point) * scale``.

    Source: ONNX DequantizeLinear, opset 13.
    """
    x_hat = q.float() if zero_point is None else q.float() - per_axis(zero_point, q.dim(), axis)
    return x_hat * per_axis(scale, q.dim(), axis)


def fake_quantize(
    x: Tensor, scale: Tensor, zero_point: Tensor | None, quant_min: int, quant_max: int, axis: int | None = None
) -> Tensor:
    """``dequantize(quantize(x))`` in float32, with as few passes over the memory as the formula allows.

    Example:
        >>> fake_quantize(torch.tensor([0.24, 0.26, 9.0]), torch.tensor(0.5), None, -8, 7).tolist()
        [0.0, 0.5, 3.5]
    """
    scale = per_axis(scale, x.dim(), axis)
    q = torch.div(x.float(), scale).round_()
    if zero_point is None:
        return q.clamp_(quant_min, quant_max).mul_(scale)
    zero_point = per_axis(zero_point, x.dim(), axis)
    # clamp(r + z, lo, hi) - z is clamp(r, lo - z, hi - z): all of them are integers far below 2**24
    return torch.clamp(q, quant_min - zero_point, quant_max - zero_point).mul_(scale)


def choose_qparams(min_val: Tensor, max_val: Tensor, scheme: QuantizeScheme) -> tuple[Tensor, Tensor]:
    """Scale and zero point for a real range.

    The range is first widened to contain 0, which is then represented exactly.

    Args:
        min_val: smallest real value, ``()`` or ``(channels,)``.
        max_val: largest real value, same shape.
        scheme: the target integers. Per-channel scales, those of weights, whose largest values are always there, are
            rounded upwards to the scheme's significant bits, so that they cover the range; so are powers of two. Others
            are rounded to the nearest, which may cut off up to ``2**-scale_bits`` of the range.

    Returns:
        ``(scale, zero_point)``: float32 in ``[SCALE_MIN, SCALE_MAX]`` and float32 holding integers within
        ``[quant_min, quant_max]``, both of the range's shape.

    Source: Jacob et al. 2018 (arXiv:1712.05877), section 3; Nagel et al. 2021 (arXiv:2106.08295), equations 4 to 9.

    Example:
        >>> scale, zero_point = choose_qparams(
        ...     torch.tensor(-1.0), torch.tensor(3.0), QuantizeScheme(bit_width=2, signed=False, symmetric=False)
        ... )
        >>> round(scale.item(), 4), zero_point.item()
        (1.3333, 1.0)
    """
    low = torch.clamp(min_val.float(), max=0.0)
    high = torch.clamp(max_val.float(), min=0.0)
    quant_min, quant_max = scheme.quant_min, scheme.quant_max
    if scheme.symmetric:
        zero_point = torch.full_like(low, scheme.symmetric_zero_point)
        steps_up = quant_max - scheme.symmetric_zero_point
        scale = torch.maximum(-low, high) / steps_up
    else:
        scale = (high - low) / (quant_max - quant_min)
    scale = valid_scale(scale, scheme.scale_bits, up=scheme.per_channel or scheme.scale_bits == 1)
    if not scheme.symmetric:
        zero_point = torch.clamp(quant_min - torch.round(low / scale), quant_min, quant_max)
    return scale, zero_point


def covered_range(scale: Tensor, zero_point: Tensor, scheme: QuantizeScheme) -> tuple[Tensor, Tensor]:
    """The real range that quantization parameters cover, from which :func:`choose_qparams` finds them again.

    Formula: ``((quant_min - zero_point) * scale, (quant_max - zero_point) * scale)``; a symmetric scheme's range is
    symmetric too, so that an extra negative integer is left out.

    Args:
        scale: ``()`` or ``(channels,)``, real units per step.
        zero_point: integers, of the same shape.
        scheme: the integers.

    Returns:
        ``(low, high)`` of the scale's shape.

    Example:
        >>> uint8 = QuantizeScheme(signed=False, symmetric=False)
        >>> low, high = covered_range(torch.tensor(0.5), torch.tensor(10.0), uint8)
        >>> low.item(), high.item()
        (-5.0, 122.5)
    """
    high = (scheme.quant_max - zero_point) * scale
    return (-high if scheme.symmetric else (scheme.quant_min - zero_point) * scale), high

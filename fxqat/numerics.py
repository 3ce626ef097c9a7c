"""Real numbers to integers and back, exactly as ONNX QuantizeLinear and DequantizeLinear compute them.

Pure functions without state or autograd. Two rules make them exact:

* divide by the scale: multiplying by ``1 / scale`` gives another integer for some inputs;
* round the float32 quotient half to even.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from fxqat.scheme import FLOAT32_BITS, QuantizeScheme

SCALE_MIN = 2.0**-40
"""Smallest valid scale. The product of two of them, a bias scale, is still a normal float32."""

SCALE_MAX = 2.0**40
"""Largest valid scale."""

EDGE = 2.0**-7
"""What is less than this beyond the end of a range, in steps, counts as inside.

The largest of the values that a scale was chosen for may be that far beyond, because its quotient is a float32. With 16
bits, the error of that is 1/256 of a step.
"""


def _bit_pattern(value: float) -> int:
    return int.from_bytes(struct.pack(">f", value), "big")


SCALE_PATTERNS = (_bit_pattern(SCALE_MIN), _bit_pattern(SCALE_MAX))
"""The bit patterns of the two limits, as integers."""


def rounding(bits: int, up: bool = False) -> tuple[int, int]:
    """The addend and the mask that round the bit pattern of a float32 to ``bits`` significant bits."""
    unit = 1 << (FLOAT32_BITS - bits)
    return unit - 1 if up else unit >> 1, 0x7FFFFFFF & -unit


ROUNDING_TENSORS = {
    (bits, up): tuple(torch.tensor(number, dtype=torch.int32) for number in rounding(bits, up))
    for bits in range(1, FLOAT32_BITS + 1)
    for up in (False, True)
}
"""The results of ``rounding`` as tensors: torch would make a tensor of a Python number at every call."""


def valid_scale(scale: Tensor, bits: int = FLOAT32_BITS, up: bool = False) -> Tensor:
    """The scale in use: float32, positive, finite, rounded to its significant bits, whatever was trained.

    Formula: ``clamp(round(|scale|), SCALE_MIN, SCALE_MAX)``; NaN and infinity become ``SCALE_MAX``
    (with ``bits=1``, NaN becomes ``SCALE_MIN``).

    Args:
        scale: any shape, real units per step.
        bits: significant bits that remain; 24 is any float32, 1 a power of two.
        up: round up instead of to the nearest (halves up).

    Returns:
        Float32 of the same shape, within ``[SCALE_MIN, SCALE_MAX]``.

    Example:
        >>> valid_scale(torch.tensor([-0.5, 0.0, float("nan")])).tolist() == [0.5, SCALE_MIN, SCALE_MAX]
        True
        >>> valid_scale(torch.tensor([1.1, 1.3, 1.6]), bits=2).tolist()
        [1.0, 1.5, 1.5]
        >>> valid_scale(torch.tensor([1.1, 1.3, 1.6]), bits=1, up=True).tolist()
        [2.0, 2.0, 2.0]
    """
    # without the sign bit, the bit patterns of float32 are integers in the order of the absolute values, and a carry
    # out of the mantissa increments the exponent
    traced = torch.compiler.is_compiling() or type(scale) not in (Tensor, Parameter)  # FakeTensor, for one
    half, mask = rounding(bits, up) if traced else ROUNDING_TENSORS[bits, up]
    pattern = torch.add(scale.float().view(torch.int32), half).bitwise_and_(mask).clamp_(*SCALE_PATTERNS)
    return pattern.view(torch.float32)


def valid_zero_point(zero_point: Tensor, quant_min: int, quant_max: int, step: int = 1) -> Tensor:
    """The zero point in use: an integer within the range, so that 0 is exact; NaN becomes the smallest one.

    Args:
        zero_point: any shape.
        quant_min: smallest integer, inclusive.
        quant_max: largest integer, inclusive.
        step: the result is the nearest multiple of this number within the range.

    Example:
        >>> valid_zero_point(torch.tensor([2.6, 300.0, -9.0]), 0, 255, step=2).tolist()
        [2.0, 254.0, 0.0]
    """
    zero_point = torch.nan_to_num(zero_point, nan=float(quant_min))
    if step == 1:
        return zero_point.round_().clamp_(quant_min, quant_max)
    return zero_point.div_(step).round_().clamp_(-(-quant_min // step), quant_max // step).mul_(step)


def per_axis(values: Tensor, dim: int, axis: int | None) -> Tensor:
    """Reshape ``(channels,)`` values to broadcast along ``axis`` of a ``dim``-dimensional tensor."""
    if axis is None or values.dim() == 0:
        return values
    shape = [1] * dim
    shape[axis] = -1
    return values.reshape(shape)


def min_max_of(x: Tensor, axis: int | None) -> tuple[Tensor, Tensor]:
    """Smallest and largest value, per tensor (``axis=None``) or per slice along ``axis``."""
    if axis is None:
        low, high = torch.aminmax(x)
    else:
        rows = rows_of(x, axis)
        low, high = rows.amin(1), rows.amax(1)  # torch.aminmax needs five times as long
    return low, high


def rows_of(x: Tensor, axis: int | None) -> Tensor:
    """The values of each range as one row: ``(1, n)`` or ``(channels, n)``."""
    return x.reshape(1, -1) if axis is None else x.movedim(axis, 0).flatten(1)


def in_blocks(x: Tensor, block_size: int, axis: int) -> Tensor:
    """A matrix as rows of ``block_size`` neighbours of one channel, ``(blocks, block_size)``.

    They come in the order in which ONNX has their scales: that of their first elements in the matrix.

    Args:
        x: two dimensions; ``block_size`` divides the one that is not ``axis``.
        block_size: neighbours that share a scale.
        axis: the axis of the channels.

    Example:
        >>> in_blocks(torch.arange(8).reshape(2, 4), 2, axis=0).tolist()
        [[0, 1], [2, 3], [4, 5], [6, 7]]
        >>> in_blocks(torch.arange(8).reshape(4, 2), 2, axis=1).tolist()
        [[0, 2], [1, 3], [4, 6], [5, 7]]
    """
    return (x.unflatten(0, (-1, block_size)).mT if axis else x).reshape(-1, block_size)


def from_blocks(values: Tensor, shape: Sequence[int], axis: int) -> Tensor:
    """The inverse of :func:`in_blocks`; also for another number of values per block, such as one scale.

    Args:
        values: ``(blocks, any)``, or ``(blocks,)``.
        shape: of the matrix.
        axis: the axis of the channels of the matrix.

    Returns:
        The matrix, with as many columns (``axis`` 1: rows) as there are values.

    Example:
        >>> from_blocks(torch.arange(4), (2, 6), axis=0).tolist()
        [[0, 1], [2, 3]]
    """
    if axis == 0:
        return values.reshape(shape[0], -1)
    rows: Tensor = values.reshape(len(values), -1).unflatten(0, (-1, shape[1])).mT.flatten(0, 1)
    return rows


def quantize(
    x: Tensor, scale: Tensor, zero_point: Tensor | None, quant_min: int, quant_max: int, axis: int | None = None
) -> Tensor:
    """The integers of a real tensor, as float32.

    Formula: ``q = clamp(round_half_even(x / scale) + zero_point, quant_min, quant_max)``.

    Args:
        x: any shape, real values.
        scale: ``()`` or ``(channels,)``, real units per step, positive.
        zero_point: integers of the scale's shape or ``()``; None is 0.
        quant_min: smallest integer, inclusive.
        quant_max: largest integer, inclusive.
        axis: the channel axis of x; None per tensor.

    Returns:
        Integers as float32, of x's shape.

    Source: ONNX QuantizeLinear, opset 13.
    """
    q = torch.div(x.float(), per_axis(scale, x.dim(), axis)).round_()
    if zero_point is not None:
        q.add_(per_axis(zero_point, x.dim(), axis))
    return q.clamp_(quant_min, quant_max)


def dequantize(q: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int | None = None) -> Tensor:
    """Real values of integers.

    Formula: ``x_hat = (q - zero_point) * scale``.

    Args:
        q: integers of any shape and type.
        scale: ``()`` or ``(channels,)``, real units per step.
        zero_point: integers of the scale's shape or ``()``; None is 0.
        axis: the channel axis of q; None per tensor.

    Returns:
        Float32, of q's shape.

    Source: ONNX DequantizeLinear, opset 13.
    """
    x_hat = q.float() if zero_point is None else q.float() - per_axis(zero_point, q.dim(), axis)
    return x_hat * per_axis(scale, q.dim(), axis)


def fake_quantize(
    x: Tensor, scale: Tensor, zero_point: Tensor | None, quant_min: int, quant_max: int, axis: int | None = None
) -> Tensor:
    """``dequantize(quantize(x))`` in float32, in as few passes over memory as possible.

    Args: as :func:`quantize`.

    Example:
        >>> fake_quantize(torch.tensor([0.24, 0.26, 9.0]), torch.tensor(0.5), None, -8, 7).tolist()
        [0.0, 0.5, 3.5]
    """
    scale = per_axis(scale, x.dim(), axis)
    q = torch.div(x.float(), scale).round_()
    if zero_point is None:
        return q.clamp_(quant_min, quant_max).mul_(scale)
    zero_point = per_axis(zero_point, x.dim(), axis)
    # clamp(r + z, lo, hi) - z equals clamp(r, lo - z, hi - z): all of them are integers far below 2**24
    return torch.clamp(q, quant_min - zero_point, quant_max - zero_point).mul_(scale)


def dynamic_quantize(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """uint8 integers of a tensor by its own range, as ONNX DynamicQuantizeLinear computes them.

    Formula: ``low = min(0, min(x))``, ``high = max(0, max(x))``, ``scale = (high - low) / 255`` (1 if the range is
    empty), ``zero_point = round_half_even(clamp(-low / scale, 0, 255))``, ``q = clamp(round_half_even(x / scale) +
    zero_point, 0, 255)``.

    Args:
        x: real values, any shape, not empty.

    Returns:
        ``(q, scale, zero_point)``, all float32; scale and zero point are ``()``.

    Source: ONNX DynamicQuantizeLinear, opset 11; ONNX Runtime takes the scale 1 for an empty range.

    Example:
        >>> q, scale, zero_point = dynamic_quantize(torch.tensor([-1.0, 0.0, 1.55]))
        >>> q.tolist(), round(scale.item(), 4), zero_point.item()
        ([0.0, 100.0, 255.0], 0.01, 100.0)
    """
    x = x.float()
    low, high = torch.aminmax(x)
    low, high = torch.clamp(low, max=0.0), torch.clamp(high, min=0.0)
    scale = torch.where(low == high, 1.0, (high - low) / 255.0)
    zero_point = torch.clamp(-low / scale, 0.0, 255.0).round()
    return quantize(x, scale, zero_point, 0, 255), scale, zero_point


def choose_qparams(
    min_val: Tensor, max_val: Tensor, scheme: QuantizeScheme, ends_occur: bool = False
) -> tuple[Tensor, Tensor]:
    """Scale and zero point for a real range.

    The range is widened to contain 0, so that 0 is exact. Formula: ``scale = max(-low, high) / (quant_max -
    zero_point)`` if symmetric, else ``(high - low) / (quant_max - quant_min)`` and ``zero_point = quant_min -
    round(low / scale)``. If the scheme wants an even zero point, an odd one is moved up or down by one: of the two, the
    one that leaves the worse covered side a larger share. One step can be a whole side, as with SiLU below 0.
    If the scheme is for values that are never negative, ``low`` is 0.

    Args:
        min_val: smallest real value, ``()`` or ``(channels,)``.
        max_val: largest real value, same shape.
        scheme: the target integers. Per-channel scales (of weights, whose extremes always occur), powers of two, and
            scales of more than 8 bits whose range is not fixed, are rounded up to the scheme's significant bits, so
            that they cover the range. Other scales are rounded to the nearest, which may cut off up to
            ``2**-scale_bits`` of the range: a few steps of 8 bits, but a thousand of 16.
        ends_occur: as with weights, the two ends are always among the values: round every scale up, and the zero point
            up if the range then covers both ends.

    Returns:
        ``(scale, zero_point)``, both float32 of the range's shape: the scale within ``[SCALE_MIN, SCALE_MAX]``, the
        zero point an integer within ``[quant_min, quant_max]``.

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
    quant_min, quant_max, fixed = scheme.quant_min, scheme.quant_max, scheme.fixed_zero_point
    if scheme.symmetric:
        scale = torch.maximum(-low, high) / (quant_max - scheme.symmetric_zero_point)
    else:
        scale = (high if scheme.nonnegative else high - low) / (quant_max - quant_min)
    is_fine = scheme.bit_width > 8 and scheme.fixed_range is None  # engines fix such ranges with a power of two
    up = ends_occur or scheme.per_channel or scheme.scale_bits == 1 or is_fine
    scale = valid_scale(scale, scheme.scale_bits, up=up)
    if fixed is not None:
        return scale, torch.full_like(low, fixed)
    zero_point, step = quant_min - torch.round(low / scale), scheme.zero_point_step
    if step > 1:
        lower, upper = (step * multiple for multiple in ((zero_point / step).floor(), (zero_point / step).ceil()))
        # the covered shares of both sides, each times both lengths, so that nothing is divided by 0
        below, above = (torch.minimum((at - quant_min) * high, (at - quant_max) * low) for at in (lower, upper))
        zero_point = torch.where(above > below, upper, lower)
    if ends_occur:
        covering = step * ((quant_min - low / scale) / step).ceil()
        zero_point = torch.where((quant_max - covering) * scale >= high, covering, zero_point)
    return scale, valid_zero_point(zero_point, quant_min, quant_max, step)


def covered_range(scale: Tensor, zero_point: Tensor, scheme: QuantizeScheme) -> tuple[Tensor, Tensor]:
    """The real range that scale and zero point cover; :func:`choose_qparams` of it gives them back.

    Formula: ``((quant_min - zero_point) * scale, (quant_max - zero_point) * scale)``. For a symmetric scheme the range
    is symmetric and leaves out the extra negative integer.

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

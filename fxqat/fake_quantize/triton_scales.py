"""The kernels for GPUs that compute on the numbers of channels: scales, biases and magnitudes, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fxqat.fake_quantize.triton_math import EXACT, limited, nearest_integer, on_device_of, valid_scale
from fxqat.numerics import min_max_of, rounding

CHANNELS = {"BLOCK": 1024, "num_warps": 4, **EXACT}
"""The channels that a program takes at a time (a block), and its threads / 32."""


@triton.jit
def _floor(bias, part, input_scale):
    """``bias.weight_scale_floor``."""
    return tl.div_rn(tl.abs(bias) * part, input_scale)


@triton.jit
def _bias_error(bias, grid, limit):
    return limited(nearest_integer(tl.div_rn(bias, grid)), -limit, limit) * grid - bias


@triton.jit(do_not_specialize=["input_half", "input_mask", "weight_half", "weight_mask", "up_half", "up_mask"])
def _round_bias(
    bias_pointer,
    input_scale,
    weight_scale,
    input_unit,
    weight_unit,
    used_scale,
    error,
    channels,
    input_half,
    input_mask,
    weight_half,
    weight_mask,
    up_half,
    up_mask,
    part,
    limit,
    PER_CHANNEL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of channels; or all of them, if they have one weight scale."""
    scale = tl.load(input_scale)
    scale = valid_scale(scale if input_unit is None else scale * tl.load(input_unit), input_half, input_mask)
    if PER_CHANNEL:
        number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        exist = number < channels
        bias = tl.load(bias_pointer + number, mask=exist, other=0.0)
        own = tl.load(weight_scale + number, mask=exist, other=1.0)
        if weight_unit is not None:
            own = own * tl.load(weight_unit + number, mask=exist, other=1.0)
        own = valid_scale(own, weight_half, weight_mask)
        used = tl.maximum(own, valid_scale(_floor(bias, part, scale), up_half, up_mask))
        tl.store(used_scale + number, used, mask=exist)
        tl.store(error + number, _bias_error(bias, scale * used, limit), mask=exist)
    else:
        largest = tl.zeros((BLOCK,), tl.float32)
        unknown = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, channels, BLOCK):
            number = start + tl.arange(0, BLOCK)
            floor = _floor(tl.load(bias_pointer + number, mask=number < channels, other=0.0), part, scale)
            unknown = tl.where(floor != floor, 1, unknown)
            largest = tl.where(floor > largest, floor, largest)
        floor = tl.where(tl.max(unknown) > 0, float("nan"), tl.max(largest))
        own = tl.load(weight_scale)
        own = valid_scale(own if weight_unit is None else own * tl.load(weight_unit), weight_half, weight_mask)
        used = tl.maximum(own, valid_scale(floor, up_half, up_mask))
        tl.store(used_scale, used)
        for start in range(0, channels, BLOCK):
            number = start + tl.arange(0, BLOCK)
            bias = tl.load(bias_pointer + number, mask=number < channels, other=0.0)
            tl.store(error + number, _bias_error(bias, scale * used, limit), mask=number < channels)


@triton.jit
def _grow(value, smallest, magnitude, ratio, exist):
    """Of what is finite: write the ratio to the magnitude before, or 1 where that is 0; and the new one."""
    value = tl.where(value < smallest, smallest, value)
    before = tl.load(magnitude, mask=exist, other=0.0)
    value = tl.where(tl.abs(value) < float("inf"), value, before)
    tl.store(ratio, tl.where(before > 0.0, tl.div_rn(value, before), 1.0), mask=exist)
    tl.store(magnitude, value, mask=exist)


@triton.jit
def _largest(low, high, factor, number, exist, HAS_FACTOR: tl.constexpr):
    """Of channels: the largest absolute value, from the smallest and the largest value; NaN stays NaN."""
    low = -tl.load(low + number, mask=exist, other=0.0).to(tl.float32)
    high = tl.load(high + number, mask=exist, other=0.0).to(tl.float32)
    value = tl.where((low > high) | (low != low), low, high)
    if HAS_FACTOR:
        value = value * tl.abs(tl.load(factor + number, mask=exist, other=0.0))
    return value


@triton.jit(do_not_specialize=["channels"])
def _growth(
    low,
    high,
    factor,
    magnitude,
    ratio,
    channels,
    smallest,
    HAS_FACTOR: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of channels; or all of them, if they have one magnitude."""
    if PER_CHANNEL:
        number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        exist = number < channels
        value = _largest(low, high, factor, number, exist, HAS_FACTOR)
        _grow(value, smallest, magnitude + number, ratio + number, exist)
    else:
        largest = tl.zeros((BLOCK,), tl.float32)
        unknown = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, channels, BLOCK):
            number = start + tl.arange(0, BLOCK)
            value = _largest(low, high, factor, number, number < channels, HAS_FACTOR)
            unknown = tl.where(value != value, 1, unknown)
            largest = tl.where(value > largest, value, largest)
        value = tl.where(tl.max(unknown) > 0, float("nan"), tl.max(largest))
        _grow(value, smallest, magnitude, ratio, True)


def round_bias(
    bias: Tensor,
    input_scale: Tensor,
    weight_scale: Tensor,
    input_unit: Tensor | None,
    weight_unit: Tensor | None,
    input_bits: int,
    weight_bits: int,
    bias_limit: float,
    int32_limit: float,
) -> tuple[Tensor, Tensor]:
    """As :func:`fxqat.fake_quantize.kernels.round_bias`."""
    used_scale, error = torch.empty_like(weight_scale), torch.empty_like(bias)
    roundings = (*rounding(input_bits), *rounding(weight_bits), *rounding(1, up=True))
    per_channel = weight_scale.dim() > 0
    programs = triton.cdiv(bias.numel(), CHANNELS["BLOCK"]) if per_channel else 1
    with on_device_of(bias):
        tensors = (bias, input_scale, weight_scale, input_unit, weight_unit, used_scale, error)
        numbers = (bias.numel(), *roundings, 1.0 / bias_limit, int32_limit)
        _round_bias[(programs,)](*tensors, *numbers, PER_CHANNEL=per_channel, **CHANNELS)
    return used_scale, error


def growth(weight: Tensor, factor: Tensor | None, magnitude: Tensor, axis: int | None, smallest: float) -> Tensor:
    """As :func:`fxqat.fake_quantize.kernels.growth`."""
    per_channel = magnitude.dim() > 0
    low, high = min_max_of(weight, axis if per_channel or factor is not None else None)
    ratio = torch.empty_like(magnitude)
    programs = triton.cdiv(low.numel(), CHANNELS["BLOCK"]) if per_channel else 1
    with on_device_of(weight):
        tensors = (low, high, factor, magnitude, ratio)
        kinds = {"HAS_FACTOR": factor is not None, "PER_CHANNEL": per_channel}
        _growth[(programs,)](*tensors, low.numel(), smallest, **kinds, **CHANNELS)
    return ratio

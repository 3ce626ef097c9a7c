"""The kernels of :mod:`fxqat.fake_quantize.kernels` for tensors on a GPU, in Triton.

They are imported when the first tensor on a GPU is rounded; torch for CUDA brings Triton along. The formulas are those
of :mod:`~fxqat.fake_quantize.straight_through`, and the forward results have the same bits (but for the sign of zero,
where 0 is the end of the range). Sums are added in a fixed order: the same tensors give the same gradients.

A tensor is (outer, channels, inner) in memory; a program of the GPU takes elements of one channel. They are float32,
float16 or bfloat16, and everything is computed in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fxqat.fake_quantize.layout import PER_CHANNEL_BITS, Layout, with_strides_of
from fxqat.fake_quantize.triton_math import EXACT, limited, nearest_integer, on_device_of, valid_scale
from fxqat.numerics import EDGE, rounding

FORWARD = {"BLOCK": 1024, "num_warps": 4, **EXACT}
BACKWARD = {"BLOCK": 2048, "num_warps": 8, **EXACT}
"""The elements that a program takes at a time (a block), and its threads / 32: the fastest of some tried on an H200."""

BLOCKS, PROGRAMS = 4, 8192
"""Of the backward pass: blocks of a program, at least; and programs, at most, unless there are more channels."""

BELOW, ABOVE, NOT_A_NUMBER, HALF_STEP = (tl.constexpr(float(code)) for code in (-128, 127, -127, 126))
"""The codes of ``kernels.c``."""

BEYOND = tl.constexpr(EDGE)
"""How far beyond the range an element may be and count as inside, in steps."""

SHIFT = tl.constexpr(1.5 * 2.0**23)
"""Added to a number below 2**22, it leaves no room for a fraction."""


@triton.jit
def _nearest_small_integer(value):
    """The same below 2**22, in fewer operations."""
    nearest = (value + SHIFT) - SHIFT
    return tl.where(nearest == 0.0, value * 0.0, nearest)


@triton.jit
def _steps(x, grid, offset, quant_min, quant_max):
    """``x / grid``; that as an integer, less the zero point; and whether x is below and above the range."""
    q = tl.div_rn(x, grid)
    rounded = _nearest_small_integer(limited(q, quant_min - offset, quant_max - offset))
    return q, rounded, q + offset <= quant_min - BEYOND, q + offset >= quant_max + BEYOND


@triton.jit
def _places(first, channel, size, channels, inner, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Where the elements of a channel from ``first`` on lie, a block of them, and which of them exist."""
    number = first + tl.arange(0, BLOCK)
    if ROWS:
        row = number // inner
        return (row * channels + channel) * inner + (number - row * inner), number < size
    return channel * size + number, number < size


@triton.jit(
    do_not_specialize=[
        "channels",
        "blocks",
        "half",
        "mask",
        "low",
        "high",
        "step",
        "of_scale",
        "of_zero_point",
        "of_factor",
        "of_used_scale",
        "of_unit_scale",
    ]
)
def _forward(
    x_pointer,
    result,
    codes,
    table,
    scale,
    zero_point,
    factor,
    used_scale,
    unit_scale,
    size,
    channels,
    inner,
    blocks,
    quant_min,
    quant_max,
    half,
    mask,
    low,
    high,
    step,
    of_scale,
    of_zero_point,
    of_factor,
    of_used_scale,
    of_unit_scale,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of a channel. The five numbers before the flags are 1 if a tensor has a value per channel, else 0."""
    program = tl.program_id(0).to(tl.int64)
    channel = program // blocks
    own = tl.load(scale + channel * of_scale)
    if unit_scale is not None:
        unit = tl.load(unit_scale + channel * of_unit_scale)
        own = own * unit
    used = valid_scale(own, half, mask) if used_scale is None else tl.load(used_scale + channel * of_used_scale)
    grid = used
    if factor is not None:
        grid = tl.div_rn(used, tl.load(factor + channel * of_factor))
    offset = tl.abs(grid) * 0.0
    if zero_point is not None:
        value = tl.load(zero_point + channel * of_zero_point)
        value = tl.where(value != value, quant_min, value)
        offset = limited(nearest_integer(tl.div_rn(value, step)), low, high) * step
    if program == channel * blocks:
        tl.store(table + channel, grid)
        tl.store(table + channels + channel, offset)
        learned = tl.where(own.to(tl.int32, bitcast=True) < 0, -tl.abs(used), tl.abs(used))
        if unit_scale is not None:
            learned = tl.div_rn(learned, unit)
        tl.store(table + 2 * channels + channel, learned)
    places, exist = _places((program - channel * blocks) * BLOCK, channel, size, channels, inner, ROWS, BLOCK)
    x = tl.load(x_pointer + places, mask=exist, other=0.0).to(tl.float32)
    q, rounded, below, above = _steps(x, grid, offset, quant_min, quant_max)
    tl.store(result + places, rounded * grid, mask=exist)
    if codes is not None:
        code = tl.where(q != q, NOT_A_NUMBER, _nearest_small_integer((rounded - q) * (2 * HALF_STEP)))
        code = tl.where(above, ABOVE, tl.where(below, BELOW, code))
        tl.store(codes + places, code.to(tl.int8), mask=exist)


@triton.jit(do_not_specialize=["channels", "blocks"])
def _forward_again(
    x_pointer,
    result,
    table,
    size,
    channels,
    inner,
    blocks,
    quant_min,
    quant_max,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of a channel."""
    program = tl.program_id(0).to(tl.int64)
    channel = program // blocks
    grid, offset = tl.load(table + channel), tl.load(table + channels + channel)
    places, exist = _places((program - channel * blocks) * BLOCK, channel, size, channels, inner, ROWS, BLOCK)
    x = tl.load(x_pointer + places, mask=exist, other=0.0).to(tl.float32)
    _, rounded, _, _ = _steps(x, grid, offset, quant_min, quant_max)
    tl.store(result + places, rounded * grid, mask=exist)


@triton.jit
def _finite_or_zero(value):
    single = value.to(tl.float32)
    return tl.where(tl.abs(single) < float("inf"), single, 0.0)


@triton.jit(do_not_specialize=["channels", "programs", "blocks"])
def _backward(
    saved,
    grad_pointer,
    result,
    sums,
    grad_scale,
    grad_zero_point,
    table,
    size,
    channels,
    inner,
    programs,
    blocks,
    quant_min,
    quant_max,
    multiplier,
    IS_CODES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some blocks of a channel: gradients and their sums; or what the sums give, if these blocks are all of it."""
    program = tl.program_id(0).to(tl.int64)
    channel = program // programs
    grid, offset = tl.load(table + channel), tl.load(table + channels + channel)
    by_ratio = tl.zeros((BLOCK,), tl.float32)
    left_out = tl.zeros((BLOCK,), tl.float32)
    first = (program - channel * programs) * blocks * BLOCK
    for number in range(blocks):
        places, exist = _places(first + number * BLOCK, channel, size, channels, inner, ROWS, BLOCK)
        grad = tl.load(grad_pointer + places, mask=exist, other=0.0).to(tl.float32)
        value = tl.load(saved + places, mask=exist, other=0).to(tl.float32)
        if IS_CODES:
            outside = (value == BELOW) | (value == ABOVE)
            inside = tl.where(value == NOT_A_NUMBER, float("nan"), value * (0.5 / HALF_STEP))
            ratio = tl.where(outside, tl.where(value < 0.0, quant_min, quant_max) - offset, inside)
        else:
            q, rounded, below, above = _steps(value, grid, offset, quant_min, quant_max)
            outside = below | above
            ratio = tl.where(outside, rounded + (value - value), rounded - q)  # NaN if x is infinite
        passed = tl.where(outside, 0.0, grad)
        tl.store(result + places, passed, mask=exist)
        # an infinite gradient inside makes NaN of the sum outside, too: it moves neither scale nor zero point
        by_ratio += tl.where(exist, grad * ratio, 0.0)
        left_out += grad - passed
    scaled, shifted = tl.sum(by_ratio), tl.sum(left_out)
    if sums is None:
        learned = tl.load(table + 2 * channels + channel)
        if grad_scale is not None:
            tl.store(grad_scale + channel, _finite_or_zero(scaled * tl.div_rn(grid, learned) * multiplier))
        if grad_zero_point is not None:
            tl.store(grad_zero_point + channel, _finite_or_zero(-shifted * grid * multiplier))
    else:
        tl.store(sums + 2 * program, scaled)
        tl.store(sums + 2 * program + 1, shifted)


@triton.jit(do_not_specialize=["channels", "programs", "count"])
def _total(sums, grad_scale, grad_zero_point, table, channels, programs, count, multiplier, BLOCK: tl.constexpr):
    """The gradients of one scale and zero point from the sums of ``count`` programs."""
    first = tl.program_id(0).to(tl.int64) * count
    of_scale = tl.zeros((BLOCK,), tl.float64)
    of_zero_point = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, count, BLOCK):
        number = start + tl.arange(0, BLOCK)
        exist = number < count
        channel = (first + number) // programs
        grid = tl.load(table + channel, mask=exist, other=0.0).to(tl.float64)
        learned = tl.load(table + 2 * channels + channel, mask=exist, other=1.0).to(tl.float64)
        scaled = tl.load(sums + 2 * (first + number), mask=exist, other=0.0).to(tl.float64)
        shifted = tl.load(sums + 2 * (first + number) + 1, mask=exist, other=0.0).to(tl.float64)
        of_scale += scaled * (grid / learned)
        of_zero_point -= shifted * grid
    if grad_scale is not None:
        tl.store(grad_scale + tl.program_id(0), _finite_or_zero(tl.sum(of_scale) * multiplier))
    if grad_zero_point is not None:
        tl.store(grad_zero_point + tl.program_id(0), _finite_or_zero(tl.sum(of_zero_point) * multiplier))


def forward(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    factor: Tensor | None,
    used_scale: Tensor | None,
    unit_scale: Tensor | None,
    where: Layout,
    quant_min: int,
    quant_max: int,
    zero_point_step: int,
    scale_bits: int,
    with_codes: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As :func:`fxqat.fake_quantize.kernels.forward`; x_hat has x's dtype."""
    x_hat = torch.empty_like(x)
    table = torch.empty((3, where.channels), dtype=torch.float32, device=x.device)
    codes = torch.empty_like(x_hat, dtype=torch.int8) if with_codes else None
    size = where.outer * where.inner
    blocks = triton.cdiv(size, FORWARD["BLOCK"])
    with on_device_of(x):
        _forward[(where.channels * blocks,)](
            with_strides_of(x_hat, x),
            x_hat,
            codes,
            table,
            scale,
            zero_point,
            factor,
            used_scale,
            unit_scale,
            size,
            where.channels,
            where.inner,
            blocks,
            float(quant_min),
            float(quant_max),
            *rounding(scale_bits),
            float(-(-quant_min // zero_point_step)),
            float(quant_max // zero_point_step),
            float(zero_point_step),
            *(int(where.per_channel & bit > 0) for bit in PER_CHANNEL_BITS),
            ROWS=where.outer > 1,
            **FORWARD,
        )
    return x_hat, table, codes


def forward_again(x: Tensor, table: Tensor, where: Layout, quant_min: int, quant_max: int) -> Tensor:
    """As :func:`fxqat.fake_quantize.kernels.forward_again`."""
    x_hat = torch.empty_like(x)
    size = where.outer * where.inner
    blocks = triton.cdiv(size, FORWARD["BLOCK"])
    numbers = (size, where.channels, where.inner, blocks, float(quant_min), float(quant_max))
    with on_device_of(x):
        tensors = (with_strides_of(x_hat, x), x_hat, table)
        _forward_again[(where.channels * blocks,)](*tensors, *numbers, ROWS=where.outer > 1, **FORWARD)
    return x_hat


def backward(
    saved: Tensor,
    grad: Tensor,
    table: Tensor,
    where: Layout,
    quant_min: int,
    quant_max: int,
    grad_scale: float,
    needs_scale: bool,
    needs_zero_point: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """As :func:`fxqat.fake_quantize.kernels.backward`; the gradient of x has the dtype of ``grad``."""
    grad_x = torch.empty_like(saved, dtype=grad.dtype)
    size = where.outer * where.inner
    blocks = triton.cdiv(size, BACKWARD["BLOCK"])
    per_program = max(BLOCKS, triton.cdiv(blocks * where.channels, PROGRAMS))
    programs = triton.cdiv(blocks, per_program)
    shared = where.channels > 1 and not where.per_channel & PER_CHANNEL_BITS[0]
    grads = [
        torch.empty((where.channels,) if where.per_channel & bit else (), dtype=torch.float32, device=grad.device)
        if needed
        else None
        for bit, needed in zip(PER_CHANNEL_BITS, (needs_scale, needs_zero_point), strict=False)
    ]
    sums = None
    if programs > 1 or shared:
        sums = torch.empty((where.channels * programs, 2), dtype=torch.float32, device=grad.device)
    with on_device_of(grad):
        _backward[(where.channels * programs,)](
            with_strides_of(grad_x, saved),
            with_strides_of(grad_x, grad),
            grad_x,
            sums,
            *grads,
            table,
            size,
            where.channels,
            where.inner,
            programs,
            min(blocks, per_program),
            float(quant_min),
            float(quant_max),
            grad_scale,
            IS_CODES=saved.dtype == torch.int8,
            ROWS=where.outer > 1,
            **BACKWARD,
        )
        if sums is not None and (needs_scale or needs_zero_point):
            count = where.channels * programs if shared else programs
            numbers = (where.channels, programs, count, grad_scale)
            _total[(1 if shared else where.channels,)](sums, *grads, table, *numbers, **FORWARD)
    return grad_x, grads[0], grads[1]

"""What the kernels for GPUs share: rounding and clamping as torch computes them, in Triton."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from fxqat.numerics import SCALE_PATTERNS

EXACT = {"enable_fp_fusion": False}
"""A product and a sum are rounded one after the other."""

SMALLEST, LARGEST = (tl.constexpr(pattern) for pattern in SCALE_PATTERNS)
WHOLE = tl.constexpr(2.0**23)
"""From here on, every float32 is an integer."""


@triton.jit
def nearest_integer(value):
    """Halves to even; the sign of zero, NaN and infinity stay."""
    whole = tl.where(value < 0.0, -WHOLE, WHOLE)
    nearest = tl.where(tl.abs(value) < WHOLE, (value + whole) - whole, value)
    return tl.where(nearest == 0.0, value * 0.0, nearest)


@triton.jit
def limited(value, low, high):
    """NaN stays NaN."""
    value = tl.where(value < low, low, value)
    return tl.where(value > high, high, value)


@triton.jit
def valid_scale(scale, half, mask):
    """``numerics.valid_scale``; half and mask are from ``numerics.rounding``."""
    pattern = (scale.to(tl.int32, bitcast=True) + half) & mask
    return tl.minimum(tl.maximum(pattern, SMALLEST), LARGEST).to(tl.float32, bitcast=True)


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Triton starts programs on the current device."""
    if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return nullcontext()

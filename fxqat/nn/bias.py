"""The bias as integer hardware holds it: int32 at the scale of the products that it is added to."""

from __future__ import annotations

import torch
from torch import Tensor

from fxqat.numerics import valid_scale

INT32_LIMIT = 2147483520.0
"""Largest float32 below 2**31: the largest bias integer, and minus it the smallest."""

BIAS_LIMIT = 2.0**30
"""Where the repair keeps bias integers, so that an int32 accumulator has room for the products."""


def weight_scale_floor(bias: Tensor, input_scale: Tensor) -> Tensor:
    """The smallest weight scale at which the bias fits into int32.

    Formula: ``|bias| / (BIAS_LIMIT * input_scale)``: half of the range is left to the products. A weight scale below
    it belongs to a (nearly) dead channel; it is raised, as ONNX Runtime's quantizer does, because the bias matters
    there and the weights do not.

    Args:
        bias: ``(out_channels,)``.
        input_scale: ``()``.

    Returns:
        ``(out_channels,)``.
    """
    with torch.no_grad():
        return bias.abs().mul_(1.0 / BIAS_LIMIT).div_(input_scale)


def quantize_bias(bias: Tensor, scale: Tensor) -> Tensor:
    """Bias integers in float32: ``clamp(round_half_even(bias / scale), -INT32_LIMIT, INT32_LIMIT)``."""
    return torch.div(bias, scale).round_().clamp_(-INT32_LIMIT, INT32_LIMIT)


def fake_quantize_bias(bias: Tensor, scale: Tensor) -> Tensor:
    """The bias as the exported file has it; the gradient passes straight through."""
    with torch.no_grad():
        error = quantize_bias(bias, scale).mul_(scale).sub_(bias)
    return bias + error


def floor_for(weight_scale: Tensor, floor: Tensor, groups: int) -> Tensor:
    """The per-output-channel floor in the shape of the weight scale, whose entries several channels may share.

    Rounded up to powers of two, which are scales of any number of significant bits.
    """
    if weight_scale.dim() == 0:
        floor = floor.amax()
    elif groups > 1:
        floor = floor.reshape(groups, -1).amax(0)
    return valid_scale(floor, bits=1, up=True)

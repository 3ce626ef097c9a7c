"""The bias as integer hardware stores it: int32 with scale ``input scale * weight scale``."""

from __future__ import annotations

import torch
from torch import Tensor

from fxqat.fake_quantize import kernel_ops, kernels
from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.numerics import valid_scale

INT32_LIMIT = 2147483520.0
"""Largest float32 below 2**31. Bias integers are within ``[-INT32_LIMIT, INT32_LIMIT]``."""

BIAS_LIMIT = 2.0**30
"""Largest bias integer after the weight scale is raised, so that the int32 accumulator has room for the products."""


def weight_scale_floor(bias: Tensor, input_scale: Tensor) -> Tensor:
    """The smallest weight scale at which the bias fits into int32.

    Formula: ``|bias| / (BIAS_LIMIT * input_scale)``, which leaves half of the range for the products. A smaller weight
    scale belongs to a (nearly) dead channel. It is raised, as in ONNX Runtime's quantizer, because there the bias
    matters and the weights do not.

    Args:
        bias: ``(out_channels,)``, real units.
        input_scale: ``()``, real units per step.

    Returns:
        ``(out_channels,)``.
    """
    with torch.no_grad():
        return bias.abs().mul_(1.0 / BIAS_LIMIT).div_(input_scale)


def quantize_bias(bias: Tensor, scale: Tensor) -> Tensor:
    """Bias integers, as float32: ``clamp(round_half_even(bias / scale), -INT32_LIMIT, INT32_LIMIT)``."""
    return torch.div(bias, scale).round_().clamp_(-INT32_LIMIT, INT32_LIMIT)


def fake_quantize_bias(bias: Tensor, scale: Tensor) -> Tensor:
    """The bias of the exported file; the gradient passes straight through."""
    with torch.no_grad():
        error = quantize_bias(bias, scale).mul_(scale).sub_(bias)
    return bias + error


def round_bias(
    bias: Tensor, input_fake_quant: FakeQuantizeBase, weight_fake_quant: FakeQuantizeBase
) -> tuple[Tensor, Tensor] | None:
    """The raised weight scale and the error of :func:`fake_quantize_bias`, by the compiled kernels.

    Args:
        bias: the folded bias, ``(out_channels,)``.
        input_fake_quant: the fake-quant of the layer's input.
        weight_fake_quant: that of its weight.

    Returns:
        ``(weight_scale, error)``, of the shapes of the weight's scale and the bias; None if the operators of this file
        must compute them.
    """
    (input_scale, input_unit), (weight_scale, weight_unit) = (
        quant.scale_and_unit() for quant in (input_fake_quant, weight_fake_quant)
    )
    tensors = (bias, input_scale, weight_scale, input_unit, weight_unit)
    numbers = (input_fake_quant.scale_bits, weight_fake_quant.scale_bits, BIAS_LIMIT, INT32_LIMIT)
    if input_scale.dim() == 0 and kernel_ops.taken(bias, tensors[1:], axis=0):
        detached = (None if tensor is None else tensor.detach() for tensor in tensors)
        found: tuple[Tensor, Tensor] = kernel_ops.round_bias(*detached, *numbers)
        return found
    return kernels.round_bias(*tensors, *numbers)


def floor_for(weight_scale: Tensor, floor: Tensor, groups: int) -> Tensor:
    """The floor of every output channel, reduced to the shape of the weight scale (several channels may share a scale).

    It is rounded up to powers of two, which are valid scales for any number of significant bits.
    """
    if weight_scale.dim() == 0:
        floor = floor.amax()
    elif groups > 1:
        floor = floor.reshape(groups, -1).amax(0)
    return valid_scale(floor, bits=1, up=True)

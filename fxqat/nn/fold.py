"""Folding BatchNorm into the layer before it.

With ``k = gamma / sqrt(running_var + eps)``::

    BN(W x + b) = k * (W x + b - running_mean) + beta
                = (k W) x + (beta + k * (b - running_mean))
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxqat.fake_quantize import kernel_ops, kernels
from fxqat.fake_quantize.torch_ops import keep
from fxqat.nn.weighted import WeightedOp
from fxqat.utils.tensors import widened
from fxqat.utils.torch_compat import BatchNorm

NOTHING = 2.0**-24
"""A factor of at most so much of the largest one is as good as 0."""


def bn_factor(bn: BatchNorm) -> Tensor:
    """The factor ``k`` of every output channel, shape ``(channels,)``; at least float32."""
    assert bn.running_var is not None  # the fuse pass fuses no other BatchNorm
    inverse = torch.rsqrt(widened(bn.running_var) + bn.eps)
    return inverse if bn.weight is None else inverse * bn.weight


@torch.no_grad()
def grid_factor(bn: BatchNorm) -> Tensor:
    """The factor ``k`` as the divisor of a weight's grid. It has no gradient.

    Where ``k`` is 0, or nothing beside the largest one, it is the largest one (1, if all are 0): the folded weight has
    no range there, but without one gamma has no gradient and stays 0. Many new residual networks have a gamma of 0 in
    the last BatchNorm of a block.

    A compiled training step does not compute it again in the backward pass, when the forward pass has updated the
    statistics.
    """
    variance, gamma = bn.running_var, bn.weight
    assert variance is not None
    if kernel_ops.taken(variance, (gamma,), axis=0):
        found: Tensor = kernel_ops.bn_factor(variance, None if gamma is None else gamma.detach(), bn.eps)
        return found
    factor = kernels.bn_factor(variance, gamma, bn.eps)
    if factor is None:
        factor = bn_factor(bn)
        size = factor.abs()
        largest = size.nan_to_num(0.0, 0.0, 0.0).amax()
        largest = torch.where(largest > 0, largest, 1.0)
        factor = torch.where(size <= largest * NOTHING, largest, factor)
    return keep(factor) if torch.compiler.is_compiling() else factor


def fold_bias(bias: Tensor | None, bn: BatchNorm, factor: Tensor) -> Tensor:
    """The bias of the folded layer, shape ``(channels,)``."""
    assert bn.running_mean is not None
    centred = -bn.running_mean if bias is None else bias - bn.running_mean
    shift = centred * factor
    return shift if bn.bias is None else shift + bn.bias


def fold_bn(op: WeightedOp, weight: Tensor, bias: Tensor | None, bn: BatchNorm) -> tuple[Tensor, Tensor]:
    """Weight and bias of the one layer that computes ``bn(layer(x))`` with the running statistics.

    Args:
        op: the layer.
        weight: its weight, e.g. ``(out, in / groups, *kernel)``.
        bias: ``(out,)`` or None.
        bn: a BatchNorm that tracks running statistics.

    Returns:
        ``(weight, bias)`` of the same shapes.
    """
    factor = bn_factor(bn)
    return weight * op.per_output_channel(factor, weight), fold_bias(bias, bn, factor)

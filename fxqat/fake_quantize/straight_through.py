"""Fake-quantization with straight-through gradients, for fixed and for learned parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fxqat.numerics import dynamic_quantize, fake_quantize, per_axis, valid_scale, valid_zero_point
from fxqat.scheme import FLOAT32_BITS

SMALL = 2**16
"""Up to this many elements, the input is saved for the backward pass as it is."""


class FakeQuantizeSTE(torch.autograd.Function):
    """``x_hat = fake_quantize(x)`` with gradients for x, scale and zero point.

    The grid is ``s = used_scale / factor``. ``used_scale`` defaults to ``valid_scale(scale, scale_bits)``; a weight
    whose scale was raised gives another one. With ``q = x / s + zero_point``, ``g`` the incoming gradient, and "inside"
    meaning quant_min < q < quant_max, the gradients are:

    * x: g inside, 0 outside (straight-through estimator);
    * s: sum of ``g * (x_hat - x) / s`` inside and ``g * x_hat / s`` outside; that of ``scale`` by the chain rule;
    * zero_point: sum of ``-g * s`` outside.

    The gradients of scale and zero point are multiplied by ``grad_scale``. NaN and infinity in them become 0, so that
    one bad batch cannot destroy a learned parameter. Everything is computed in float32, also for half-precision x; the
    result has x's dtype. ``factor`` and ``used_scale`` are constants here. The gradient passes straight through the
    rounding of the scale to its significant bits, and through that of the zero point to a multiple of
    ``zero_point_step``.

    ``input_kept`` means that another op keeps x after the forward pass. If none does, ``x_hat - x`` is saved in
    bfloat16 instead of x in float32; the backward pass then knows x to 1/500 of a step. A small x is saved as it is,
    because one more operation in each pass costs more than its memory.

    Source: Bengio et al. 2013 (arXiv:1308.3432); Esser et al. 2020, LSQ (arXiv:1902.08153), equations 2 to 4;
    Bhalgat et al. 2020, LSQ+ (arXiv:2004.09576), equations 4 and 5.
    """

    @staticmethod
    def forward(  # noqa: D102  described by the class
        ctx: Any,
        x: Tensor,
        scale: Tensor,
        zero_point: Tensor | None,
        factor: Tensor | None,
        used_scale: Tensor | None,
        quant_min: int,
        quant_max: int,
        axis: int | None,
        grad_scale: float,
        scale_bits: int = FLOAT32_BITS,
        input_kept: bool = True,
        zero_point_step: int = 1,
    ) -> Tensor:
        if used_scale is None:
            used_scale = valid_scale(scale, scale_bits)
        grid = used_scale if factor is None else used_scale / factor
        offset = None if zero_point is None else valid_zero_point(zero_point, quant_min, quant_max, zero_point_step)
        x_hat = fake_quantize(x, grid, offset, quant_min, quant_max, axis)
        # the next layer keeps x_hat alive; in half precision it is cheaper to compute it again
        full_precision = x.dtype == torch.float32
        saved, saved_x_hat = x, x_hat if full_precision else None
        input_kept = input_kept or (x.numel() <= SMALL and not torch.compiler.is_compiling())
        if full_precision and not input_kept:
            saved = torch.sub(x_hat, x, out=torch.empty_like(x, dtype=torch.bfloat16))
        ctx.save_for_backward(saved, scale, used_scale, grid, offset, saved_x_hat)
        ctx.range = (quant_min, quant_max, axis, grad_scale)
        ctx.input_kept = input_kept
        return x_hat if full_precision else x_hat.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        # once_differentiable costs time at every call and matters only under create_graph
        return (_gradients_once if torch.is_grad_enabled() else _gradients)(ctx, grad)


class DynamicQuantizeSTE(torch.autograd.Function):
    """Rounds a tensor by its own range (:func:`fxqat.numerics.dynamic_quantize`); the gradient passes through as it is.

    The range holds all values, so none is outside of it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: D102  described by the class
        q, scale, zero_point = dynamic_quantize(x)
        return q.sub_(zero_point).mul_(scale).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: D102
        return grad


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, scale, used_scale, grid, offset, x_hat = ctx.saved_tensors
    quant_min, quant_max, axis, grad_scale = ctx.range
    dtype, full_precision = grad.dtype, x_hat is not None
    if not full_precision:
        x, grad = x.float(), grad.float()
    elif not ctx.input_kept:
        x = torch.sub(x_hat, x)
    scratch = torch.div(x, per_axis(grid, x.dim(), axis))
    if offset is not None:
        scratch.add_(per_axis(offset, x.dim(), axis))
    if grad.stride() != scratch.stride():
        grad = torch.empty_like(scratch).copy_(grad)
    # hardtanh's backward applies the mask "strictly between two numbers" in a single pass
    grad_x = torch.ops.aten.hardtanh_backward(grad, scratch, quant_min, quant_max)
    grad_s = grad_z = None
    if ctx.needs_input_grad[2]:
        outside = _sum_like(torch.sub(grad_x, grad), grid, axis).mul_(grid)
        grad_z = _sum_like(outside, offset, 0).mul_(grad_scale).nan_to_num_(0.0, 0.0, 0.0)
    if ctx.needs_input_grad[1]:
        if not full_precision:
            x_hat = fake_quantize(x, grid, offset, quant_min, quant_max, axis)
        # inside g * x_hat - g * x, outside g * x_hat
        scratch = torch.mul(grad, x_hat, out=scratch).addcmul_(grad_x, x, value=-1.0)
        # chain rule through s = |scale| / factor: the factor cancels
        grad_s = _sum_like(_sum_like(scratch, grid, axis).div_(torch.copysign(used_scale, scale)), scale, 0)
        grad_s = grad_s.mul_(grad_scale).nan_to_num_(0.0, 0.0, 0.0)
    return grad_x if full_precision else grad_x.to(dtype), grad_s, grad_z, *[None] * 9


_gradients_once = once_differentiable(_gradients)


def _sum_like(values: Tensor, like: Tensor, axis: int | None) -> Tensor:
    """Sum a tensor to the shape of ``like``: ``()``, or ``(channels,)`` along ``axis``.

    A tensor of that shape is returned as it is.
    """
    if like.dim() == 0:
        return values.sum()
    if axis is None or values.dim() == 1:
        return values
    axis = axis % values.dim()
    return values.sum([d for d in range(values.dim()) if d != axis])

"""Fake-quantization with straight-through gradients, for fixed and for learned parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fxqat.fake_quantize import kernel_ops, kernels
from fxqat.fake_quantize.layout import with_strides_of
from fxqat.numerics import EDGE, dynamic_quantize, fake_quantize, per_axis, valid_scale, valid_zero_point
from fxqat.scheme import FLOAT32_BITS
from fxqat.utils.torch_compat import has_saving_hooks

SMALL = 2**16
"""Up to this many elements, the input is saved for the backward pass as it is."""

SMALL_FOR_CODES = 2**12
"""The same where the kernels would save 8 bits: few elements have few errors that cancel out."""

FLOAT16_MAX = 65504
"""The largest finite float16."""

NONES = (None,) * 10
"""The gradients of the arguments after the zero point."""


class FakeQuantizeSTE(torch.autograd.Function):
    """``x_hat = fake_quantize(x)`` with gradients for x, scale and zero point.

    The grid is ``s = used_scale / factor``. ``used_scale`` defaults to ``valid_scale(scale * unit_scale, scale_bits)``;
    a weight whose scale was raised gives another one. With ``q = x / s + zero_point``, ``g`` the incoming gradient, and
    "inside" meaning quant_min <= q <= quant_max, but for the error of a quotient, the gradients are:

    * x: g inside, 0 outside (straight-through estimator);
    * s: sum of ``g * (x_hat - x) / s`` inside and ``g * x_hat / s`` outside; that of ``scale`` by the chain rule;
    * zero_point: sum of ``-g * s`` outside.

    The gradients of scale and zero point are multiplied by ``grad_scale``. NaN and infinity in them become 0, so that
    one bad batch cannot destroy a learned parameter. Everything is computed in float32, also for half-precision x; the
    result has x's dtype. ``factor``, ``used_scale`` and ``unit_scale`` are constants here. The gradient passes straight
    through the rounding of the scale to its significant bits, and through that of the zero point to a multiple of
    ``zero_point_step``.

    ``input_kept`` means that another op keeps x after the forward pass, so that saving it costs no memory. If none
    does, what the backward pass needs of x is saved instead: whether it is outside, and the ratio
    ``r = (x_hat - x) / s`` inside, which :mod:`~fxqat.fake_quantize.kernels` saves in 8 bits, to 1/504 of a step: the
    gradient of s is within ``sum(|g|) / 504`` of the exact one, and unbiased where x is spread over the step. Torch's
    operators save the ratios in 16 bits, to 1/4000 of a step, and ``x_hat / s`` outside; an element is inside if
    ``|r| < 3/4``. They save a small x as it is, because more operations cost more than its memory.

    Source: Bengio et al. 2013 (arXiv:1308.3432); Esser et al. 2020, LSQ (arXiv:1902.08153), equations 2 to 4;
    Bhalgat et al. 2020, LSQ+ (arXiv:2004.09576), equations 4 and 5. The papers count the two ends of the range as
    outside. Here they are inside, as for ``torch.clamp``: a scalar parameter, a parameter of equal values and a binary
    value lie there entirely, and would have no gradient.
    """

    @staticmethod
    def forward(  # noqa: D102  described by the class
        ctx: Any,
        x: Tensor,
        scale: Tensor,
        zero_point: Tensor | None,
        factor: Tensor | None,
        used_scale: Tensor | None,
        unit_scale: Tensor | None,
        quant_min: int,
        quant_max: int,
        axis: int | None,
        grad_scale: float,
        scale_bits: int = FLOAT32_BITS,
        input_kept: bool = True,
        zero_point_step: int = 1,
    ) -> Tensor:
        ctx.range = (quant_min, quant_max, axis, grad_scale)
        ctx.dims = (scale.dim(), 0 if zero_point is None else zero_point.dim())
        ctx.layout = kernels.layout(x, scale, zero_point, factor, used_scale, unit_scale, axis)
        given = (scale, zero_point, factor, used_scale, unit_scale)
        in_operators = ctx.layout is None and kernel_ops.taken(x, given, axis)
        ctx.per_channel = kernel_ops.per_channel_bits(given) if in_operators else None
        if ctx.layout is not None or in_operators:
            ctx.input_kept = input_kept or x.numel() <= SMALL_FOR_CODES or not any(ctx.needs_input_grad)
        if in_operators:
            numbers = (quant_min, quant_max, axis, zero_point_step, scale_bits, not ctx.input_kept)
            x_hat, table, codes = kernel_ops.round_tensor(x, *given, *numbers)
            ctx.save_for_backward(table, x if ctx.input_kept else codes)
            return x_hat  # type: ignore[no-any-return]
        if ctx.layout is not None:
            parameters: Any = (ctx.layout, quant_min, quant_max, zero_point_step, scale_bits, not ctx.input_kept)
            x_hat, table, codes = kernels.forward(x, *given, *parameters)
            ctx.save_for_backward(table, x if codes is None else codes)
            return x_hat
        if unit_scale is not None:
            scale = scale * unit_scale
        if used_scale is None:
            used_scale = valid_scale(scale, scale_bits)
        grid = used_scale if factor is None else used_scale / factor
        offset = None if zero_point is None else valid_zero_point(zero_point, quant_min, quant_max, zero_point_step)
        learned = torch.copysign(used_scale, scale)
        if unit_scale is not None:
            learned = learned / unit_scale
        ctx.input_kept = input_kept or (x.numel() <= SMALL and not torch.compiler.is_compiling())
        if ctx.input_kept:
            x_hat = fake_quantize(x, grid, offset, quant_min, quant_max, axis)
            # the next layer keeps x_hat alive; in half precision it is cheaper to compute it again
            ctx.save_for_backward(learned, grid, offset, x, x_hat if x.dtype == torch.float32 else None)
        else:
            x_hat, ratios = _with_ratios(x, grid, offset, quant_min, quant_max, axis)
            ctx.save_for_backward(learned, grid, offset, ratios)
        return x_hat.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        if grad.is_sparse:  # of a lookup with sparse=True; the scale's gradient is a sum over all rows
            grad = grad.to_dense()
        # once_differentiable costs time at every call and matters only under create_graph
        return (_gradients_once if torch.is_grad_enabled() else _gradients)(ctx, grad)


def fake_quantize_ste(*arguments: Any) -> Tensor:
    """Apply :class:`FakeQuantizeSTE`, of the same arguments.

    A compiler's first stage takes a call as a single node. It would trace the forward and the backward pass of every
    call on its own; the next stage does that anyway, in a fraction of the time.
    """
    return FakeQuantizeSTE.apply(*arguments)  # type: ignore[no-any-return]


torch.compiler.allow_in_graph(fake_quantize_ste)


def rounded_again(x_hat: Tensor) -> AbstractContextManager[object]:
    """Within it, the backward pass of an operator that takes ``x_hat`` rounds x once more and does not keep ``x_hat``.

    For weights: x is a parameter, which is there anyway, and rounding is cheap beside the operator. Only where the
    kernels have rounded x, and nothing else (a checkpoint, for one) decides how tensors are saved.

    Args:
        x_hat: the result of :class:`FakeQuantizeSTE` with ``input_kept``.
    """
    if not kernels.usable(x_hat) or x_hat.numel() <= SMALL_FOR_CODES or has_saving_hooks():
        return nullcontext()
    node: Any = x_hat.grad_fn
    if getattr(node, "layout", None) is None or not node.input_kept:
        return nullcontext()
    place = (x_hat.data_ptr(), x_hat.numel())

    def save(tensor: Tensor) -> Tensor | tuple[torch.Size, tuple[int, ...]]:
        return (tensor.shape, tensor.stride()) if (tensor.data_ptr(), tensor.numel()) == place else tensor

    def load(saved: Tensor | tuple[torch.Size, tuple[int, ...]]) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        table, x = node.saved_tensors  # torch raises an error if x was written to since
        return kernels.forward_again(x, table, node.layout, *node.range[:2]).as_strided(*saved)

    return torch.autograd.graph.saved_tensors_hooks(save, load)


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


def _shift(quant_min: int, quant_max: int, offset: Tensor | None) -> int:
    """Added to the saved ratios outside if some of them could be 0, so that all of them are at least 1."""
    return 0 if offset is None and quant_min < 0 < quant_max else 1 - quant_min


def _with_ratios(
    x: Tensor, grid: Tensor, offset: Tensor | None, quant_min: int, quant_max: int, axis: int | None
) -> tuple[Tensor, Tensor]:
    """``x_hat``, as ``fake_quantize`` computes it, and the ratios for the backward pass.

    Returns:
        ``(x_hat, ratios)``, of x's shape: float32; and ``(x_hat - x) / grid`` inside, ``x_hat / grid + offset + shift``
        outside, in 16 bits.
    """
    grid = per_axis(grid, x.dim(), axis)
    shift = _shift(quant_min, quant_max, offset)
    inside = torch.div(x.float(), grid)
    x_hat = torch.round(inside)
    added: Tensor | int = shift
    if offset is None:
        x_hat.clamp_(quant_min, quant_max)
    else:
        offset = per_axis(offset, x.dim(), axis)
        x_hat.clamp_(quant_min - offset, quant_max - offset)
        added = offset + shift
    if shift:
        inside.add_(added)
    inside = _pass_inside(inside, inside, quant_min + shift - EDGE, quant_max + shift + EDGE, out=inside)
    ratios = torch.sub(x_hat, inside, out=_reused(inside))
    if shift:
        ratios.add_(added)
    largest = max(abs(quant_min + shift), abs(quant_max + shift))
    return x_hat.mul_(grid), ratios.to(torch.float16 if largest <= FLOAT16_MAX else torch.bfloat16)


def _reused(out: Tensor | None) -> Tensor | None:
    """The tensor to write to; None for a compiler, which finds memory itself and refuses some layouts of ``out``."""
    return None if torch.compiler.is_compiling() else out


def _pass_inside(values: Tensor, x: Tensor, low: float, high: float, out: Tensor | None = None) -> Tensor:
    """``values`` where x is strictly between two numbers, else 0: hardtanh's backward does it in a single pass."""
    out = _reused(out)
    if out is None:
        return torch.ops.aten.hardtanh_backward(values, x, low, high)  # type: ignore[no-any-return]
    return torch.ops.aten.hardtanh_backward.grad_input(values, x, low, high, grad_input=out)  # type: ignore[no-any-return]


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    quant_min, quant_max, axis, grad_scale = ctx.range
    scale_dim, zero_point_dim = ctx.dims
    of_saved: Callable[..., Sums]
    if ctx.per_channel is not None:
        table, saved = ctx.saved_tensors
        needed = ctx.needs_input_grad[1:3]
        numbers = (axis, ctx.per_channel, quant_min, quant_max, grad_scale, *needed)
        grad_x, *others = kernel_ops.round_backward(saved, grad, table, *numbers)
        return grad_x, *(of if need else None for of, need in zip(others, needed, strict=True)), *NONES
    if ctx.layout is not None:
        table, saved = ctx.saved_tensors
        if kernels.usable(grad):
            needed = ctx.needs_input_grad[1:3]
            return *kernels.backward(saved, grad, table, ctx.layout, quant_min, quant_max, grad_scale, *needed), *NONES
        grid, offset, learned = table if ctx.layout.per_channel else table[:, 0]
        of_saved, saved = (_sums_of_input, (saved, None)) if ctx.input_kept else (_sums_of_codes, (saved,))
    else:
        learned, grid, offset, *saved = ctx.saved_tensors
        of_saved = _sums_of_input if ctx.input_kept else _sums_of_ratios
    dtype, grad = grad.dtype, grad.float()
    grad_x, grad_s, outside = of_saved(ctx, grad, grid, offset, *saved)
    if grad_s is not None:
        # chain rule through s = |scale| * unit_scale / factor: the factor cancels
        grad_s = _sum_to(scale_dim, grad_s.div_(learned), 0)
        grad_s = grad_s.mul_(grad_scale).nan_to_num_(0.0, 0.0, 0.0)
    grad_z = None
    if ctx.needs_input_grad[2]:
        grad_z = _sum_to(zero_point_dim, outside * grid, 0).mul_(grad_scale).nan_to_num_(0.0, 0.0, 0.0)
    return grad_x.to(dtype), grad_s, grad_z, *NONES


Sums = tuple[Tensor, Tensor | None, Tensor | None]
"""The gradient of x, that of ``log(s)``, and minus the sum of g outside; None if nobody needs it."""


def _sums_of_input(
    ctx: Any, grad: Tensor, grid: Tensor, offset: Tensor | None, x: Tensor, x_hat: Tensor | None
) -> Sums:
    quant_min, quant_max, axis, _ = ctx.range
    x = x.float()
    steps = torch.div(x, per_axis(grid, x.dim(), axis))
    if offset is not None:
        steps.add_(per_axis(offset, x.dim(), axis))
    grad = with_strides_of(steps, grad)
    grad_x = _pass_inside(grad, steps, quant_min - EDGE, quant_max + EDGE)
    outside = _sum_to(grid.dim(), torch.sub(grad_x, grad), axis) if ctx.needs_input_grad[2] else None
    if not ctx.needs_input_grad[1]:
        return grad_x, None, outside
    if x_hat is None:
        x_hat = fake_quantize(x, grid, offset, quant_min, quant_max, axis)
    # inside g * x_hat - g * x, outside g * x_hat
    products = torch.mul(grad, x_hat, out=_reused(steps)).addcmul_(grad_x, x, value=-1.0)
    return grad_x, _sum_to(grid.dim(), products, axis), outside


def _sums_of_ratios(ctx: Any, grad: Tensor, grid: Tensor, offset: Tensor | None, saved: Tensor) -> Sums:
    quant_min, quant_max, axis, _ = ctx.range
    ratios = saved.float()
    grad = with_strides_of(ratios, grad)
    grad_x = _pass_inside(grad, ratios, -0.75, 0.75)
    shift = _shift(quant_min, quant_max, offset)
    need_outside = shift or ctx.needs_input_grad[2]
    outside = _sum_to(grid.dim(), torch.sub(grad_x, grad), axis) if need_outside else None
    if not ctx.needs_input_grad[1]:
        return grad_x, None, outside
    total = _sum_to(grid.dim(), ratios.mul_(grad), axis)
    if shift:
        assert outside is not None
        total = total + outside * (shift if offset is None else offset + shift)
    return grad_x, total * grid, outside


def _sums_of_codes(ctx: Any, grad: Tensor, grid: Tensor, offset: Tensor, codes: Tensor) -> Sums:
    """For a gradient that the kernels do not take."""
    quant_min, quant_max, axis, _ = ctx.range
    below, above = codes == kernels.CODE_BELOW, codes == kernels.CODE_ABOVE
    ratios = torch.where(codes == kernels.CODE_NAN, math.nan, codes / kernels.CODES_PER_STEP)
    wide = per_axis(offset, codes.dim(), axis)
    ratios = torch.where(below, quant_min - wide, torch.where(above, quant_max - wide, ratios))
    grad_x = torch.where(below | above, 0.0, grad)
    return (
        grad_x,
        _sum_to(grid.dim(), ratios * grad, axis) * grid,
        _sum_to(grid.dim(), grad_x - grad, axis),
    )


_gradients_once = once_differentiable(_gradients)


def _sum_to(dim: int, values: Tensor, axis: int | None) -> Tensor:
    """Sum a tensor to the shape ``()``, if ``dim`` is 0, or ``(channels,)`` along ``axis``.

    A tensor of that shape is returned as it is.
    """
    if dim == 0:
        return values.sum()
    if axis is None or values.dim() == 1:
        return values
    axis = axis % values.dim()
    return values.sum([d for d in range(values.dim()) if d != axis])

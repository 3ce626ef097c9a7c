"""The kernels for CPUs as torch operators: compiled code calls them.

The compiler could also generate code for fake-quant from torch's operators, in one pass with the operations beside it.
The step would be as fast or a little faster, but compiling it takes longer than the rest of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxqat.fake_quantize import kernels
from fxqat.fake_quantize.layout import PER_CHANNEL_BITS, memory_layout
from fxqat.utils.torch_compat import is_compiling, is_exporting

_LIBRARY = torch.library.Library("fxqat", "FRAGMENT")


def taken(x: Tensor, parameters: Sequence[Tensor | None], axis: int | None = None) -> bool:
    """Whether a compiler is tracing, and the operators of this file can take these tensors.

    Args:
        x: what is rounded; float32, on the CPU.
        parameters: its scales and the like, of the same kind; without dimensions, or one number for each channel.
        axis: the axis of the channels.
    """
    if not is_compiling() or is_exporting() or kernels.LIBRARY is None:
        return False
    given = [values for values in parameters if values is not None]
    if not all(tensor.device.type == "cpu" and tensor.dtype is torch.float32 for tensor in (x, *given)):
        return False
    channels = () if axis is None or x.dim() == 0 else (x.shape[axis],)
    return all(values.dim() == 0 or values.shape == channels for values in given)


def per_channel_bits(parameters: Sequence[Tensor | None]) -> int:
    """Which of the five of ``PER_CHANNEL_BITS`` have one number a channel: ``Layout.per_channel``."""
    pairs = zip(PER_CHANNEL_BITS, parameters, strict=True)
    return sum(bit for bit, values in pairs if values is not None and values.dim())


def _channels(parameters: Sequence[Tensor | None]) -> int:
    return next((values.shape[0] for values in parameters if values is not None and values.dim()), 1)


def _round(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    factor: Tensor | None,
    used_scale: Tensor | None,
    unit_scale: Tensor | None,
    quant_min: int,
    quant_max: int,
    axis: int | None,
    zero_point_step: int,
    scale_bits: int,
    with_codes: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`~fxqat.fake_quantize.kernels.forward`; the codes are empty without ``with_codes``."""
    given = (scale, zero_point, factor, used_scale, unit_scale)
    where = memory_layout(x, _channels(given), axis, per_channel_bits(given))
    dense: Any = [None if values is None else values.contiguous() for values in given]
    numbers: Any = (where, quant_min, quant_max, zero_point_step, scale_bits, with_codes)
    x_hat, table, codes = kernels.forward(x, *dense, *numbers)
    return x_hat, table, x.new_empty(0, dtype=torch.int8) if codes is None else codes


def _like_round(x: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Empty tensors of the shapes and dtypes that :func:`_round` returns for the same arguments."""
    *parameters, with_codes = (*others[:5], others[-1])
    codes = torch.empty_like(x, dtype=torch.int8) if with_codes else x.new_empty(0, dtype=torch.int8)
    return torch.empty_like(x), x.new_empty((3, _channels(parameters))), codes


def _round_backward(
    saved: Tensor,
    grad: Tensor,
    table: Tensor,
    axis: int | None,
    per_channel: int,
    quant_min: int,
    quant_max: int,
    grad_scale: float,
    needs_scale: bool,
    needs_zero_point: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`~fxqat.fake_quantize.kernels.backward`; an empty tensor for a gradient that is not needed."""
    where = memory_layout(saved, table.shape[1], axis, per_channel)
    needed = (needs_scale, needs_zero_point)
    of_x, *others = kernels.backward(saved, grad, table, where, quant_min, quant_max, grad_scale, *needed)
    of_scale, of_zero_point = (table.new_empty(0) if gradient is None else gradient for gradient in others)
    return of_x, of_scale, of_zero_point


def _like_backward(
    saved: Tensor, grad: Tensor, table: Tensor, axis: int | None, per_channel: int, *numbers: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Empty tensors of the shapes and dtypes that :func:`_round_backward` returns for the same arguments."""
    pairs = zip(PER_CHANNEL_BITS, numbers[-2:], strict=False)
    shapes = [(table.shape[1:] if per_channel & bit else ()) if needed else (0,) for bit, needed in pairs]
    return torch.empty_like(saved, dtype=torch.float32), table.new_empty(shapes[0]), table.new_empty(shapes[1])


def _bn_factor(variance: Tensor, gamma: Tensor | None, eps: float) -> Tensor:
    """:func:`~fxqat.fake_quantize.kernels.bn_factor`."""
    return kernels.bn_factor_on_cpu(variance.contiguous(), None if gamma is None else gamma.contiguous(), eps)


def _like_factor(variance: Tensor, gamma: Tensor | None, eps: float) -> Tensor:
    """An empty tensor of the shape that :func:`_bn_factor` returns."""
    return torch.empty_like(variance)


def _round_bias(
    bias: Tensor,
    input_scale: Tensor,
    weight_scale: Tensor,
    input_unit: Tensor | None,
    weight_unit: Tensor | None,
    *numbers: Any,
) -> tuple[Tensor, Tensor]:
    """:func:`~fxqat.fake_quantize.kernels.round_bias`."""
    unit = None if weight_unit is None else weight_unit.contiguous()
    scales = (input_scale, weight_scale.contiguous(), input_unit, unit)
    return kernels.round_bias_on_cpu(bias.contiguous(), *scales, *numbers)


def _like_bias(bias: Tensor, input_scale: Tensor, weight_scale: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    """Empty tensors of the shapes that :func:`_round_bias` returns for the same arguments."""
    return torch.empty_like(weight_scale), torch.empty_like(bias)


_OPERATORS = (
    (
        "round(Tensor x, Tensor scale, Tensor? zero_point, Tensor? factor, Tensor? used_scale, Tensor? unit_scale, "
        "int quant_min, int quant_max, int? axis, int zero_point_step, int scale_bits, bool with_codes) "
        "-> (Tensor, Tensor, Tensor)",
        _round,
        _like_round,
    ),
    (
        "round_backward(Tensor saved, Tensor grad, Tensor table, int? axis, int per_channel, int quant_min, "
        "int quant_max, float grad_scale, bool needs_scale, bool needs_zero_point) -> (Tensor, Tensor, Tensor)",
        _round_backward,
        _like_backward,
    ),
    ("bn_factor(Tensor variance, Tensor? gamma, float eps) -> Tensor", _bn_factor, _like_factor),
    (
        "round_bias(Tensor bias, Tensor input_scale, Tensor weight_scale, Tensor? input_unit, Tensor? weight_unit, "
        "int input_bits, int weight_bits, float bias_limit, float int32_limit) -> (Tensor, Tensor)",
        _round_bias,
        _like_bias,
    ),
)
for _schema, _kernel, _like in _OPERATORS:
    _name = _schema.partition("(")[0]
    # without the tag, the compiler copies every argument into the strides that it had while it was traced
    _LIBRARY.define(_schema, tags=(torch.Tag.flexible_layout,))
    _LIBRARY.impl(_name, _kernel, "CPU")
    torch.library.register_fake(f"fxqat::{_name}", _like, lib=_LIBRARY)

round_tensor = torch.ops.fxqat.round
round_backward = torch.ops.fxqat.round_backward
round_bias = torch.ops.fxqat.round_bias
bn_factor = torch.ops.fxqat.bn_factor

"""The modules of the lowered graph: they hold integers and their parameters, and compute what the file does."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxqat.fake_quantize import torch_ops
from fxqat.numerics import dequantize, fake_quantize, per_axis, quantize
from fxqat.scheme import QuantizeScheme


def integer_type(scheme: QuantizeScheme) -> torch.dtype:
    """The torch type for the integers of a scheme: 8 or 16 bits, because torch computes with no narrower type.

    The file stores narrow integers in fewer bits (``fxqat.onnx.narrow_types``).
    """
    if scheme.bit_width <= 8:
        return torch.int8 if scheme.signed else torch.uint8
    return torch.int16 if scheme.signed else torch.uint16


class Normalize(nn.Module):
    """Normalizes raw inputs: ``(x - mean) / std`` in float32.

    Args:
        mean: mean of the raw values, ``()`` or ``(channels, 1, ...)``.
        std: their standard deviation, of the same shape.
        shape: of an example input, ``(batch, channels, ...)``; empty if unknown.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Tensor, std: Tensor, shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.shape = shape
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x`` of any type."""
        return (x.to(torch.float32) - self.mean) / self.std


@dataclass(frozen=True)
class _Constants:
    """Tensors that are no attributes of a module, so that ``torch.export`` does not find them."""

    scale: Tensor
    zero_point: Tensor
    integers: Tensor | None


class DeployedPart(nn.Module):
    """A part of the lowered graph with a scale: a Q/DQ pair or a DequantizeLinear.

    While ``torch.export`` traces it, an operator with its number takes its place: see
    :mod:`fxqat.quantization.exported_parts`.

    Args:
        scale: ``()`` or ``(channels,)``, real units per step; with blocks, of the shape of the tensor but for ``axis``.
        zero_point: of the same shape, in the integer type.
        axis: channel axis, None per tensor; with blocks, the axis along which they lie.
        integers: the values of a stored tensor.
        block_size: neighbours along the axis that share a scale; None without blocks.
    """

    number = -1
    """Its number in the lowered graph; -1 until it is exported."""

    def __init__(
        self,
        scale: Tensor,
        zero_point: Tensor,
        axis: int | None,
        integers: Tensor | None = None,
        block_size: int | None = None,
    ) -> None:
        super().__init__()
        self.axis = axis
        self.block_size = block_size
        self._constants = _Constants(scale.clone(), zero_point, integers)

    @property
    def scale(self) -> Tensor:
        """Real units per step."""
        return self._constants.scale

    @property
    def zero_point(self) -> Tensor:
        """Of the shape of the scale, in the integer type."""
        return self._constants.zero_point

    @property
    def integers(self) -> Tensor | None:
        """The values of a stored tensor, in their integer type."""
        return self._constants.integers

    def dequantize(self, q: Tensor) -> Tensor:
        """The real values of integers, as DequantizeLinear computes them."""
        scale, zero_point = self._spread(q.dim())
        return dequantize(q, scale, zero_point)

    def _spread(self, dim: int) -> tuple[Tensor, Tensor]:
        """Scale and zero point, to broadcast with a tensor of ``dim`` dimensions."""
        scale = spread(self.scale, dim, self.axis, self.block_size)
        return scale, spread(self.zero_point.float(), dim, self.axis, self.block_size)


class QuantizeDequantize(DeployedPart):
    """A Q/DQ pair with constant parameters.

    If the scheme does not use the whole range of its storage type, the value is first clamped to the real range of the
    scheme, because QuantizeLinear saturates to the type only.

    Args:
        scheme: the scheme.
        scale: as of :class:`DeployedPart`.
        zero_point: integers as float32, of the same shape.
        opset_version: opset of the file; the storage type depends on it.
        axis: channel axis, None per tensor; with blocks, the axis along which they lie.
        block_size: None without blocks.
    """

    low: Tensor
    high: Tensor

    def __init__(
        self,
        scheme: QuantizeScheme,
        scale: Tensor,
        zero_point: Tensor,
        opset_version: int,
        axis: int | None = None,
        block_size: int | None = None,
    ) -> None:
        super().__init__(scale, zero_point.to(integer_type(scheme)), axis, block_size=block_size)
        self.range = (scheme.quant_min, scheme.quant_max)
        self.fills_storage = scheme.fills_storage(opset_version)
        if not self.fills_storage:
            for name, limit in (("low", scheme.quant_min), ("high", scheme.quant_max)):
                bound = (limit - zero_point) * scale
                self.register_buffer(name, bound if block_size is None else spread(bound, 0, axis, block_size))

    def forward(self, x: Tensor) -> Tensor:
        """Round ``x`` to the grid."""
        if not self.fills_storage:
            low, high = self.low, self.high
            if self.block_size is None:
                low, high = (per_axis(bound, x.dim(), self.axis) for bound in (low, high))
            x = torch.minimum(torch.maximum(x, low), high)
        if torch.compiler.is_exporting():
            rounded: Tensor = torch.ops.fxqat.quantize_dequantize(x, self.number)
            return rounded
        return fake_quantize(x, *self._spread(x.dim()), *self.range)


class DynamicQuantizeDequantize(nn.Module):
    """A value that is quantized at run time, by its own range."""

    def forward(self, x: Tensor) -> Tensor:
        """Round ``x``, float32 of any shape."""
        rounded: Tensor = torch_ops.dynamic_quantize_dequantize(x)
        return rounded


class StoredTensor(DeployedPart):
    """A constant tensor stored as integers and read through DequantizeLinear.

    Args:
        integers: the values, in their integer type.
        scale: as of :class:`DeployedPart`, as the three that follow.
        zero_point: of the same shape, in the integer type.
        axis: channel axis, or that of the blocks.
        block_size: None without blocks.
    """

    def __init__(
        self, integers: Tensor, scale: Tensor, zero_point: Tensor, axis: int, block_size: int | None = None
    ) -> None:
        super().__init__(scale, zero_point, axis, integers, block_size)

    def forward(self) -> Tensor:
        """The real values."""
        assert self.integers is not None
        if torch.compiler.is_exporting():
            values: Tensor = torch.ops.fxqat.dequantize.stored(self.number, list(self.integers.shape))
            return values
        return self.dequantize(self.integers)


class ReadBytes(DeployedPart):
    """An input whose bytes are the integers of the quantized value: it is only dequantized.

    Args:
        scale: ``()``, real units per step.
        zero_point: ``()``, an integer as float32.
    """

    def __init__(self, scale: Tensor, zero_point: Tensor) -> None:
        super().__init__(scale, zero_point.to(torch.uint8), None)

    def forward(self, x: Tensor) -> Tensor:
        """The real values of ``x``, uint8 of any shape."""
        if torch.compiler.is_exporting():
            values: Tensor = torch.ops.fxqat.dequantize(x, self.number)
            return values
        return self.dequantize(x)


class NormalizeIntegers(nn.Module):
    """Normalizes raw inputs in integers: a depthwise convolution of size 1, ``(x * weight + bias) * scale``.

    Args:
        weight: ``(channels,)``, integers from 1 to 127 as float32.
        bias: ``(channels,)``, integers as float32.
        scale: ``(channels,)``, real units per step of the products.
        dims: number of dimensions after the channels, 1 to 3.
    """

    def __init__(self, weight: Tensor, bias: Tensor, scale: Tensor, dims: int) -> None:
        super().__init__()
        self.function = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
        self.bytes = ReadBytes(scale.new_ones(()), scale.new_zeros(()))
        integers = weight.to(torch.int8).reshape(-1, *[1] * (dims + 1))
        self.weight = StoredTensor(integers, scale, torch.zeros_like(scale, dtype=torch.int8), 0)
        self.bias = stored_bias(bias, scale)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x``, uint8 ``(batch, channels, ...)``."""
        weight = self.weight()
        return self.function(self.bytes(x), weight, self.bias(), groups=len(weight))


class RoundedTensor(nn.Module):
    """A constant tensor stored in float and read through a Q/DQ pair, for tools that need this form."""

    def __init__(self, values: Tensor, pair: QuantizeDequantize) -> None:
        super().__init__()
        self.register_buffer("values", values)
        self.pair = pair

    def forward(self) -> Tensor:
        """The rounded values."""
        rounded: Tensor = self.pair(self.values)
        return rounded


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *rest: Any, **options: Any
) -> Tensor:
    """``F.scaled_dot_product_attention`` with four-dimensional arguments, the only ones that torch's exporter takes.

    Args:
        query: ``(..., targets, features)``.
        key: ``(..., sources, features)``, of query's rank.
        value: ``(..., sources, features)``, of query's rank.
        attn_mask: broadcastable to ``(..., targets, sources)``.
        rest: further arguments by position.
        options: further arguments by name.
    """
    if query.dim() == 4:
        return F.scaled_dot_product_attention(query, key, value, attn_mask, *rest, **options)
    lead = query.shape[:-2]
    if attn_mask is not None and attn_mask.dim() > 2:
        attn_mask = attn_mask.expand(*lead, *attn_mask.shape[-2:]).reshape(1, -1, *attn_mask.shape[-2:])
    query, key, value = (tensor.reshape(1, -1, *tensor.shape[-2:]) for tensor in (query, key, value))
    result = F.scaled_dot_product_attention(query, key, value, attn_mask, *rest, **options)
    return result.reshape(*lead, *result.shape[-2:])


def attention_or_zero(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *rest: Any, **options: Any
) -> Tensor:
    """:func:`attention`, with the zeros that torch gives to a query without a key written out."""
    result = attention(query, key, value, attn_mask, *rest, **options)
    if attn_mask is None:
        return result
    is_closed = ~attn_mask if attn_mask.dtype == torch.bool else attn_mask == -math.inf
    return result.masked_fill(is_closed.all(-1, keepdim=True), 0.0)


def spread(values: Tensor, dim: int, axis: int | None, block_size: int | None) -> Tensor:
    """The scales or zero points of a :class:`DeployedPart`, to broadcast with its tensor of ``dim`` dimensions."""
    return per_axis(values, dim, axis) if block_size is None else values.repeat_interleave(block_size, axis)


def stored_weight(weight: Tensor, scheme: QuantizeScheme, scale: Tensor, zero_point: Tensor, axis: int) -> StoredTensor:
    """A weight stored as integers, the same that training simulates; arguments as of :class:`StoredTensor`."""
    dtype, size = integer_type(scheme), scheme.block_size
    wide, zeros = (spread(values, weight.dim(), axis, size) for values in (scale, zero_point))
    integers = quantize(weight, wide, zeros, scheme.quant_min, scheme.quant_max)
    return StoredTensor(integers.to(dtype), scale, zero_point.to(dtype), axis, size)


def stored_bias(integers: Tensor, scale: Tensor, axis: int = 0) -> StoredTensor:
    """A bias stored as int32."""
    return StoredTensor(integers.to(torch.int32), scale, torch.zeros_like(scale, dtype=torch.int32), axis)

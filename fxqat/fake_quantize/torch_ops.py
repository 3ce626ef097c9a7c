"""The torch operators of fxqat, in the namespace ``fxqat``.

With ``quantize_dequantize``, ``dynamic_quantize_dequantize`` and ``dequantize`` the exporter sees one opaque node for
each Q/DQ pair, for each value that is quantized at run time, and for each stored integer tensor;
``fxqat.custom_symbolic_opset`` translates them to ONNX. ``keep`` is for compiled training.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxqat import numerics


@torch.library.custom_op("fxqat::quantize_dequantize", mutates_args=())
def quantize_dequantize(
    x: Tensor, scale: Tensor, zero_point: Tensor, quant_min: int, quant_max: int, axis: int
) -> Tensor:
    """A Q/DQ pair: see :func:`fxqat.numerics.fake_quantize`. ``axis`` is ignored for ``()`` scales."""
    return numerics.fake_quantize(x, scale, zero_point.float(), quant_min, quant_max, axis)


@quantize_dequantize.register_fake
def _(x: Tensor, scale: Tensor, zero_point: Tensor, quant_min: int, quant_max: int, axis: int) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("fxqat::dequantize", mutates_args=())
def dequantize(q: Tensor, scale: Tensor, zero_point: Tensor, axis: int) -> Tensor:
    """Real values of stored integers: see :func:`fxqat.numerics.dequantize`."""
    return numerics.dequantize(q, scale, zero_point.float(), axis)


@dequantize.register_fake
def _(q: Tensor, scale: Tensor, zero_point: Tensor, axis: int) -> Tensor:
    return torch.empty_like(q, dtype=torch.float32)


@torch.library.custom_op("fxqat::dynamic_quantize_dequantize", mutates_args=())
def dynamic_quantize_dequantize(x: Tensor) -> Tensor:
    """A tensor rounded at run time by its own range: see :func:`fxqat.numerics.dynamic_quantize`."""
    q, scale, zero_point = numerics.dynamic_quantize(x)
    return (q - zero_point) * scale


@dynamic_quantize_dequantize.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


_LIBRARY = torch.library.Library("fxqat", "FRAGMENT")
_LIBRARY.define("keep(Tensor x) -> Tensor")
_LIBRARY.impl("keep", torch.clone, "CompositeExplicitAutograd")
torch.library.register_fake("fxqat::keep", torch.empty_like, lib=_LIBRARY)


def keep(x: Tensor) -> Tensor:
    """A copy that a compiler does not recompute in the backward pass.

    Values derived from BatchNorm's running statistics must not be recomputed: the forward pass has updated the
    statistics by then. This operator is defined at a lower level than the others, because a compiled training step
    calls it once per layer.
    """
    result: Tensor = torch.ops.fxqat.keep(x)
    return result

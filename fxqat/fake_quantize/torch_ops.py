"""Operators of our own, in the ``fxqat`` operator namespace.

``quantize_dequantize`` and ``dequantize`` exist so that the exporter sees one opaque node per Q/DQ pair and per stored
integer tensor; their translation to ONNX is in ``fxqat.custom_symbolic_opset``. ``keep`` is for compiled training.
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
    """Reals of stored integers: see :func:`fxqat.numerics.dequantize`."""
    return numerics.dequantize(q, scale, zero_point.float(), axis)


@dequantize.register_fake
def _(q: Tensor, scale: Tensor, zero_point: Tensor, axis: int) -> Tensor:
    return torch.empty_like(q, dtype=torch.float32)


_LIBRARY = torch.library.Library("fxqat", "FRAGMENT")
_LIBRARY.define("keep(Tensor x) -> Tensor")
_LIBRARY.impl("keep", torch.clone, "CompositeExplicitAutograd")
torch.library.register_fake("fxqat::keep", torch.empty_like, lib=_LIBRARY)


def keep(x: Tensor) -> Tensor:
    """A copy that a compiler does not compute again in the backward pass.

    What is derived from BatchNorm's running statistics must not be: by then the forward pass has updated them. Defined
    at a lower level than the others, since a compiled training step calls it once for each layer.
    """
    result: Tensor = torch.ops.fxqat.keep(x)
    return result

"""The translations to ONNX that torch's exporter lacks: the table that one export is given.

Nothing is registered with torch's exporter; the table is built for each export and passed to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
import onnxscript
import torch
import torchvision  # noqa: F401  defines torch.ops.torchvision
from onnxscript import opset18 as op

from fxqat.fake_quantize import ops  # noqa: F401  defines torch.ops.fxqat

NATIVE_OPSET = 18
"""The opset the translations are written in, and the oldest that torch's exporter writes."""


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """A fresh table for ``torch.onnx.export(custom_translation_table=...)``.

    Source: ONNX QuantizeLinear and DequantizeLinear, opset 13; MaxRoiPool, opset 1.
    """
    return {
        torch.ops.fxqat.quantize_dequantize.default: _quantize_dequantize,
        torch.ops.fxqat.dequantize.default: _dequantize,
        torch.ops.torchvision.roi_pool.default: _roi_pool,
    }


def _quantize_dequantize(
    x: onnxscript.onnx_types.FLOAT,
    scale: onnxscript.onnx_types.FLOAT,
    zero_point: Any,
    quant_min: int,
    quant_max: int,
    axis: int,
) -> Any:
    q = op.QuantizeLinear(x, scale, zero_point, axis=axis)
    return op.DequantizeLinear(q, scale, zero_point, axis=axis)


def _dequantize(q: Any, scale: onnxscript.onnx_types.FLOAT, zero_point: Any, axis: int) -> Any:
    return op.DequantizeLinear(q, scale, zero_point, axis=axis)


def _roi_pool(
    x: onnxscript.onnx_types.FLOAT,
    boxes: onnxscript.onnx_types.FLOAT,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
) -> tuple[Any, Any]:
    pooled = op.MaxRoiPool(x, boxes, pooled_shape=(pooled_height, pooled_width), spatial_scale=spatial_scale)
    # where the maxima were is for the gradient, and ONNX does not tell: dropped unless read, and then no value at all
    nothing: Any = op.SequenceEmpty(dtype=onnx.TensorProto.INT32)
    first: Any = op.Constant(value_int=0)
    return pooled, op.SequenceAt(nothing, first)

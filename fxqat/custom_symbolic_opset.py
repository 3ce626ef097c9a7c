"""The translations to ONNX that torch's exporter lacks: the table that one export is given.

Nothing is registered with torch's exporter; the table is built for each export and passed to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
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

    Source: ONNX QuantizeLinear and DequantizeLinear, opset 13; MaxRoiPool, opset 1; ReduceMax and ReduceMin, opset 18;
    ScatterElements, opset 18.
    """
    return {
        torch.ops.fxqat.quantize_dequantize.default: _quantize_dequantize,
        torch.ops.fxqat.dequantize.default: _dequantize,
        torch.ops.torchvision.roi_pool.default: _roi_pool,
        # torch's own take no empty list of dimensions, which means all of them
        torch.ops.aten.amax.default: _amax,
        torch.ops.aten.amin.default: _amin,
        torch.ops.aten.aminmax.default: _aminmax,
        # nor an index that is smaller than the source
        torch.ops.aten.scatter.src: _scatter,
        torch.ops.aten.hypot.default: _hypot,
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


def _amax(x: Any, dim: Sequence[int] = (), keepdim: bool = False) -> Any:
    return op.ReduceMax(x, *_axes(dim), keepdims=keepdim)


def _amin(x: Any, dim: Sequence[int] = (), keepdim: bool = False) -> Any:
    return op.ReduceMin(x, *_axes(dim), keepdims=keepdim)


def _aminmax(x: Any, dim: int | None = None, keepdim: bool = False) -> tuple[Any, Any]:
    dims = () if dim is None else (dim,)
    return _amin(x, dims, keepdim), _amax(x, dims, keepdim)


def _axes(dims: Sequence[int]) -> tuple[Any, ...]:
    return (op.Constant(value_ints=list(dims)),) if dims else ()


def _scatter(x: Any, dim: int, index: Any, src: Any) -> Any:
    shape: Any = op.Shape(index)
    origin = op.ConstantOfShape(op.Shape(shape), value=onnx.numpy_helper.from_array(np.zeros(1, np.int64)))
    return op.ScatterElements(x, index, op.Slice(src, origin, shape), axis=dim)


def _hypot(x: Any, y: Any) -> Any:
    return op.Sqrt(op.Add(op.Mul(x, x), op.Mul(y, y)))

"""Translations of scatters: from a source that is larger than the index, and of sums and means of what falls together.

Torch's own want a source of the index's size, and write the last value where a mean is asked for. It has none of
``torch.scatter(reduce=...)`` and of ``torch.index_reduce``.

Source: ONNX ScatterElements, opset 18; CastLike, opset 15; Equal, opset 13; Where, opset 16; ConstantOfShape, Expand,
Unsqueeze and Slice.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript import opset18 as op
from onnxscript.function_libs.torch_lib.ops.core import aten_scatter_reduce as reduced

REDUCTIONS = {"add": "add", "multiply": "mul"}
"""What ONNX calls the reductions of ``torch.scatter``."""


def scatter(x: Any, dim: int, index: Any, src: Any) -> Any:
    """``torch.scatter`` of a tensor."""
    return op.ScatterElements(x, index, _part(src, index), axis=dim)


def scatter_reduce(x: Any, dim: int, index: Any, src: Any, reduce: str, include_self: bool = True) -> Any:
    """``torch.scatter_reduce``.

    Raises:
        NotImplementedError: a mean of integers, which torch rounds down.
    """
    if reduce != "mean":
        return reduced(x, dim, index, src, reduce, include_self)
    if not x.dtype.is_floating_point():
        raise NotImplementedError("scatter_reduce(reduce='mean') of integers")
    nothing, single = (_filled(op.Shape(x), number, x.dtype) for number in (0, 1))
    each = _filled(op.Shape(index), 1, x.dtype)
    total: Any = op.ScatterElements(x if include_self else nothing, index, _part(src, index), axis=dim, reduction="add")
    count: Any = op.ScatterElements(single if include_self else nothing, index, each, axis=dim, reduction="add")
    if include_self:
        return op.Div(total, count)
    return op.Where(op.Equal(count, nothing), x, op.Div(total, op.Max(count, single)))


def scatter_with(x: Any, dim: int, index: Any, src: Any, reduce: str) -> Any:
    """``torch.scatter`` of a tensor that is added or multiplied."""
    return op.ScatterElements(x, index, _part(src, index), axis=dim, reduction=REDUCTIONS[reduce])


def scatter_number_with(x: Any, dim: int, index: Any, value: Any, reduce: str) -> Any:
    """``torch.scatter`` of a number that is added or multiplied."""
    source: Any = op.Expand(op.CastLike(value, x), op.Shape(index))
    return op.ScatterElements(x, index, source, axis=dim, reduction=REDUCTIONS[reduce])


def index_reduce(x: Any, dim: int, index: Any, source: Any, reduce: str, include_self: bool = True) -> Any:
    """``torch.index_reduce``: ``torch.scatter_reduce`` with one index for each slice of the source."""
    behind = list(range(1, len(x.shape) - dim % len(x.shape)))
    new: Any = op.Constant(value_ints=behind)
    each = op.Expand(op.Unsqueeze(index, new) if behind else index, op.Shape(source))
    each.shape, each.dtype = source.shape, index.dtype
    return scatter_reduce(x, dim, each, source, reduce, include_self)


def _part(src: Any, index: Any) -> Any:
    """The values of a source that an index of the same or a smaller size has a place for."""
    shape: Any = op.Shape(index)
    return op.Slice(src, _filled(op.Shape(shape), 0, ir.DataType.INT64), shape)


def _filled(shape: Any, number: int, dtype: ir.DataType) -> Any:
    """A tensor of a shape that holds one number."""
    value: Any = ir.tensor(np.array([number], dtype.numpy()))
    return op.ConstantOfShape(shape, value=value)

"""Translations of what depends on the order of values, which torch's exporter lacks: medians and running extremes.

Values that are no numbers are not looked for: with them torch's results are no numbers, those of the file undefined.

Source: ONNX TopK, opset 11; ReduceMax and ReduceMin, opset 18; ArgMax and ArgMin, opset 13; Gather, opset 13; Compress,
opset 11; Expand, Max and Min, opset 13; Where, opset 16; GreaterOrEqual, opset 16; IsNaN, opset 13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript import opset18 as op


def kthvalue(x: Any, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Any, Any]:
    """``torch.kthvalue``: the largest of the ``k`` smallest values."""
    if not x.shape:
        return op.Identity(x), op.Constant(value_int=0)
    count: Any = op.Constant(value_ints=[k])
    return _largest_of_smallest(x, count, dim, keepdim)


def median(x: Any) -> Any:
    """``torch.median`` of all values; of an even number the lower one of the two."""
    all_of_it: Any = op.Constant(value_ints=[-1])
    return median_along(op.Reshape(x, all_of_it), 0)[0] if x.shape else op.Identity(x)


def median_along(x: Any, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
    """``torch.median`` along a dimension."""
    if x.shape is not None and not len(x.shape):
        return op.Identity(x), op.Constant(value_int=0)
    one: Any = op.Constant(value_ints=[1])
    two: Any = op.Constant(value_ints=[2])
    return _largest_of_smallest(x, op.Div(op.Add(_size(x, dim), one), two), dim, keepdim)


def cummax(x: Any, dim: int) -> tuple[Any, Any]:
    """``torch.cummax``: of equal values the last one is selected."""
    return _running(x, dim, op.ReduceMax, op.ArgMax, _limits(x.dtype)[0])


def cummin(x: Any, dim: int) -> tuple[Any, Any]:
    """``torch.cummin``: of equal values the last one is selected."""
    return _running(x, dim, op.ReduceMin, op.ArgMin, _limits(x.dtype)[1])


def fmax(x: Any, y: Any) -> Any:
    """``torch.fmax`` of two tensors of one type: of a number and of what is no number, the number."""
    if not x.dtype.is_floating_point():
        return op.Max(x, y)
    return op.Where(op.IsNaN(x), y, op.Where(op.IsNaN(y), x, op.Max(x, y)))


def fmin(x: Any, y: Any) -> Any:
    """``torch.fmin``, see :func:`fmax`."""
    if not x.dtype.is_floating_point():
        return op.Min(x, y)
    return op.Where(op.IsNaN(x), y, op.Where(op.IsNaN(y), x, op.Min(x, y)))


def masked_select(x: Any, mask: Any) -> Any:
    """``torch.masked_select``: the values in a row."""
    all_of_it: Any = op.Constant(value_ints=[-1])
    values: Any = op.Reshape(op.Expand(x, op.Shape(mask)), all_of_it)
    return op.Compress(values, op.Reshape(op.Expand(mask, op.Shape(x)), all_of_it), axis=0)


def _largest_of_smallest(x: Any, count: Any, dim: int, keepdim: bool) -> tuple[Any, Any]:
    values, indices = op.TopK(x, count, axis=dim, largest=False, sorted=True)
    last: Any = op.Constant(value_ints=[-1]) if keepdim else op.Constant(value_int=-1)
    return op.Gather(values, last, axis=dim), op.Gather(indices, last, axis=dim)


def _size(x: Any, dim: int) -> Any:
    """The size of a dimension, as a tensor of one number."""
    place: Any = op.Constant(value_ints=[dim])
    return op.Gather(op.Shape(x), place)


def _running(x: Any, dim: int, reduce: Callable[..., Any], select: Callable[..., Any], beyond: Any) -> tuple[Any, Any]:
    """The extreme of the values up to each place, and its last place; ``beyond`` is never one."""
    if not x.shape:
        return op.Identity(x), op.Constant(value_int=0)
    axis, up_to_each = _up_to_each(x, dim, beyond)
    last: Any = select(up_to_each, axis=axis + 1, keepdims=False, select_last_index=True)
    behind: Any = op.Constant(value_ints=[axis + 1])
    return reduce(up_to_each, behind, keepdims=False), last


def _up_to_each(x: Any, dim: int, beyond: Any) -> tuple[int, Any]:
    """For each place of a dimension, along a new one behind it, the values up to this place.

    Args:
        x: the values.
        dim: the dimension.
        beyond: what stands for the values behind a place.

    Returns:
        The dimension from the front, and the values.
    """
    axis = dim % len(x.shape)
    zero: Any = op.Constant(value_int=0)
    one: Any = op.Constant(value_int=1)
    places: Any = op.Range(zero, op.Squeeze(_size(x, axis)), one)
    trailing = list(range(1, len(x.shape) - axis))
    new: Any = op.Constant(value_ints=trailing)
    column: Any = op.Unsqueeze(places, new) if trailing else places  # (n, 1, ...): a place and its trailing dimensions
    first: Any = op.Constant(value_ints=[0])
    second: Any = op.Constant(value_ints=[1])
    is_reached: Any = op.GreaterOrEqual(op.Unsqueeze(column, second), op.Unsqueeze(column, first))
    before: Any = op.Constant(value_ints=[axis])
    number: Any = ir.tensor(np.array(beyond, x.dtype.numpy()))
    fill: Any = op.Constant(value=number)
    return axis, op.Where(is_reached, op.Unsqueeze(x, before), fill)


def _limits(dtype: ir.DataType) -> tuple[Any, Any]:
    """The smallest and the largest value of a type."""
    if dtype.is_floating_point():
        return -np.inf, np.inf
    limits = np.iinfo(dtype.numpy())
    return limits.min, limits.max

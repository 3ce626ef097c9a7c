"""Translations of the functions that concatenate tensors of several ranks or types.

ONNX's Concat takes tensors of one rank and one type. Torch's exporter makes their ranks equal by sequences of tensors
and a SequenceMap, which hardly an engine takes, and leaves their types as they are.

Source: ONNX Concat, Cast and Unsqueeze, opset 13.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript import opset18 as op


def concat(tensors: Sequence[Any], dim: int = 0) -> Any:
    """``torch.concat``, also ``concatenate``, along a dimension that all tensors have."""
    return _concatenated(tensors, dim, [])


def stack(tensors: Sequence[Any], dim: int = 0) -> Any:
    """``torch.stack``: along a new dimension."""
    return _concatenated(tensors, dim, [[dim]] * (len(tensors[0].shape) + 1))


def hstack(tensors: Sequence[Any]) -> Any:
    """``torch.hstack``: along the second dimension, or the only one."""
    return _concatenated(tensors, min(1, max(len(tensor.shape) - 1 for tensor in tensors)), [[0]])


def vstack(tensors: Sequence[Any]) -> Any:
    """``torch.vstack``, also ``row_stack``: along the first dimension, a vector being a row."""
    return _concatenated(tensors, 0, [[0, 1], [0]])


def dstack(tensors: Sequence[Any]) -> Any:
    """``torch.dstack``: along the third dimension."""
    return _concatenated(tensors, 2, [[0, 1, 2], [0, 2], [2]])


def column_stack(tensors: Sequence[Any]) -> Any:
    """``torch.column_stack``: along the second dimension, a vector being a column."""
    return _concatenated(tensors, 1, [[0, 1], [1]])


def _concatenated(tensors: Sequence[Any], dim: int, new: Sequence[Sequence[int]]) -> Any:
    """Concat of tensors made equal; ``new[rank]`` is where a tensor of that rank gets dimensions, nowhere beyond."""
    types = [ir.DataType(tensor.dtype) for tensor in tensors]
    common, result = _common_type(types), []
    for tensor, dtype in zip(tensors, types, strict=True):
        if len(tensor.shape) < len(new):
            places: Any = op.Constant(value_ints=list(new[len(tensor.shape)]))
            tensor = op.Unsqueeze(tensor, places)
        cast: Any = tensor if dtype == common else op.Cast(tensor, to=common)
        result.append(cast)
    return op.Concat(*result, axis=dim)


def _common_type(types: Sequence[ir.DataType]) -> ir.DataType:
    """The type that torch promotes to: a floating-point type wins over any integer, and an integer over a bool."""
    floats = [dtype for dtype in types if dtype.is_floating_point()]
    integers = [dtype for dtype in types if dtype != ir.DataType.BOOL]
    return ir.DataType.from_numpy(np.result_type(*(dtype.numpy() for dtype in floats or integers or types)))

"""Translations of the functions that concatenate tensors of several ranks or types.

ONNX's Concat takes tensors of one rank and one type. Torch's exporter makes their ranks equal by sequences of tensors
and a SequenceMap, which hardly an engine takes, and leaves their types as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch
from onnxscript import opset18 as op

TYPES = {
    ir.DataType.BOOL: torch.bool,
    ir.DataType.UINT8: torch.uint8,
    ir.DataType.INT8: torch.int8,
    ir.DataType.INT16: torch.int16,
    ir.DataType.INT32: torch.int32,
    ir.DataType.INT64: torch.int64,
    ir.DataType.FLOAT16: torch.float16,
    ir.DataType.BFLOAT16: torch.bfloat16,
    ir.DataType.FLOAT: torch.float32,
    ir.DataType.DOUBLE: torch.float64,
}
"""The types that torch promotes, by those of ONNX."""


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """By operator. Source: ONNX Concat, Cast and Unsqueeze, opset 13."""
    aten = torch.ops.aten
    return {
        aten.concat.default: _concat,
        aten.concatenate.default: _concat,
        aten.stack.default: _stack,
        aten.hstack.default: _hstack,
        aten.vstack.default: _vstack,
        aten.row_stack.default: _vstack,
        aten.dstack.default: _dstack,
        aten.column_stack.default: _column_stack,
    }


def _concat(tensors: Sequence[Any], dim: int = 0) -> Any:
    return _concatenated(tensors, dim, [[]])


def _stack(tensors: Sequence[Any], dim: int = 0) -> Any:
    return _concatenated(tensors, dim, [[dim]] * (len(tensors[0].shape) + 1))


def _hstack(tensors: Sequence[Any]) -> Any:
    return _concatenated(tensors, min(1, max(len(tensor.shape) - 1 for tensor in tensors)), [[0]])


def _vstack(tensors: Sequence[Any]) -> Any:
    return _concatenated(tensors, 0, [[0, 1], [0]])


def _dstack(tensors: Sequence[Any]) -> Any:
    return _concatenated(tensors, 2, [[0, 1, 2], [0, 2], [2]])


def _column_stack(tensors: Sequence[Any]) -> Any:
    return _concatenated(tensors, 1, [[0, 1], [1]])


def _concatenated(tensors: Sequence[Any], dim: int, new: Sequence[Sequence[int]]) -> Any:
    """Concat of tensors made equal; ``new[rank]`` is where a tensor of that rank gets dimensions, nowhere beyond."""
    types = [ir.DataType(tensor.dtype) for tensor in tensors]
    common = functools.reduce(torch.promote_types, (TYPES[dtype] for dtype in types))
    result = []
    for tensor, dtype in zip(tensors, types, strict=True):
        axes = new[len(tensor.shape)] if len(tensor.shape) < len(new) else ()
        if axes:
            places: Any = op.Constant(value_ints=list(axes))
            tensor = op.Unsqueeze(tensor, places)
        if TYPES[dtype] != common:
            tensor = op.Cast(tensor, to=next(each for each, found in TYPES.items() if found == common))
        result.append(tensor)
    return op.Concat(*result, axis=dim)

"""Translations of what cuts tensors into pieces, and joins them: chunk, unfold and fold.

Torch's own make no list of one chunk, count chunks that are empty, and want a batch of images.

Source: ONNX SequenceConstruct and SplitToSequence, opset 11; Squeeze and Unsqueeze, opset 13; Col2Im, opset 18.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
from onnxscript import opset18 as op
from onnxscript.function_libs.torch_lib.ops.core import aten_chunk, aten_split
from onnxscript.function_libs.torch_lib.ops.nn import aten_col2im, aten_im2col


def chunk(x: Any, chunks: int, dim: int = 0) -> Any:
    """``torch.chunk``."""
    size = x.shape[dim]
    if chunks == 1:
        return op.SequenceConstruct(x)
    if isinstance(size, int):
        return aten_split(x, op.Constant(value_int=max(1, -(-size // chunks))), dim)
    return aten_chunk(x, chunks, dim)


def unfold(
    x: Any, kernel_size: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]
) -> Any:
    """``torch.nn.functional.unfold`` of an image, or of a batch of them."""
    return _batched(aten_im2col, x, 4, kernel_size, dilation, padding, stride)


def fold(
    x: Any,
    output_size: Sequence[int],
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Any:
    """``torch.nn.functional.fold`` of an image, or of a batch of them."""
    return _batched(aten_col2im, x, 3, output_size, kernel_size, dilation, padding, stride)


def _batched(function: Callable[..., Any], x: Any, rank: int, *sizes: Sequence[int]) -> Any:
    """A translation that wants a batch, of a tensor with one or without."""
    if len(x.shape) == rank:
        return function(x, *sizes)
    first: Any = op.Constant(value_ints=[0])
    batch: Any = op.Unsqueeze(x, first)
    batch.shape, batch.dtype = ir.Shape([1, *x.shape]), x.dtype
    return op.Squeeze(function(batch, *sizes), first)

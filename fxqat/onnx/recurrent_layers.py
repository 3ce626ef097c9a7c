"""Recurrent layers for torch's exporter: fxqat's operators for them, written in ONNX.

Source: ONNX LSTM, GRU and RNN, opset 14; Cast and Slice, opset 13; ReduceMax, opset 18.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
from onnxscript import opset18 as op


def recurrent(
    x: Any, w: Any, r: Any, b: Any, lengths: Any, h: Any, c: Any, mode: str, directions: int
) -> tuple[Any, Any, Any]:
    """``torch.ops.fxqat.recurrent``: LSTM, GRU or RNN."""
    hidden, rows = int(r.shape[-1]), [directions, -1]
    w, r = (_as_shape(t, [*rows, int(t.shape[-1])]) if len(t.shape) == 2 else t for t in (w, r))
    b = _as_shape(b, rows) if b is not None and len(b.shape) == 1 else b
    lengths = op.Cast(lengths, to=onnx.TensorProto.INT32) if lengths is not None else None
    options: dict[str, Any] = {"hidden_size": hidden, "direction": ("forward", "bidirectional")[directions - 1]}
    if mode == "LSTM":
        return op.LSTM(x, w, r, b, lengths, h, c, **options)
    if mode == "GRU":
        y, last = op.GRU(x, w, r, b, lengths, h, linear_before_reset=1, **options)
    else:
        activation = {"RNN_TANH": "Tanh", "RNN_RELU": "Relu"}[mode]
        y, last = op.RNN(x, w, r, b, lengths, h, activations=[activation] * directions, **options)
    return y, last, last


def up_to_longest(x: Any, lengths: Any) -> Any:
    """``torch.ops.fxqat.up_to_longest``."""
    steps: Any = op.Cast(lengths, to=onnx.TensorProto.INT64)
    longest = op.ReduceMax(steps, keepdims=1)
    first: Any = op.Constant(value_ints=[0])
    return op.Slice(x, first, longest, first)


def _as_shape(x: Any, shape: Sequence[int]) -> Any:
    sizes: Any = op.Constant(value_ints=list(shape))
    return op.Reshape(x, sizes)

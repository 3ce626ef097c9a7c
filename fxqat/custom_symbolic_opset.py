"""From the ``fxqat::`` operators to ONNX: the translation table that one export is given.

Nothing is registered with torch's exporter; the table is built for each export and passed to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnxscript
import torch
from onnxscript import opset18 as op

from fxqat.fake_quantize import ops  # noqa: F401  defines torch.ops.fxqat

NATIVE_OPSET = 18
"""The opset the translations are written in, and the oldest that torch's exporter writes."""


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """A fresh table for ``torch.onnx.export(custom_translation_table=...)``.

    Source: ONNX QuantizeLinear and DequantizeLinear, opset 13.
    """
    return {
        torch.ops.fxqat.quantize_dequantize.default: _quantize_dequantize,
        torch.ops.fxqat.dequantize.default: _dequantize,
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

"""Translation of attention: a query for which the mask leaves no key gets 0, as in torch.

The softmax of such a row is NaN or an average over closed keys in ONNX, so the result is replaced after the products.

Source: ONNX ReduceMax, opset 18; Where, opset 16; Cast and Greater, opset 13.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript import opset18 as op
from onnxscript.function_libs.torch_lib.ops.nn import aten_scaled_dot_product_attention as products


def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """``torch.nn.functional.scaled_dot_product_attention`` of four dimensions."""
    result = products(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if attn_mask is None:
        return result
    result.shape = ir.Shape([*query.shape[:-1], value.shape[-1]])  # so that Simplify can see that no choice is left
    result.dtype = query.dtype
    last: Any = op.Constant(value_ints=[-1])
    if attn_mask.dtype == ir.DataType.BOOL:
        number: Any = op.Cast(attn_mask, to=ir.DataType.INT32)
        is_open: Any = op.Cast(op.ReduceMax(number, last, keepdims=True), to=ir.DataType.BOOL)
    else:
        closed: Any = ir.tensor(float("-inf"), dtype=attn_mask.dtype)
        is_open = op.Greater(op.ReduceMax(attn_mask, last, keepdims=True), op.Constant(value=closed))
    nothing: Any = ir.tensor(0.0, dtype=query.dtype)
    return op.Where(is_open, result, op.Constant(value=nothing))

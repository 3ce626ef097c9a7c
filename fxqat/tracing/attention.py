"""Multi-head attention as ops of the op table, so that its projections and products can be quantized.

A tracer sees ``torch.nn.functional.multi_head_attention_forward`` as one call. It contains four linear layers and two
matrix products. When a model is traced with example inputs, the function below replaces that call. It computes the same
(Vaswani et al. 2017, section 3.2) and has all of its options. It ignores ``is_causal``, which is only a hint about the
mask.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional as F

SIGNATURE = inspect.signature(F.multi_head_attention_forward)


def multi_head_attention(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """The same as ``F.multi_head_attention_forward``, with the same arguments.

    Queries have shape (L, N, E), keys and values (S, N, E). Without a batch: (L, E) and (S, E).

    Returns:
        ``(output, weights)``: the output (L, N, E), and None or the weights after dropout, (N, H, L, S) or, averaged
        over the heads, (N, L, S). Inputs without a batch give results without N.
    """
    bound = SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    call = SimpleNamespace(**bound.arguments)
    has_batch = call.query.dim() == 3
    query, key, value = _projected(call, has_batch)
    if call.bias_k is not None:
        key = torch.cat([key, call.bias_k.expand(-1, key.size(1), -1)])
        value = torch.cat([value, call.bias_v.expand(-1, value.size(1), -1)])
    query, key, value = (x.unflatten(-1, (call.num_heads, -1)).permute(1, 2, 0, 3) for x in (query, key, value))
    key = key if call.static_k is None else call.static_k.unflatten(0, (-1, call.num_heads))
    value = value if call.static_v is None else call.static_v.unflatten(0, (-1, call.num_heads))
    if call.add_zero_attn:
        key, value = F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1))
    mask = _mask(call, query.dtype, has_batch)
    if call.need_weights or call.dropout_p > 0:  # the fused op has no dropout that follows train() and eval()
        attended, weights = _explicit(call, query, key, value, mask)
    else:
        attended, weights = F.scaled_dot_product_attention(query, key, value, mask), None
    attended = attended.permute(2, 0, 1, 3).flatten(2)
    output = F.linear(attended, call.out_proj_weight, call.out_proj_bias)
    if not call.need_weights:
        return (output if has_batch else output.squeeze(1)), None
    weights = weights.mean(dim=1) if call.average_attn_weights else weights
    return (output, weights) if has_batch else (output.squeeze(1), weights.squeeze(0))


def _projected(call: SimpleNamespace, has_batch: bool) -> tuple[Any, Any, Any]:
    """Queries, keys and values of all heads, (L or S, N, E)."""
    given = (call.query, call.key, call.value)
    query, key, value = given if has_batch else (x.unsqueeze(1) for x in given)
    weight, bias = call.in_proj_weight, call.in_proj_bias
    if not call.use_separate_proj_weight and call.query is call.key is call.value:
        return tuple(F.linear(query, weight, bias).chunk(3, -1))  # type: ignore[return-value]
    weights = (call.q_proj_weight, call.k_proj_weight, call.v_proj_weight)
    weights = weights if call.use_separate_proj_weight else weight.chunk(3)
    biases = (None, None, None) if bias is None else bias.chunk(3)
    inputs = zip((query, key, value), weights, biases, strict=True)
    return tuple(F.linear(x, w, b) for x, w, b in inputs)  # type: ignore[return-value]


def _mask(call: SimpleNamespace, dtype: torch.dtype, has_batch: bool) -> Any:
    """The mask to add to the scores, which broadcasts to (N, H, L, S); None if there is none."""
    positions, padding = call.attn_mask, call.key_padding_mask
    if positions is not None:
        positions = _to_add(positions, dtype)
        positions = positions.unflatten(0, (-1, call.num_heads)) if positions.dim() == 3 else positions
    if padding is not None:
        padding = _to_add(padding if has_batch else padding.unsqueeze(0), dtype).unsqueeze(1).unsqueeze(1)
    masks = [mask for mask in (positions, padding) if mask is not None]
    added = (call.bias_k is not None) + bool(call.add_zero_attn)  # extra keys, which the masks do not cover
    masks = [F.pad(mask, (0, added)) for mask in masks] if added else masks
    return masks[0] + masks[1] if len(masks) == 2 else next(iter(masks), None)


def _to_add(mask: Any, dtype: torch.dtype) -> Any:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))


def _explicit(call: SimpleNamespace, query: Any, key: Any, value: Any, mask: Any) -> tuple[Any, Any]:
    """The attended values, and the attention weights after dropout."""
    scores = (query * (call.embed_dim_to_check // call.num_heads) ** -0.5) @ key.transpose(-2, -1)
    weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
    if call.dropout_p > 0:
        weights = F.dropout(weights, call.dropout_p, training=call.training)
    return weights @ value, weights

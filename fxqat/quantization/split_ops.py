"""Split ops: a target without an operator for an op computes it by several, with rounded values between them.

1. ``silu``: ``x * sigmoid(x)``.
2. ``leaky_relu`` with a slope of 0 to 1: ``maximum(x, slope * x)``. At 0, where both are equal, each gets half of the
   gradient. With other slopes it stays.
3. ``adaptive_avg_pool2d`` to one value per channel: the mean over the image. To other sizes it stays.
4. ``scaled_dot_product_attention``: two products, with a softmax between them (Vaswani et al. 2017, equation 1). What
   the mask closes is also closed after the softmax: torch gives 0 where it leaves no key. A mask of floats closes where
   it is -inf; one that holds no infinity on the example inputs, as a bias by position, is only added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.fx.proxy import GraphAppendingTracer
from torch.nn import functional as F

from fxqat.ops.identify import identify
from fxqat.utils.fx_graph import called_module
from fxqat.utils.node_meta import ADDRESS, IS_MASK, NOT_SPLIT, PART_OF, SHAPE, SPELLING, SPLIT_FROM, VALUE, kind_of
from fxqat.utils.torch_compat import has_hooks

ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
"""The positional arguments of ``torch.nn.functional.scaled_dot_product_attention``."""

HOOKED = "has forward hooks, which run with its call"

CLOSED = -6e4
"""What a closed score becomes: exp of it is 0, and float16 holds it."""


def split_ops(gm: fx.GraphModule, is_split: Callable[[fx.Node], bool]) -> fx.GraphModule:
    """Rewrite the graph in place and return the graph module (without generating its code again).

    Args:
        gm: a standardized graph module.
        is_split: whether to split a node, whose op is one of ``SPLITS``. Why one stays all the same is noted on it.
    """
    proxy = partial(_proxy, GraphAppendingTracer(gm.graph))
    for node in list(gm.graph.nodes):
        split = SPLITS.get(identify(node).name)
        if split is None or not is_split(node):
            continue
        before = node.prev
        module = called_module(node)
        with gm.graph.inserting_before(node):
            found = HOOKED if module is not None and has_hooks(module) else split(node, proxy)
        if isinstance(found, str):
            node.meta[NOT_SPLIT] = found
            continue
        kept = {key: value for key, value in node.meta.items() if key not in (SHAPE, ADDRESS, IS_MASK)}
        part_of = {} if module is None else {PART_OF: (str(node.target), type(module))}
        made = before.next
        while made is not node:
            made.meta = kept | part_of | {SPELLING: node.target, SPLIT_FROM: node.name} | made.meta
            made = made.next
        node.replace_all_uses_with(found.node)
        gm.graph.erase_node(node)
    gm.graph.lint()
    return gm


def _silu(node: fx.Node, proxy: Callable[[Any], Any]) -> Any:
    x = proxy(node.all_input_nodes[0])
    return torch.mul(x, torch.sigmoid(x))


def _leaky_relu(node: fx.Node, proxy: Callable[[Any], Any]) -> Any:
    module = called_module(node)
    given = node.kwargs.get("negative_slope", node.args[1] if len(node.args) > 1 else 0.01)
    slope = given if module is None else module.negative_slope
    if not isinstance(slope, int | float) or not 0 <= slope <= 1:
        return f"only with a slope of 0 to 1 it is a maximum; its slope is {slope}"
    x = proxy(node.all_input_nodes[0])
    return torch.maximum(x, torch.mul(x, slope))


def _global_average(node: fx.Node, proxy: Callable[[Any], Any]) -> Any:
    module = called_module(node)
    size = module.output_size if module is not None else (*node.args[1:], *node.kwargs.values())[-1]
    if size not in (1, (1, 1), [1, 1]):
        return f"only to one value per channel it is a mean; its output size is {size}"
    return torch.mean(proxy(node.all_input_nodes[0]), (-2, -1), keepdim=True)


def _attention(node: fx.Node, proxy: Callable[[Any], Any]) -> Any:
    given = dict(zip(ATTENTION, node.args, strict=False)) | node.kwargs
    query, key, value = (proxy(given[name]) for name in ATTENTION[:3])
    mask, causal, shared_heads = (given.get(name) for name in ("attn_mask", "is_causal", "enable_gqa"))
    if isinstance(causal, fx.Node) or isinstance(shared_heads, fx.Node):
        return "is_causal and enable_gqa must not depend on a value"
    kind = kind_of(mask) if isinstance(mask, fx.Node) else ""
    if kind is None:
        return "whether its mask is boolean is not known: prepare with example_inputs"
    if shared_heads:
        times = _number(_number(query.size(-3)) // _number(key.size(-3)))
        key, value = (torch.repeat_interleave(x, times, -3) for x in (key, value))
    scale = given.get("scale")
    scale = _number(_number(query.size(-1)) ** -0.5) if scale is None else proxy(scale)
    scores = torch.matmul(torch.mul(query, scale), torch.transpose(key, -2, -1))
    closed = None
    if causal:
        closed = _noted(torch.triu(_noted(torch.ones_like(scores, dtype=torch.bool), "tensor"), 1), "tensor")
    elif kind == "float":
        scores = torch.add(scores, proxy(mask))
        if isinstance(mask, fx.Node) and mask.meta.get(IS_MASK):
            closed = _noted(torch.eq(proxy(mask), -math.inf), "tensor")
    elif mask is not None:
        closed = _noted(torch.logical_not(proxy(mask)), "tensor")
    if closed is not None:
        scores = torch.masked_fill(scores, closed, CLOSED)
    weights = torch.softmax(scores, dim=-1)
    if closed is not None and not causal:
        weights = torch.masked_fill(weights, closed, 0.0)
    dropout = given.get("dropout_p", 0.0)
    if dropout != 0:
        weights = F.dropout(weights, proxy(dropout), True)
    return torch.matmul(weights, value)


def _proxy(tracer: GraphAppendingTracer, given: Any) -> Any:
    """A value of the graph to compute with; new nodes go where the graph inserts."""
    return fx.Proxy(given, tracer) if isinstance(given, fx.Node) else given


def _number(proxy: Any) -> Any:
    return _noted(proxy, "plain")


def _noted(proxy: Any, kind: str) -> Any:
    """Note what kind of value it is; what has no note is a float tensor, as the result."""
    proxy.node.meta[VALUE] = kind
    return proxy


SPLITS: Mapping[str, Callable[[fx.Node, Callable[[Any], Any]], Any]] = {
    "silu": _silu,
    "leaky_relu": _leaky_relu,
    "adaptive_avg_pool2d": _global_average,
    "scaled_dot_product_attention": _attention,
}
"""For each op, a function that adds the nodes that compute it and returns a proxy of its value, or why it stays."""

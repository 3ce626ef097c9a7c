"""Split ops: a target without an operator for an op computes it by several, with rounded values between them.

1. ``silu``: ``x * sigmoid(x)``.
2. ``adaptive_avg_pool2d`` to one value per channel: the mean over the image. To other sizes it stays.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import fx

from fxqat.ops.identify import identify
from fxqat.utils.fx_graph import called_module
from fxqat.utils.node_meta import SPELLING
from fxqat.utils.torch_compat import has_hooks


def split_ops(gm: fx.GraphModule, names: Collection[str]) -> fx.GraphModule:
    """Rewrite the graph in place and return the graph module (without generating its code again).

    Args:
        gm: a standardized graph module.
        names: names of the ops to split, out of ``SPLITS``. A module with hooks stays, because they run with its call.
    """
    for node in list(gm.graph.nodes):
        name, module = identify(node).name, called_module(node)
        if name not in names or (module is not None and has_hooks(module)):
            continue
        with gm.graph.inserting_before(node):
            new = SPLITS[name](node)
        for made in new:
            made.meta = dict(node.meta) | {SPELLING: node.target}
        if new:
            node.replace_all_uses_with(new[-1])
            gm.graph.erase_node(node)
    gm.graph.lint()
    return gm


def _silu(node: fx.Node) -> list[fx.Node]:
    x = node.all_input_nodes[0]
    gate = node.graph.call_function(torch.sigmoid, (x,))
    return [gate, node.graph.call_function(torch.mul, (x, gate))]


def _global_average(node: fx.Node) -> list[fx.Node]:
    module = called_module(node)
    size = module.output_size if module is not None else (*node.args[1:], *node.kwargs.values())[-1]
    if size not in (1, (1, 1), [1, 1]):
        return []
    x = node.all_input_nodes[0]
    return [node.graph.call_function(torch.mean, (x, (-2, -1)), {"keepdim": True})]


SPLITS: Mapping[str, Callable[[fx.Node], list[fx.Node]]] = {"silu": _silu, "adaptive_avg_pool2d": _global_average}
"""For each op, a function that adds the nodes that compute it, the last of them its value; none if it stays."""

"""Which values are always zero, as far as the graph shows it: states at the start, and what is computed of them."""

from __future__ import annotations

import torch
from torch import fx

from fxqat.nn.fused import FusedLayer
from fxqat.nn.weighted import WEIGHTED_TYPES
from fxqat.ops.families import IDENTITY, PASS_THROUGH
from fxqat.ops.identify import identify, operands
from fxqat.utils.fx_graph import called_module, node_inputs, nodes_where
from fxqat.utils.own_forward import has_own_forward

MADE = frozenset({torch.zeros, torch.zeros_like, "new_zeros"})
"""Functions and methods that make zeros."""

ODD = frozenset({"tanh", "relu", "add", "sub", "cat", "stack"})
"""Ops that compute zero from zeros."""


def zero_values(graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose value is zero whatever the inputs are.

    Example:
        >>> gm = fx.symbolic_trace(lambda x: x + torch.zeros_like(x) * x.exp())
        >>> sorted(node.name for node in zero_values(gm.graph))
        ['mul', 'zeros_like']
    """
    return nodes_where(graph, _is_zero)


def _is_zero(node: fx.Node, found: set[fx.Node]) -> bool:
    if node.target in MADE:
        return True
    module, op = called_module(node), identify(node)
    given = operands(node, op)
    nodes = list(node_inputs(given))
    if isinstance(module, (*WEIGHTED_TYPES, FusedLayer)) and not has_own_forward(module):
        plain = module.layer if isinstance(module, FusedLayer) and module.bn is None else module
        return getattr(plain, "bias", True) is None and found.issuperset(nodes)
    if op.name == "mul":
        return not found.isdisjoint(nodes)
    if op.family in (PASS_THROUGH, IDENTITY):
        return bool(given) and given[0] in found
    others = [value for value in given if isinstance(value, (int, float)) and value != 0]
    return op.name in ODD and bool(nodes) and not others and found.issuperset(nodes)

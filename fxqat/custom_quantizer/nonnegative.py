"""Which values are never negative, as far as the graph shows it: results of a ReLU, and what is computed from them."""

from __future__ import annotations

from torch import fx

from fxqat.nn.fused import FusedLayer
from fxqat.ops.families import ACTIVATION, IDENTITY, MATH, PASS_THROUGH, POOL
from fxqat.ops.identify import identify, interpolation_mode, operands
from fxqat.utils.fx_graph import called_module, node_inputs, nodes_where

ALWAYS = frozenset({"relu", "relu6", "sigmoid", "hardsigmoid", "softmax", "abs", "square", "exp", "sqrt"})
"""Ops whose result is never negative."""

KEEPING = frozenset({"add", "mul", "maximum", "cat", "stack"})
"""Ops whose result is never negative if no operand is."""

OVERSHOOTING = frozenset({"bicubic"})
"""Modes of interpolation that leave the range of their input."""


def nonnegative_values(graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose value is never negative: a ReLU ends it, or it is computed from such values only.

    Example:
        >>> gm = fx.symbolic_trace(lambda x: (x.relu() + 1).mean(1) - 1)
        >>> sorted(node.name for node in nonnegative_values(gm.graph))
        ['add', 'mean', 'relu']
    """
    return nodes_where(graph, _is_nonnegative)


def _is_nonnegative(node: fx.Node, found: set[fx.Node]) -> bool:
    module, op = called_module(node), identify(node)
    if isinstance(module, FusedLayer):  # with an activation, which is a ReLU or a ReLU6
        return module.activation is not None
    if op.family in (ACTIVATION, MATH):
        return op.name in ALWAYS
    given = operands(node, op)
    if op.family in (PASS_THROUGH, IDENTITY, POOL):
        return bool(given) and given[0] in found
    if op.name == "interpolate":
        return given[0] in found and interpolation_mode(node) not in OVERSHOOTING
    numbers = [value for value in (*given, node.kwargs.get("alpha", 1)) if isinstance(value, (int, float))]
    nodes = list(node_inputs(given))
    return op.name in KEEPING and bool(nodes) and found.issuperset(nodes) and all(number >= 0 for number in numbers)

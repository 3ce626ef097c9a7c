"""Which layers are worth converting values to integers for, on backends whose float kernels are fast, too.

Such a backend converts (Q or DQ) wherever a layer on integers stands beside a float op. A layer earns that by its
multiply-accumulates: ``weight.numel()`` for each position of its output (of its input, if transposed), against the
channels that are converted at that position. The number of positions cancels out, so that no shapes are needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import fx, nn

from fxqat.custom_quantizer.requests import Wish
from fxqat.nn.fused import FusedLayer
from fxqat.ops.identify import operands
from fxqat.ops.table import IDENTITY, MATMUL, PASS_THROUGH, WEIGHTED
from fxqat.utils.fx_graph import called_module, node_inputs
from fxqat.utils.node_meta import Kind


def worth_it(
    wishes: dict[fx.Node, Wish], kinds: Mapping[fx.Node, Kind], is_fused: Callable[[fx.Node], bool], least_work: int
) -> dict[fx.Node, Wish]:
    """The wishes without those of layers that do not earn their conversions, and of ops that read only float then.

    Asked again until nothing changes, as each one left float makes a conversion necessary beside it. What a user's rule
    is about stays, and a layer of which another call earns them. The inputs and outputs of the model do not count: they
    are float whatever is done.

    Args:
        wishes: by node, in execution order.
        kinds: of all nodes.
        is_fused: whether a node is an activation that runs inside the op before it.
        least_work: multiply-accumulates for each converted value that a layer must have.

    Returns:
        What is worth it; the argument itself in a model in which no layer is.
    """
    sides = _Sides(dict(wishes), kinds, is_fused)
    calls: dict[object, list[fx.Node]] = {}
    for node, wish in wishes.items():
        if wish.rule is not None:
            calls.setdefault(node.target if wish.weight is not None else node, []).append(node)
    left, before = list(calls.values()), -1
    while len(left) != before:  # what is left in the end does not depend on the order
        before = len(left)
        left = [nodes for nodes in reversed(left) if not _drop(nodes, sides, least_work)]
    return sides.wishes if any(wish.weight is not None for wish in sides.wishes.values()) else wishes


def _drop(nodes: list[fx.Node], sides: _Sides, least_work: int) -> bool:
    """Take the wishes of all calls of a layer if there is something against each; whether it was done."""
    found = [sides.complaint(node, least_work) for node in nodes]
    if not all(found):
        return False
    for node, reason in zip(nodes, found, strict=True):
        sides.wishes[node] = Wish(sides.wishes[node].op, None, reason)
    return True


class _Sides:
    """What stands beside each op, looking through ops that only move values."""

    def __init__(
        self, wishes: dict[fx.Node, Wish], kinds: Mapping[fx.Node, Kind], is_fused: Callable[[fx.Node], bool]
    ) -> None:
        self.wishes = wishes
        self.kinds = kinds
        self.is_fused = is_fused

    def complaint(self, node: fx.Node, least_work: int) -> str:
        """What is against an op on integers, empty if it is worth its conversions."""
        wish = self.wishes[node]
        if wish.weight_rank or wish.activation_rank or wish.output_rank or self._moves(node):
            return ""
        if wish.op.family == WEIGHTED:
            work = self._work(node)
            words = f"{work:.0f} multiply-accumulates for each value that would be converted; worth it are {least_work}"
            return f"left float: {words}" if work < least_work else ""
        if wish.op.family == MATMUL:
            return ""
        sources = [self._source(operand) for operand in node_inputs(operands(node, wish.op))]
        return "" if any(self._gives_integers(source) for source in sources) else "left float: so are its operands"

    def _work(self, node: fx.Node) -> float:
        """Multiply-accumulates of a weighted layer for each value that is converted for it."""
        rule = self.wishes[node].rule
        source = self._source(node.all_input_nodes[0])
        converts_input = source.op not in ("placeholder", "get_attr") and not self._gives_integers(source)
        converts_output = rule is not None and rule.output and not all(map(self._takes_integers, self._readers(node)))
        module = called_module(node)
        layer: Any = module.layer if isinstance(module, FusedLayer) else module
        if isinstance(layer, nn.Linear):
            channels_in, channels_out = layer.in_features, layer.out_features
        else:
            stride = math.prod(layer.stride)
            channels_in = layer.in_channels * (1 if layer.transposed else stride)
            channels_out = layer.out_channels * (stride if layer.transposed else 1)
        converted = converts_input * channels_in + converts_output * channels_out
        return layer.weight.numel() / converted if converted else math.inf

    def _moves(self, node: fx.Node) -> bool:
        return self.wishes[node].op.family in (PASS_THROUGH, IDENTITY) or self.is_fused(node)

    def _source(self, node: fx.Node) -> fx.Node:
        """What computes a value."""
        while self._moves(node) and node.all_input_nodes:
            node = node.all_input_nodes[0]
        return node

    def _readers(self, node: fx.Node) -> Iterator[fx.Node]:
        """What computes with a value; not the outputs of the model."""
        for user in node.users:
            if self._moves(user):
                yield from self._readers(user)
            elif user.op != "output" and self.kinds[user] is not Kind.OTHER:
                yield user

    def _gives_integers(self, node: fx.Node) -> bool:
        rule = self.wishes[node].rule
        return rule is not None and rule.output

    def _takes_integers(self, node: fx.Node) -> bool:
        rule = self.wishes[node].rule
        return rule is not None and rule.inputs != "none"

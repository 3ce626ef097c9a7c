"""Sharing groups: which values have one scale, found once as a union of sets."""

from __future__ import annotations

import operator
from collections.abc import Container, Mapping
from dataclasses import replace

from torch import fx

from fxqat.custom_quantizer.flat_reads import flat_outside
from fxqat.custom_quantizer.float_reads import Read
from fxqat.custom_quantizer.requests import RankedConfig, Request, precedence
from fxqat.fake_quantize.fake_quantizes import not_learned
from fxqat.ops.families import CONCAT, IDENTITY, RECURRENT
from fxqat.ops.identify import operands
from fxqat.quantization.annotation import ValueQuant
from fxqat.scheme import TensorQConfig
from fxqat.utils.fx_graph import node_inputs
from fxqat.utils.node_meta import Kind


class Groups:
    """Disjoint sets of names (union-find); a name that was never joined is alone.

    Example:
        >>> groups = Groups()
        >>> groups.join("a", "b"), groups.join("c", "b")
        (None, None)
        >>> groups.find("a") == groups.find("c"), groups.find("d")
        (True, 'd')
    """

    def __init__(self) -> None:
        self._parent: dict[str, str] = {}

    def find(self, name: str) -> str:
        """The name that stands for the set of ``name``."""
        root = name
        while self._parent.get(root, root) != root:
            root = self._parent[root]
        while self._parent.get(name, name) != root:
            self._parent[name], name = root, self._parent[name]
        return root

    def join(self, first: str, second: str) -> None:
        """Make two sets one."""
        self._parent[self.find(second)] = self.find(first)


def share_scales(
    requests: dict[fx.Node, Request],
    values: dict[fx.Node, ValueQuant],
    left_float: Container[Read],
    nonnegative: set[fx.Node],
) -> Groups:
    """Find the values that share a scale; ops that move a quantized value get a value too, in ``values``.

    1. An op that moves values takes the scale of its operand, if it reads it quantized or leads to a quantized value.
    2. The operands of an op whose rule shares have one scale, and its result with them.
    3. If the rule keeps ReLUs apart, operands that are never negative do not share with others that can be. A common
       zero point would not be the smallest integer, and engines fuse a ReLU only then. If it keeps fixed ranges
       apart, operands whose range is known do not share.
    4. The output of a recurrent layer and its hidden state have one scale: the state is the output of the last step.

    Args:
        requests: of all nodes.
        values: how the values are quantized; changed by case 1.
        left_float: the reads that stay float.
        nonnegative: the nodes whose value is never negative.
    """
    groups = Groups()
    leading = _leading_to_quantized(requests, values)
    for node, request in requests.items():
        is_layer = request.op.family == RECURRENT and node.target is not operator.getitem  # its items are of the family
        if request.rule is not None and is_layer:
            items = [user for user in node.users if user.target is operator.getitem]
            outputs = [item for item in items if item in values and item.args[1] in (0, 1)]
            for item in outputs[1:]:
                groups.join(outputs[0].name, item.name)
        if request.rule is None or request.rule.share == "none":
            continue
        inputs = list(node_inputs(operands(node, request.op)))
        if request.moves_values:
            source = inputs[0] if inputs else None
            if source not in values or (source, node) in left_float:
                continue
            if not (values[source].is_read_by(node) or node in leading):
                continue
            if values[source].readers is not None:
                readers = values[source].readers or frozenset()
                values[source] = replace(values[source], readers=readers | {node.name})
            transparent = request.op.family == IDENTITY or request.op.gives_tuple
            values[node] = replace(values[source], readers=None, on_grid=True, transparent=transparent)
            groups.join(source.name, node.name)
            continue
        shared = [operand for operand in inputs if operand in values and values[operand].is_read_by(node)]
        if request.rule.keeps_relu_apart:
            shared = _those_that_share(shared, values, nonnegative)
        if request.rule.keeps_fixed_ranges_apart:
            shared = [operand for operand in shared if values[operand].config.scheme.fixed_range is None]
        for operand in shared[1:]:
            groups.join(shared[0].name, operand.name)
        if shared and request.rule.share == "all" and node in values:
            groups.join(shared[0].name, node.name)
            if request.op.family == CONCAT and set(inputs) <= set(shared):
                values[node] = replace(values[node], on_grid=True)
    return groups


def _those_that_share(
    operands: list[fx.Node], values: dict[fx.Node, ValueQuant], nonnegative: set[fx.Node]
) -> list[fx.Node]:
    """The operands without those that are never negative, if others can be; all if their zero point is fixed."""
    rest = [it for it in operands if it not in nonnegative or values[it].config.scheme.symmetric]
    return rest or operands


def _leading_to_quantized(requests: dict[fx.Node, Request], values: dict[fx.Node, ValueQuant]) -> set[fx.Node]:
    """The nodes whose value is quantized, or is moved to a node whose value is."""
    found: set[fx.Node] = set()
    for node in reversed(requests):
        moved = [user for user in node.users if requests[user].moves_values]
        if node in values or any(user in found for user in moved):
            found.add(node)
    return found


def group_config(
    nodes: list[fx.Node],
    values: dict[fx.Node, ValueQuant],
    asked: list[RankedConfig],
    untrained: set[fx.Node],
    nonnegative: set[fx.Node],
    kinds: Mapping[fx.Node, Kind],
) -> TensorQConfig:
    """The one configuration of the values of a group, ``nodes``: the request with the highest precedence.

    A known range holds for a value alone, and so does one outside of which its readers are flat. A scale is learned
    where training moves a value: the range of the model's input is that of the data, and a gradient for its scale would
    cost a backward pass through the first layer.
    The zero point of values that are never negative is the smallest integer, whatever is learned.
    """
    config, rank = max(asked, key=precedence)
    sources = [node for node in nodes if not values[node].on_grid]
    alone = values[sources[0]].config.scheme.fixed_range if len(sources) == 1 else None
    if rank == 0 and untrained.issuperset(sources):
        config = not_learned(config)
    positive = not config.scheme.symmetric and nonnegative.issuperset(sources)
    flat = None
    if len(sources) == 1:
        flat = flat_outside(sources[0], values, kinds, config.scheme.bit_width)
    return config.with_scheme(fixed_range=alone, nonnegative=positive, flat_outside=flat)

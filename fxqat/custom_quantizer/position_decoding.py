"""Post-processing that decodes positions: the part of a detection head that turns its maps into boxes.

After the last layer with a weight, the positions of a grid are added to a value: ``(y.sigmoid() * 2 + grid) * stride``.
In 8 bits, pixels of a whole image and probabilities from 0 to 1 have no common scale, and on the backends' chips the
network ends at the last layer. So such post-processing is computed in float; the maps that it reads are quantized.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, fx, nn

from fxqat.ops.families import BINARY, IDENTITY, MATMUL, PASS_THROUGH, RECURRENT, WEIGHTED
from fxqat.ops.identify import identify
from fxqat.utils.fx_graph import attribute_of
from fxqat.utils.node_meta import Kind

LAYERS = (WEIGHTED, MATMUL, RECURRENT)
RANGES = (torch.arange, torch.linspace)
SHORTEST = 4
"""Fewest positions along an axis: fewer evenly spaced values may be a mean or a deviation of each channel."""
COLUMNS = 4
"""How many columns of a tensor are examined: the coordinates of a position."""


def decoding_positions(gm: fx.GraphModule, kinds: Mapping[fx.Node, Kind]) -> set[fx.Node]:
    """The nodes of the post-processing that decodes positions; empty if the model has none."""
    nodes = list(gm.graph.nodes)
    tail = _after_last_layers(nodes, kinds)
    if not tail:
        return set()
    positions = _positions(gm, nodes)
    found = {node for node in tail if identify(node).family == BINARY and positions & set(node.all_input_nodes)}
    waiting = list(found)
    while waiting:
        node = waiting.pop()
        beside = (set(node.all_input_nodes) | set(node.users)) & tail - found
        found |= beside
        waiting += beside
    for node in nodes:  # ops that only move the values of a layer belong to the layer
        if node in found and identify(node).family in (PASS_THROUGH, IDENTITY):
            found -= {node} if found.isdisjoint(node.all_input_nodes) else set()
    return found | _only_for(found, nodes)


def _only_for(found: set[fx.Node], nodes: list[fx.Node]) -> set[fx.Node]:
    """The nodes that only these nodes read and that depend on the model's tensors alone, such as a row of anchors."""
    constant = set[fx.Node]()
    for node in nodes:
        if node.op == "get_attr" or (node.op != "placeholder" and set(node.all_input_nodes) <= constant):
            constant.add(node)
    private = set[fx.Node]()
    for node in reversed(nodes):
        if node in constant and node.users and set(node.users) <= found | private:
            private.add(node)
    return {node for node in private if node.op != "get_attr"}


def _after_last_layers(nodes: list[fx.Node], kinds: Mapping[fx.Node, Kind]) -> set[fx.Node]:
    """The nodes computed from the result of a layer with a weight that lead to no further such layer."""
    before, after = set[fx.Node](), set[fx.Node]()
    for node in reversed(nodes):
        if any(user in before or _is_layer(user) for user in node.users):
            before.add(node)
    for node in nodes:
        if any(source in after or _is_layer(source) for source in node.all_input_nodes):
            after.add(node)
    return {
        node for node in after - before if kinds[node] is not Kind.OTHER and node.op != "output" and not _is_layer(node)
    }


def _is_layer(node: fx.Node) -> bool:
    return identify(node).family in LAYERS


def _positions(gm: fx.GraphModule, nodes: list[fx.Node]) -> set[fx.Node]:
    """Tensors of positions: computed from a range, or stored in the model."""
    found: set[fx.Node] = set()
    sizes: set[fx.Node] = set()  # neither positions nor values
    for node in nodes:
        if node.op == "get_attr":
            is_position, is_size = holds_grid(attribute_of(gm, node)), True
        else:
            computed = node.op in ("call_function", "call_method") and set(node.all_input_nodes) <= found | sizes
            is_position = node.target in RANGES or (
                computed and any(source in found for source in node.all_input_nodes)
            )
            is_size = computed or identify(node).name == "size"
        if is_position:
            found.add(node)
        elif is_size:
            sizes.add(node)
    return found


def holds_grid(value: object) -> bool:
    """Whether a tensor that is not trained, or one of its columns, has evenly spaced values, as grids have."""
    if not isinstance(value, Tensor) or isinstance(value, nn.Parameter) or value.is_meta or value.is_sparse:
        return False
    if value.dtype == torch.bool or not value.dim() or not value.numel():
        return False
    columns = value.detach().reshape(-1, value.shape[-1]).unbind(1)[:COLUMNS]
    for column in (*columns, value.detach()):
        steps = column.double().unique().diff()
        if len(steps) >= SHORTEST - 1 and torch.allclose(steps, steps[0], rtol=1e-3):
            return True
    return False

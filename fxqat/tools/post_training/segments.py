"""A prepared model as a chain of segments, which can be run one by one on stored values.

A segment ends where a single value goes on: behind a residual block, not inside of it. So the segments of a ResNet are
its blocks and those of a transformer the halves of its layers, and no name is looked at. Layers that follow
each other one by one are taken a few at a time. Where such a place is long in coming (a U-Net), the chain is cut
anywhere, and several values go on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxqat.errors import ConfigError
from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.nn.qat import QATLayer
from fxqat.quantization.graph_module import QuantGraphModule
from fxqat.utils.fx_graph import called_module
from fxqat.utils.train_eval_graph import graph_of_mode

CHAIN = 3
"""Layers in a row with a single value between them that make a segment: as many as an inverted residual block has."""

Values = dict[str, Any]
"""Values by name, as segments read and write them."""


@dataclass(frozen=True)
class Segment:
    """A part of a model, in eval mode.

    Args:
        module: runs it on the values that it reads and gives a tuple of those that it writes; shares its modules with
            the model.
        reads: names of the values that it takes.
        writes: names of the values that it gives.
        layers: its weighted layers by path, each once.
        quantizers: the activation quantizers that round in it, by path, each once.
    """

    module: fx.GraphModule
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    layers: Mapping[str, QATLayer]
    quantizers: Mapping[str, FakeQuantizeBase]

    def __call__(self, values: Values) -> Values:
        """Run it on values by name."""
        return dict(zip(self.writes, self.module(*(values[name] for name in self.reads)), strict=True))

    def switch(self, quantized: bool) -> None:
        """Its fake-quants on or off."""
        for quant in (*self.quantizers.values(), *(layer.weight_fake_quant for layer in self.layers.values())):
            quant.fake_quant_enabled = quantized

    @torch.no_grad()
    def run(self, batches: Sequence[Values], quantized: bool) -> list[Values]:
        """What it writes for each batch, with its fake-quants on or off."""
        self.switch(quantized)
        return [self(values) for values in batches]


def split(gm: QuantGraphModule, max_layers: int = 6) -> list[Segment]:
    """Cut a prepared model into segments.

    Args:
        gm: a prepared model. The segments compute what it does in eval mode.
        max_layers: a segment with more weighted layers is cut between them, whatever goes on. With 1, each layer has a
            segment of its own.

    Returns:
        The segments in the order in which they run. The first values are the model's inputs, by name of the argument.

    Raises:
        ConfigError: ``max_layers`` is not positive.
    """
    if max_layers < 1:
        raise ConfigError(f"max_layers must be at least 1, got {max_layers}")
    graph = graph_of_mode(gm.graph, training=False)
    graph.owning_module = gm
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    going_on = _going_on(nodes)
    parts: list[list[fx.Node]] = []
    in_chain = 0  # layers of the last part, if it is a chain of single ones
    for block in _cut(nodes, [count == 1 for count in going_on], 1):
        count = sum(map(_is_layer, block))
        if count == 1 and 0 < in_chain < min(CHAIN, max_layers):
            parts[-1] = parts[-1] + block
        else:
            parts += [block] if count <= max_layers else _cut(block, [True] * len(block), max_layers)
            in_chain = 0
        in_chain = in_chain + 1 if count == 1 else 0
    return [_segment(gm, part) for part in parts]


def inputs_of(gm: QuantGraphModule, inputs: tuple[Any, ...]) -> Values:
    """The arguments of a model's forward, in order, as the values that its first segments read."""
    names = [str(node.target) for node in gm.graph.nodes if node.op == "placeholder"]
    return dict(zip(names, inputs, strict=False))


def needed_after(segments: Sequence[Segment], batches: list[Values], written: list[Values]) -> list[Values]:
    """What is still read behind the first of some segments, of the values before it and of those that it wrote."""
    names = {name for segment in segments[1:] for name in segment.reads}
    pairs = zip(batches, written, strict=True)
    return [{name: value for name, value in (old | new).items() if name in names} for old, new in pairs]


def _is_layer(node: fx.Node) -> bool:
    return isinstance(called_module(node), QATLayer)


def _going_on(nodes: list[fx.Node]) -> list[int]:
    """For each node, how many values that a layer had a part in are read behind it, not counting the model's output."""
    place = {node: i for i, node in enumerate(nodes)}
    result = [0] * len(nodes)
    computed: set[fx.Node] = set()
    for i, node in enumerate(nodes):
        if _is_layer(node) or any(source in computed for source in node.all_input_nodes):
            computed.add(node)
            last = max((place[user] for user in node.users if user in place), default=i)
            for between in range(i, last):
                result[between] += 1
    return result


def _cut(nodes: list[fx.Node], allowed: list[bool], layers: int) -> list[list[fx.Node]]:
    """Cut behind allowed nodes so that parts have a number of layers, or more where nothing is allowed between them.

    Of the places between two layers the first before a quantizer is taken, so that a quantizer is in the segment that
    reads what it rounds, and else the last.
    """
    parts: list[list[fx.Node]] = []
    start, count = 0, 0
    places: list[int] = []
    for i, node in enumerate(nodes):
        if _is_layer(node):
            if count >= layers and places:
                quantized = [k for k in places if isinstance(called_module(nodes[k]), FakeQuantizeBase)]
                end = quantized[0] if quantized else places[-1]
                parts.append(nodes[start:end])
                start, count = end, 0
            count += 1
            places = []
        if allowed[i]:
            places.append(i + 1)
    return [*parts, nodes[start:]]


def _segment(gm: QuantGraphModule, nodes: list[fx.Node]) -> Segment:
    """The segment of some nodes."""
    graph = fx.Graph()
    inside = set(nodes)
    copies: dict[fx.Node, fx.Node] = {}
    sources = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in inside)
    reads = [source for source in sources if source.op != "get_attr"]
    for source in reads:
        copies[source] = graph.placeholder(source.name)
    for source in sources:
        if source.op == "get_attr":
            copies[source] = graph.node_copy(source)
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda source: copies[source])
    writes = [node for node in nodes if any(user not in inside for user in node.users)]
    graph.output(tuple(copies[node] for node in writes))
    called = {str(node.target): called_module(node) for node in nodes if node.op == "call_module"}
    rounding = {str(n.target) for n in nodes if not n.kwargs.get("on_grid")}
    return Segment(
        fx.GraphModule(gm, graph),
        tuple(_name(source) for source in reads),
        tuple(_name(node) for node in writes),
        {path: module for path, module in called.items() if isinstance(module, QATLayer)},
        {path: m for path, m in called.items() if isinstance(m, FakeQuantizeBase) and path in rounding},
    )


def _name(node: fx.Node) -> str:
    return str(node.target) if node.op == "placeholder" else node.name

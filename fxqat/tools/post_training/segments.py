"""Split a prepared model into a chain of segments that run one after another on stored values.

A segment ends where only one value is still needed: after a residual block, not inside it. So the segments of a ResNet
are its blocks, and those of a transformer are the attention and the MLP of each layer; module names play no role.
Single layers in a row are grouped by :data:`CHAIN`. Where no such place exists for long (a U-Net), the model is cut
between any two layers, and several values are passed on.

All calls of a layer are in one segment, so that it is learned from all its inputs: the steps of an unrolled recurrent
layer, the repeated blocks of ALBERT, a head that several levels of a pyramid share. It is not so where that segment
would have too many layers, as in a Siamese network, whose segment would be the network (:data:`MOST_IN_A_LOOP`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from fxqat.errors import ConfigError
from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.nn.qat import QATLayer
from fxqat.nn.recurrent import QATRecurrentLayer
from fxqat.quantization.graph_module import QuantGraphModule
from fxqat.tools.post_training.activations import Activation, activation_after
from fxqat.utils.fx_graph import called_module
from fxqat.utils.train_eval_graph import graph_of_mode

CHAIN = 3
"""Single layers in a row that form one segment: as many as an inverted residual block has."""

MOST_IN_A_LOOP = 16
"""The most layers of a segment that is made of several, so that all calls of a layer are in it."""

WEIGHTED_LAYERS = (QATLayer, QATRecurrentLayer)

Values = dict[str, Any]
"""The values that segments read and write, by name."""


@dataclass(frozen=True)
class Segment:
    """A part of a model, in eval mode.

    Args:
        module: takes the values in ``reads`` and returns a tuple of those in ``writes``; shares its modules with the
            model.
        reads: names of the input values.
        writes: names of the output values.
        layers: its weighted layers by path, each once.
        own_layers: those of them whose parameters no layer before has: where a layer is called again, or its weight is
            that of another layer, nothing is learned a second time.
        repeated: paths of the layers whose inputs may change with their own weights: recurrent ones, and those that the
            segment calls several times.
        quantizers: its activation quantizers that round, by path, each once.
        activations: what reads the output of each of its layers, by path: see :func:`activation_after`.
    """

    module: fx.GraphModule
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    layers: Mapping[str, QATLayer | QATRecurrentLayer]
    own_layers: Mapping[str, QATLayer | QATRecurrentLayer]
    repeated: frozenset[str]
    quantizers: Mapping[str, FakeQuantizeBase]
    activations: Mapping[str, Activation | None]

    def __call__(self, values: Values) -> Values:
        """Run the segment."""
        return dict(zip(self.writes, self.module(*(values[name] for name in self.reads)), strict=True))

    def set_quantized(self, quantized: bool) -> None:
        """Switch its fake-quants on or off."""
        weights = (quant for layer in self.layers.values() for quant in layer.weight_fake_quants())
        for quant in (*self.quantizers.values(), *weights):
            quant.fake_quant_enabled = quantized

    @torch.no_grad()
    def run(self, batches: Sequence[Values], quantized: bool) -> list[Values]:
        """Its outputs for each batch, with its fake-quants on or off."""
        self.set_quantized(quantized)
        return [self(values) for values in batches]


def split(gm: QuantGraphModule, max_layers: int = 6) -> list[Segment]:
    """Cut a prepared model into segments.

    Args:
        gm: a prepared model. The segments compute what it computes in eval mode.
        max_layers: a segment with more weighted layers is cut between them, however many values are passed on. With 1,
            each layer is in its own segment. Segments that hold calls of one layer are joined afterwards.

    Returns:
        The segments in order of execution. The first values are the model's inputs, by argument name.

    Raises:
        ConfigError: ``max_layers`` is not positive.
    """
    if max_layers < 1:
        raise ConfigError(f"max_layers must be at least 1, got {max_layers}")
    graph = graph_of_mode(gm.graph, training=False)
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    live = _live_values(nodes)
    parts: list[list[fx.Node]] = []
    in_chain = 0  # layers of the last part, if all of them are single
    for block in _cut(nodes, [count == 1 for count in live], 1):
        count = sum(map(_is_layer, block))
        if count == 1 and 0 < in_chain < min(CHAIN, max_layers):
            parts[-1] = parts[-1] + block
        else:
            parts += [block] if count <= max_layers else _cut(block, [True] * len(block), max_layers)
            in_chain = 0
        in_chain = in_chain + 1 if count == 1 else 0
    known: set[int] = set()
    return [_segment(gm, part, known) for part in _joined(parts)]


def float_segments(segments: Sequence[Segment]) -> list[Segment]:
    """The segments that compute the values of the float model, before anything is changed.

    A copy where a segment has layers that an earlier one changes, else the segment itself.
    """
    return [copy.deepcopy(each) if len(each.own_layers) < len(each.layers) else each for each in segments]


def named_inputs(gm: QuantGraphModule, inputs: tuple[Any, ...]) -> Values:
    """The arguments of a model's forward, given in order, by name: the values that the first segments read."""
    names = [str(node.target) for node in gm.graph.nodes if node.op == "placeholder"]
    return dict(zip(names, inputs, strict=False))


def values_read_later(segments: Sequence[Segment], batches: list[Values], written: list[Values]) -> list[Values]:
    """Of all values so far, those that the segments after the first one read.

    Args:
        segments: the segment that ran last, and those after it.
        batches: the values before it ran, batch by batch.
        written: its outputs.
    """
    names = {name for segment in segments[1:] for name in segment.reads}
    pairs = zip(batches, written, strict=True)
    return [{name: value for name, value in (old | new).items() if name in names} for old, new in pairs]


def _is_layer(node: fx.Node) -> bool:
    return isinstance(called_module(node), WEIGHTED_LAYERS)


def _live_values(nodes: list[fx.Node]) -> list[int]:
    """For each node, the number of values computed by layers up to it that later nodes read (not the output node)."""
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
    """Cut a list of nodes after allowed ones, so that each part has ``layers`` layers, or more if no cut is allowed.

    Between two layers the cut is before the first quantizer, so that a quantizer is in the segment that reads the
    rounded value; without a quantizer it is at the last allowed place.
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


def _joined(parts: list[list[fx.Node]]) -> list[list[fx.Node]]:
    """The parts, joined from the first call of each layer to its last one, unless that has too many layers."""
    joined = list(parts)
    places: dict[nn.Module | None, list[int]] = {}
    for place, part in enumerate(parts):
        for node in filter(_is_layer, part):
            places.setdefault(called_module(node), []).append(place)
    several = {layer: found for layer, found in places.items() if found[0] < found[-1]}
    for layer in sorted(several, key=lambda layer: several[layer][-1] - several[layer][0]):
        holding = [place for place, part in enumerate(joined) if any(called_module(node) is layer for node in part)]
        calls = slice(holding[0], holding[-1] + 1)
        nodes = [node for part in joined[calls] for node in part]
        if len({called_module(node) for node in nodes if _is_layer(node)}) <= MOST_IN_A_LOOP:
            joined[calls] = [nodes]
    return joined


def _segment(gm: QuantGraphModule, nodes: list[fx.Node], known: set[int]) -> Segment:
    """Make a segment of some nodes; ``known`` are the ids of the parameters of layers before, to which its own come."""
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
    layers = {path: module for path, module in called.items() if isinstance(module, WEIGHTED_LAYERS)}
    own = {}
    for path, layer in layers.items():
        parameters = set(map(id, layer.parameters()))
        if known.isdisjoint(parameters):
            own[path] = layer
        known |= parameters
    calls = {path: [node for node in nodes if node.target == path] for path in layers}
    repeated = {path for path, layer in layers.items() if len(calls[path]) > 1 or isinstance(layer, QATRecurrentLayer)}
    return Segment(
        fx.GraphModule(gm, graph),
        tuple(_name(source) for source in reads),
        tuple(_name(node) for node in writes),
        layers,
        own,
        frozenset(repeated),
        {path: m for path, m in called.items() if isinstance(m, FakeQuantizeBase) and path in rounding},
        {path: activation_after(nodes) for path, nodes in calls.items()},
    )


def _name(node: fx.Node) -> str:
    return str(node.target) if node.op == "placeholder" else node.name

"""Which ops stay float because converting values for them costs more than integers save.

On a backend whose float kernels are fast too, an op in integers beside an op in float needs a conversion (Q or DQ) of
each value between them. A layer pays for its conversions with multiply-accumulates: ``weight.numel()`` for each
position of its output (of its input, if transposed), against the channels that are converted at that position. The
number of positions cancels out, so that no shapes are needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch import fx

from fxqat.custom_quantizer.requests import Request, op_around
from fxqat.custom_quantizer.spec import BackendSpec
from fxqat.nn.fused import FusedLayer
from fxqat.ops.families import LOOKUP, MATMUL, WEIGHTED
from fxqat.ops.identify import operands
from fxqat.utils.fx_graph import called_module, node_inputs
from fxqat.utils.node_meta import Kind


def too_costly(
    requests: Mapping[fx.Node, Request], kinds: Mapping[fx.Node, Kind], spec: BackendSpec, keeps_weights: bool = False
) -> dict[fx.Node, str]:
    """The nodes that stay float because of their conversions, and why.

    1. A layer with fewer than ``spec.least_work`` multiply-accumulates for each value that is converted for it.
    2. Another op, except a product of two values and a lookup, all of whose operands are float.

    Every node left float makes conversions necessary beside it, so this is repeated until nothing changes. A layer
    stays in integers if the user's overrides name it or one of its calls pays. The inputs and outputs of the model do
    not count: they are float in any case. If layers keep their weights as integers, an override of the weight alone
    says nothing about the values that the layer reads and gives, and does not count.

    Args:
        requests: by node, in execution order.
        kinds: of all nodes.
        spec: the backend.
        keeps_weights: whether a layer left float stores its weight as integers.
    """
    neighbours = _Neighbours(requests, kinds, spec, keeps_weights)
    calls: dict[object, list[fx.Node]] = {}
    for node, request in requests.items():
        if request.rule is not None:
            calls.setdefault(node.target if request.weight is not None else node, []).append(node)
    waiting, before = list(calls.values()), -1
    while len(waiting) != before:  # the result does not depend on the order
        before = len(waiting)
        waiting = [nodes for nodes in reversed(waiting) if not _leave_float(nodes, neighbours)]
    return neighbours.left_float


def _leave_float(nodes: list[fx.Node], neighbours: _Neighbours) -> bool:
    """Leave a layer float if none of its calls pays for its conversions; whether it was done."""
    reasons = [neighbours.why_too_costly(node) for node in nodes]
    if not all(reasons):
        return False
    neighbours.left_float |= zip(nodes, reasons, strict=True)
    return True


class _Neighbours:
    """What each op reads and is read by, looking through ops that only move values."""

    def __init__(
        self,
        requests: Mapping[fx.Node, Request],
        kinds: Mapping[fx.Node, Kind],
        spec: BackendSpec,
        keeps_weights: bool,
    ) -> None:
        self.requests = requests
        self.kinds = kinds
        self.spec = spec
        self.keeps_weights = keeps_weights
        self.left_float: dict[fx.Node, str] = {}

    def why_too_costly(self, node: fx.Node) -> str:
        """Why an op should stay float, empty if it pays for its conversions."""
        request = self.requests[node]
        overridden = request.activation_rank or request.output_rank or (request.weight_rank and not self.keeps_weights)
        if overridden or self._moves(node) or request.op.family in (MATMUL, LOOKUP):
            return ""
        if request.op.family == WEIGHTED:
            work, least = self._work(node), self.spec.least_work
            words = f"{work:.0f} multiply-accumulates for each converted value, least_work is {least}"
            return words if work < least else ""
        sources = [self._source(operand) for operand in node_inputs(operands(node, request.op))]
        return "" if any(self._gives_integers(source) for source in sources) else "its operands are float"

    def _work(self, node: fx.Node) -> float:
        """Multiply-accumulates of a weighted layer for each value that is converted for it."""
        source = self._source(node.all_input_nodes[0])
        converts_input = source.op not in ("placeholder", "get_attr") and not self._gives_integers(source)
        converts_output = self._gives_integers(node) and not all(map(self._takes_integers, self._readers(node)))
        module = called_module(node)
        layer: Any = module.layer if isinstance(module, FusedLayer) else module
        if layer.weight.dim() == 2:
            channels_in, channels_out = layer.in_features, layer.out_features
        else:
            stride = math.prod(layer.stride)
            channels_in = layer.in_channels * (1 if layer.transposed else stride)
            channels_out = layer.out_channels * (stride if layer.transposed else 1)
        converted = converts_input * channels_in + converts_output * channels_out
        return layer.weight.numel() / converted if converted else math.inf

    def _moves(self, node: fx.Node) -> bool:
        return self.requests[node].moves_values or op_around(node, self.spec) is not None

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
        rule = self.requests[node].rule
        return node not in self.left_float and rule is not None and rule.output

    def _takes_integers(self, node: fx.Node) -> bool:
        rule = self.requests[node].rule
        return node not in self.left_float and rule is not None and rule.inputs != "none"

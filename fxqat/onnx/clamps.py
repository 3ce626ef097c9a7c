"""Write Relu and Clip before a QuantizeLinear of 4 or 2 bits as Max and Min, which compute the same.

1. ``Relu(x)`` becomes ``Max(x, 0)``;
2. ``Clip(x, low, high)`` becomes ``Min(Max(x, low), high)``, without the bound that it does not have.

ONNX Runtime (seen in 1.31) drops a Relu before such a node whatever the zero point is, and so computes something else
at its default optimization level; at a Clip it fails. Its rules only know the types of 8 and 16 bits. They also find a
clamp that is followed by operators which move values, because ONNX Runtime pulls QuantizeLinear through these.

Source: ONNX Runtime, ``optimizer/qdq_transformer``: ``relu_quantizelinear.cc``, ``clip_quantizelinear.cc`` and
``qdq_propagation.cc``.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from fxqat.onnx.narrow_types import NARROW, input_of

MOVING = ("Flatten", "Identity", "MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")
ZERO = "fxqat_zero"
"""The initializer that replaces Relu's zero."""


class WriteClamps(ir.passes.InPlacePass):
    """Rewrite the clamps before narrow QuantizeLinear nodes."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite the clamps in place."""
        found = dict.fromkeys(clamp for node in model.graph if (clamp := _clamp_before(node)) is not None)
        if found:
            zero = ir.Value(name=ZERO, const_value=ir.tensor(np.zeros((), np.float32), name=ZERO))
            model.graph.register_initializer(zero)
            for clamp in found:
                _rewrite(model.graph, clamp, zero)
        return ir.passes.PassResult(model, modified=bool(found))


def _clamp_before(node: ir.Node) -> ir.Node | None:
    """The Relu or Clip whose result a narrow QuantizeLinear reads, None if there is none."""
    zero_point = input_of(node, 2).const_value if node.op_type == "QuantizeLinear" else None
    if zero_point is None or zero_point.dtype not in NARROW.values():
        return None
    source = input_of(node, 0).producer()
    while source is not None and source.op_type in MOVING:
        source = input_of(source, 0).producer()
    if source is None or source.op_type not in ("Relu", "Clip"):
        return None
    return source if source.op_type == "Relu" or any(source.inputs[1:]) else None


def _rewrite(graph: ir.Graph, clamp: ir.Node, zero: ir.Value) -> None:
    old = clamp.outputs[0]
    bounds = [("Max", zero)] if clamp.op_type == "Relu" else zip(("Max", "Min"), clamp.inputs[1:], strict=False)
    value, nodes = input_of(clamp, 0), []
    for kind, bound in bounds:
        if bound is not None:
            nodes.append(ir.node(kind, [value, bound], name=f"{clamp.name}_{kind.lower()}"))
            value = nodes[-1].outputs[0]
            value.name = f"{old.name}_bounded"
    ir.convenience.replace_nodes_and_values(graph, clamp, [clamp], nodes, [old], [value])

"""Write a Relu or Clip that ONNX Runtime's optimizer would drop by mistake as Max and Min, which compute the same.

Before a QuantizeLinear of 4 or 2 bits:

1. ``Relu(x)`` becomes ``Max(x, 0)``;
2. ``Clip(x, low, high)`` becomes ``Min(Max(x, low), high)``, without the bound that it does not have.

Before a QuantizeLinear of 8 or 16 bits:

3. the same for a Clip whose bounds lie inside the range of the integers, by half a step or more and by at most
   ``EPSILON``.

ONNX Runtime (seen in 1.31) drops a Relu before 4 or 2 bits whatever the zero point is, and so computes something else
at its default optimization level; at a Clip it fails. Its rules only know the types of 8 and 16 bits. A Clip before
these it drops if its bounds hold the range of the integers, up to an absolute ``EPSILON`` (seen in 1.32): the ReLU6 of
a model with activations of 1e-8 is lost. The rules also find a clamp that is followed by operators which move values,
because ONNX Runtime pulls QuantizeLinear through these.

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
EPSILON = 2 * float(np.finfo(np.float32).eps)
"""Twice what ONNX Runtime allows, because it computes the range in float32."""


class WriteClamps(ir.passes.InPlacePass):
    """Rewrite the clamps that ONNX Runtime would drop by mistake."""

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
    """The clamp before a QuantizeLinear that ONNX Runtime would drop by mistake, None if there is none."""
    zero_point = input_of(node, 2).const_value if node.op_type == "QuantizeLinear" else None
    if zero_point is None:
        return None
    source = input_of(node, 0).producer()
    while source is not None and source.op_type in MOVING:
        source = input_of(source, 0).producer()
    if source is None or source.op_type not in ("Relu", "Clip"):
        return None
    if zero_point.dtype not in NARROW.values():
        return source if source.op_type == "Clip" and _clips_by_epsilon(source, node) else None
    return source if source.op_type == "Relu" or any(source.inputs[1:]) else None


def _clips_by_epsilon(clip: ir.Node, quantizer: ir.Node) -> bool:
    """Whether a Clip changes integers, but is so near to their range that it seems to change none (case 3)."""
    scale, zero_point = (_constant(quantizer, place) for place in (1, 2))
    if scale is None or zero_point is None:
        return False
    limits = np.iinfo(zero_point.dtype)
    ends = [(limit - zero_point.astype(np.float64)) * scale for limit in (limits.min, limits.max)]
    cut = np.zeros_like(scale, np.float64)
    for place, end, sign in ((1, ends[0], 1), (2, ends[1], -1)):
        bound = _constant(clip, place)
        if bound is not None:
            cut = np.maximum(cut, sign * (bound - end))
    return bool(((cut >= scale / 2) & (cut <= EPSILON)).any())


def _constant(node: ir.Node, place: int) -> np.ndarray | None:
    """The constant that a node reads, None if there is none."""
    value = node.inputs[place] if place < len(node.inputs) else None
    return None if value is None or value.const_value is None else value.const_value.numpy()


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

"""Keep the rounding of a convolution's result before an addition, which OpenVINO drops.

OpenVINO (seen in 2026.4) computes Conv -> QuantizeLinear -> DequantizeLinear -> Add in one kernel that does not round
the result of the convolution: up to a fifth of the sums are off by one.

1. Between the two, a Clip of the integers to the whole range of their type; the same before Sub.

No integer changes: integers of a type lie within its range. OpenVINO keeps a QuantizeLinear whose integers are read by
an operator; the addition is then as exact as any other.

Nothing is added where

2. another node reads the rounded values too: OpenVINO keeps these;
3. an operator stands between the convolution and QuantizeLinear, as Relu: OpenVINO rounds its result.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from fxqat.onnx.integer_clamps import TYPES, clip_integers
from fxqat.onnx.narrow_types import input_of

ADDITIONS = ("Add", "Sub")


class KeepAddBranches(ir.passes.InPlacePass):
    """Put an integer Clip where OpenVINO would drop a rounding."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Add the Clips in place."""
        found = [node for node in model.graph if node.op_type == "QuantizeLinear" and _is_dropped(node)]
        for node in found:
            zero_point = input_of(node, 2).const_value
            assert zero_point is not None  # checked by _is_dropped
            limits = np.iinfo(zero_point.dtype.numpy())
            clip_integers(model.graph, node, np.array([limits.min, limits.max], zero_point.dtype.numpy()))  # case 1
        return ir.passes.PassResult(model, modified=bool(found))


def _is_dropped(quantizer: ir.Node) -> bool:
    """Whether OpenVINO drops a QuantizeLinear."""
    source, zero_point = input_of(quantizer, 0).producer(), input_of(quantizer, 2).const_value
    if source is None or source.op_type != "Conv":  # case 3
        return False
    if zero_point is None or zero_point.dtype.numpy().type not in TYPES:
        return False
    reader = _only_reader(quantizer)
    adder = None if reader is None or reader.op_type != "DequantizeLinear" else _only_reader(reader)  # case 2
    return adder is not None and adder.op_type in ADDITIONS


def _only_reader(node: ir.Node) -> ir.Node | None:
    """The node that reads the result of a node, None if there are several or the result is an output of the model."""
    uses = node.outputs[0].uses()
    return uses[0].node if len(uses) == 1 and not node.outputs[0].is_graph_output() else None

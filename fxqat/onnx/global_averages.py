"""Write the mean of whole images as GlobalAveragePool, for which ONNX Runtime has an integer operator.

1. A ReduceMean over all axes but batch and channels, which keeps them with size 1, becomes a GlobalAveragePool if a
   DequantizeLinear gives what it reads. Its name and that of its value stay.
2. Another ReduceMean stays: over other axes, without the axes that it reduces, or over an unknown number of axes.

Both are the mean of the same values. A sum of integers times a scale is exact in float32, whatever the order of
addition, as long as it fits into 24 bits: with scales of 4 bits that are 4096 pixels of uint8. ONNX Runtime adds in
float32 for the one, and reads the integers for the other (in EfficientNet-B0 a fifth of the time).

Source: ONNX ReduceMean (opset 13: axes are an attribute, 18: an input), GlobalAveragePool (opset 1); ONNX Runtime,
``qdq_selector_action_transformer.cc``, which has QLinearGlobalAveragePool and no integer ReduceMean.
"""

from __future__ import annotations

import onnx_ir as ir

from fxqat.onnx.narrow_types import input_of
from fxqat.onnx.remove_unread import drop_unread


class GlobalAverages(ir.passes.InPlacePass):
    """Replace means of whole images."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Replace them in place."""
        found = [node for node in model.graph if node.op_type == "ReduceMean" and _is_global_average(node)]
        for node in found:
            read = list(node.inputs[1:])
            node.resize_inputs(1)
            node.attributes.clear()
            node.op_type = "GlobalAveragePool"
            drop_unread(model.graph, [value for value in read if value is not None])
        return ir.passes.PassResult(model, modified=bool(found))


def _is_global_average(node: ir.Node) -> bool:
    value = input_of(node, 0)
    reader, axes = value.producer(), _axes(node)
    if reader is None or reader.op_type != "DequantizeLinear" or value.shape is None or not axes:
        return False
    rank = len(value.shape)
    keeps = node.attributes.get_int("keepdims", 1) == 1
    return keeps and rank > 2 and sorted(axis % rank for axis in axes) == list(range(2, rank))


def _axes(node: ir.Node) -> list[int]:
    """The axes; none if they are not known."""
    if len(node.inputs) < 2:
        return list(node.attributes.get_ints("axes", []))
    axes = node.inputs[1]
    return [] if axes is None or axes.const_value is None else [int(axis) for axis in axes.const_value.numpy()]

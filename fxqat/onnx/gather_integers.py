"""Look rows of a table up as integers, and dequantize only these.

A Gather of rows (axis 0) from a stored tensor, ``Gather(DequantizeLinear(q, s, z), i)``, becomes

1. with one scale: ``DequantizeLinear(Gather(q, i), s, z)``;
2. with a scale for each row: ``Mul(Cast(Gather(q, i)), Unsqueeze(Gather(s, i)))``, whose first factor is
   ``Sub(Cast(...), Cast(Unsqueeze(Gather(z, i))))`` if a zero point is not 0. DequantizeLinear takes no scales of this
   shape.

Integers of up to 16 bits and their differences are exact in float32, so the product is rounded once, as in
DequantizeLinear, and no value changes. Without this the whole table is dequantized in each run.

3. with a scale for each block of a row: ``DequantizeLinear(Gather(q, i), Gather(s, i), Gather(z, i))``.
4. Integers of 4 and 2 bits stay as they are: Gather does not take them.

Source: ONNX Gather, opset 13; DequantizeLinear, opset 13, with blocks opset 21.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from fxqat.onnx.narrow_types import NARROW, block_size_of, input_of
from fxqat.onnx.remove_unread import remove_unread


class GatherIntegers(ir.passes.InPlacePass):
    """Move DequantizeLinear behind Gather."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Move them in place."""
        found = [node for node in model.graph if node.op_type == "Gather" and _reads_stored_rows(node)]
        for node in found:
            _move(model.graph, node)
        return ir.passes.PassResult(model, modified=bool(found))


def _reads_stored_rows(node: ir.Node) -> bool:
    reader = input_of(node, 0).producer()
    if reader is None or reader.op_type != "DequantizeLinear" or node.attributes.get_int("axis", 0) != 0:
        return False
    integers, scale = input_of(reader, 0), input_of(reader, 1)
    per_row = scale.shape is not None and (not len(scale.shape) or reader.attributes.get_int("axis", 1) == 0)
    of_rows = per_row or (block_size_of(reader) > 0 and reader.attributes.get_int("axis", 1) == 1)
    return integers.is_initializer() and of_rows and integers.dtype not in NARROW.values()  # case 4


def _move(graph: ir.Graph, gather: ir.Node) -> None:
    reader = input_of(gather, 0).producer()
    assert reader is not None  # checked by _reads_stored_rows
    integers, scale, zero_point = (input_of(reader, place) for place in range(3))
    assert scale.shape is not None
    assert zero_point.const_value is not None
    nodes: list[ir.Node] = []

    def add(kind: str, inputs: list[ir.Value], attributes: dict[str, Any] | None = None) -> ir.Value:
        nodes.append(ir.node(kind, inputs, attributes or {}))
        nodes[-1].outputs[0].name = f"{gather.outputs[0].name}_{kind.lower()}_{len(nodes)}"
        return nodes[-1].outputs[0]

    def of_rows(values: ir.Value) -> ir.Value:
        return add("Unsqueeze", [add("Gather", [values, input_of(gather, 1)], {"axis": 0}), last])

    rows = add("Gather", [integers, input_of(gather, 1)], {"axis": 0})
    if not len(scale.shape):  # case 1
        add("DequantizeLinear", [rows, scale, zero_point])
    elif block_size_of(reader):  # case 3
        parameters = (add("Gather", [values, input_of(gather, 1)], {"axis": 0}) for values in (scale, zero_point))
        add("DequantizeLinear", [rows, *parameters], {"axis": -1, "block_size": block_size_of(reader)})
    else:  # case 2
        last = _last_axis(graph)
        rows = add("Cast", [rows], {"to": ir.DataType.FLOAT})
        if zero_point.const_value.numpy().any():
            rows = add("Sub", [rows, add("Cast", [of_rows(zero_point)], {"to": ir.DataType.FLOAT})])
        add("Mul", [rows, of_rows(scale)])
    old, new = gather.outputs[0], nodes[-1].outputs[0]
    ir.convenience.replace_nodes_and_values(graph, gather, [gather], nodes, [old], [new])
    remove_unread(graph, [reader])


def _last_axis(graph: ir.Graph) -> ir.Value:
    name = "fxqat_last_axis"
    if name not in graph.initializers:
        graph.register_initializer(ir.Value(name=name, const_value=ir.tensor(np.array([-1], np.int64), name=name)))
    return graph.initializers[name]

"""An LSTM that quantizes what it reads at run time becomes ONNX Runtime's operator for that.

After DynamicQuantizeLinear, an LSTM with stored weights of 8 bits becomes ``com.microsoft.DynamicQuantizeLSTM``, which
quantizes its input and the hidden state of each step itself:

1. it reads the input before DynamicQuantizeLinear, which vanishes;
2. its weights are transposed, ``(directions, inputs, 4 * hidden)``, and their scales and zero points are ``(directions,
   4 * hidden)``, or ``(directions,)`` for one scale;
3. its output is written even if nothing reads it, if it has lengths: without the output, the range of the hidden states
   includes the last ones of the samples that have ended.

Source: ONNX Runtime, contrib operator com.microsoft.DynamicQuantizeLSTM, version 1.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from fxqat.errors import ExportError
from fxqat.onnx.narrow_types import input_of
from fxqat.onnx.remove_unread import remove_unread

DOMAIN = "com.microsoft"


class DynamicLSTM(ir.passes.InPlacePass):
    """Replace such operators."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Replace them in place."""
        found = [node for node in model.graph if node.op_type == "LSTM" and _reads_dynamic(node)]
        for node in found:
            _replace(model.graph, node)
            model.opset_imports[DOMAIN] = 1
        return ir.passes.PassResult(model, modified=bool(found))


def _reads_dynamic(node: ir.Node) -> bool:
    reader = input_of(node, 0).producer()
    quantizer = input_of(reader, 0).producer() if reader is not None and reader.op_type == "DequantizeLinear" else None
    return quantizer is not None and quantizer.op_type == "DynamicQuantizeLinear"


def _replace(graph: ir.Graph, node: ir.Node) -> None:
    reader = input_of(node, 0).producer()
    assert reader is not None  # checked by _reads_dynamic
    quantizer = input_of(reader, 0).producer()
    assert quantizer is not None
    unread = [reader, quantizer]
    stored = [_stored(graph, node, place, unread) for place in (1, 2)]
    inputs: list[ir.Value | None] = [input_of(quantizer, 0), *(values[0] for values in stored)]
    inputs += [*node.inputs[3:], None, None, None, None][: 8 - len(inputs)]
    inputs += [value for values in stored for value in values[1:]]
    attributes = [node.attributes[name] for name in ("direction", "hidden_size") if name in node.attributes]
    new = ir.Node(DOMAIN, "DynamicQuantizeLSTM", inputs, attributes, num_outputs=len(node.outputs))
    for old, value in zip(node.outputs, new.outputs, strict=True):
        value.name, value.type, value.shape = old.name, old.type, old.shape
    ir.convenience.replace_nodes_and_values(graph, node, [node], [new], node.outputs, new.outputs)
    if inputs[4] is not None and not new.outputs[0].name:  # case 3
        new.outputs[0].name = f"{new.outputs[1].name or new.outputs[2].name}_of_all_steps"
    remove_unread(graph, unread)


def _stored(graph: ir.Graph, node: ir.Node, place: int, unread: list[ir.Node]) -> list[ir.Value]:
    """A weight, its scale and its zero point, in the shapes of the operator; ``unread`` gets what they replace."""
    directions = 2 if node.attributes.get_string("direction", "forward") == "bidirectional" else 1
    reader = input_of(node, place).producer()
    if reader is not None and reader.op_type == "Reshape":
        unread.append(reader)
        reader = input_of(reader, 0).producer()
    assert reader is not None  # the weight of a layer that is quantized is stored
    unread.append(reader)
    integers, scale, zero_point = (input_of(reader, number) for number in range(3))
    if not integers.is_initializer():
        raise ExportError("a dynamic LSTM reads stored integers: export with weights='integer'")
    if directions > 1 and _values(scale).size == 1:
        raise ExportError(
            f"{integers.name}: a dynamic LSTM of two directions needs a scale for each row; set per_channel of its "
            "weight to True"
        )
    weight = _values(integers)
    name = f"{integers.name}_columns"
    if name not in graph.initializers:
        columns = weight.reshape(directions, -1, weight.shape[-1]).transpose(0, 2, 1)
        graph.register_initializer(ir.Value(name=name, const_value=ir.tensor(np.ascontiguousarray(columns), name=name)))
    for value in (scale, zero_point):
        values = _values(value)
        shaped = values.reshape(directions, -1) if values.size > 1 else values.reshape(1)
        value.const_value, value.shape = ir.tensor(shaped, name=value.name), ir.Shape(shaped.shape)
    return [graph.initializers[name], scale, zero_point]


def _values(value: ir.Value) -> np.ndarray:
    assert value.const_value is not None
    return value.const_value.numpy()

"""Convert the model to the opset that was asked for, with ONNX's own converter.

A model that has this opset already stays as it is. Elsewhere the converter needs help:

1. it reads what used to be attributes (axes) from Constant nodes only, which must hold a tensor: small integer
   initializers become such nodes, and those that it leaves become initializers again, as later passes expect them;
   numbers and lists of numbers in Constant nodes become tensors;
2. it keeps attributes that an older operator does not have: those with their default value are dropped;
3. it has no step down for operators that only take more types since then: it does not see them. Nor has it one for
   Split (opset 18), Shape (15) and Reshape (14), which compute the same without what came with these versions; the
   sizes that a Shape takes out become a Slice;
4. it keeps the IR version: older opsets get the one that runtimes of their time read;
5. torch's exporter writes operators (DeformConv) that are newer than the opset it declares: it does not see them.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx
import onnx_ir as ir
from onnx import numpy_helper, version_converter

from fxqat.errors import ExportError
from fxqat.onnx.older_opset import without_allowzero, without_number_of_parts
from fxqat.onnx.opset import newer_operators
from fxqat.scheme import STORAGE_OPSETS

WIDENED = {"Add": 14, "Div": 14, "Identity": 16, "Mul": 14, "Relu": 14, "Sub": 14}
"""Operators that take more types since an opset (integers, values that are no tensors) and did not change otherwise."""

EXTENDED = {"Split": (18, "num_outputs"), "Shape": (15, "start"), "Reshape": (14, "allowzero")}
"""Operators that have an attribute since an opset, and did not change otherwise."""

HIDDEN = "fxqat.hidden"
"""Domain of the nodes that the converter must not see."""

NUMBERS = {"value_int": np.int64, "value_ints": np.int64, "value_float": np.float32, "value_floats": np.float32}
"""Attributes of Constant that hold numbers, with their types."""

SMALL = 16
"""The most elements of an initializer that becomes a Constant node."""


class ConvertOpset(ir.passes.InPlacePass):
    """Convert the model.

    Args:
        opset_version: the opset to reach.

    Raises:
        ExportError: the converter cannot express the model in that version.
    """

    def __init__(self, opset_version: int) -> None:
        self.opset_version = opset_version

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Convert the model in place."""
        if model.opset_imports[""] == self.opset_version:
            return ir.passes.PassResult(model, modified=False)
        for node in list(model.graph) if self.opset_version < model.opset_imports[""] else ():
            without_allowzero(node)  # case 3
            without_number_of_parts(node)  # case 3
            if node.op_type == "Shape" and self.opset_version < EXTENDED["Shape"][0]:
                _take_out_by_slice(node, model.graph)  # case 3
        converted = ir.from_proto(_convert(ir.to_proto(model), self.opset_version))
        for value in converted.graph.initializers.values():
            tensor = value.const_value
            assert tensor is not None
            # the converter does not declare them; later passes read both
            value.shape, value.type = ir.Shape(tensor.shape.numpy()), ir.TensorType(tensor.dtype)
        model.graph, model.ir_version = converted.graph, converted.ir_version
        return ir.passes.PassResult(model, modified=True)


def _take_out_by_slice(node: ir.Node, graph: ir.Graph) -> None:
    """Let a Slice take out the sizes that a Shape gives (``start`` and ``end``)."""
    ends = {"start": 0, "end": np.iinfo(np.int64).max}
    if not ends.keys() & node.attributes.keys():
        return
    sizes = node.outputs[0]
    whole = ir.node("Shape", [node.inputs[0]])
    limits = []
    for name, default in ends.items():
        number = node.attributes[name].as_int() if name in node.attributes else default
        held = ir.tensor(np.array([number], np.int64), name=f"{sizes.name}_{name}")
        limits.append(ir.Value(name=held.name, const_value=held, shape=ir.Shape([1]), type=ir.TensorType(held.dtype)))
        graph.register_initializer(limits[-1])
    part = ir.node("Slice", [whole.outputs[0], *limits])
    ir.convenience.replace_nodes_and_values(graph, node, [node], [whole, part], [sizes], part.outputs)


def _convert(model: onnx.ModelProto, opset_version: int) -> onnx.ModelProto:
    constants = _write_constants(model)
    _drop_default_attributes(model)
    declared = next(entry.version for entry in model.opset_import if entry.domain == "")
    hidden = {*newer_operators({node.op_type for node in model.graph.node}, declared)}
    hidden |= {op_type for op_type, widened in WIDENED.items() if opset_version < widened}
    for op_type, (opset, attribute) in EXTENDED.items():
        nodes = [node for node in model.graph.node if node.op_type == op_type]
        if opset_version < opset and all(each.name != attribute for node in nodes for each in node.attribute):
            hidden.add(op_type)
    _move(model, hidden, "", HIDDEN)
    try:
        converted = version_converter.convert_version(model, opset_version)
    except Exception as cause:  # the converter raises whatever its C++ side does
        raise ExportError(
            f"this model cannot be expressed in opset {opset_version} (onnx's converter: {cause}). "
            "Use opset_version=18."
        ) from cause
    _move(converted, hidden, HIDDEN, "")
    _write_initializers(converted, constants)
    # case 4; version 13 has the types of 2 bits
    converted.ir_version = 8 if opset_version < 18 else 10 if opset_version < STORAGE_OPSETS[2] else 13
    return converted


def _write_constants(model: onnx.ModelProto) -> set[str]:
    """Case 1, in place: the names of the initializers that are Constant nodes now."""
    graph = model.graph
    for node in graph.node:
        if node.op_type == "Constant" and (kind := NUMBERS.get(node.attribute[0].name)) is not None:
            held = np.array(onnx.helper.get_attribute_value(node.attribute[0]), kind)
            node.attribute[0].CopyFrom(onnx.helper.make_attribute("value", numpy_helper.from_array(held)))
    int64 = [tensor for tensor in graph.initializer if tensor.data_type == onnx.TensorProto.INT64]
    small = [tensor for tensor in int64 if numpy_helper.to_array(tensor).size <= SMALL]
    nodes = [onnx.helper.make_node("Constant", [], [tensor.name], value=tensor) for tensor in small]
    for tensor in small:
        graph.initializer.remove(tensor)
    rest = list(graph.node)
    del graph.node[:]
    graph.node.extend([*nodes, *rest])
    return {tensor.name for tensor in small}


def _write_initializers(model: onnx.ModelProto, names: Collection[str]) -> None:
    """Case 1, in place: the Constant nodes of these names are initializers again."""
    for node in list(model.graph.node):
        if node.op_type == "Constant" and node.output[0] in names:
            tensor = model.graph.initializer.add()
            tensor.CopyFrom(node.attribute[0].t)
            tensor.name = node.output[0]
            model.graph.node.remove(node)


def _drop_default_attributes(model: onnx.ModelProto) -> None:
    """Case 2, in place: ``noop_with_empty_axes=0``, which the reductions have since opset 18 (ReduceSum: 13)."""
    for node in model.graph.node:
        for attribute in list(node.attribute):
            if attribute.name == "noop_with_empty_axes" and attribute.i == 0:
                node.attribute.remove(attribute)


def _move(model: onnx.ModelProto, op_types: Collection[str], source: str, target: str) -> None:
    """Cases 3 and 5, in place: move the nodes of some operators from one domain to another."""
    for node in model.graph.node:
        if node.op_type in op_types and node.domain == source:
            node.domain = target
    for entry in [entry for entry in model.opset_import if entry.domain == HIDDEN]:
        model.opset_import.remove(entry)
    if target == HIDDEN and op_types:
        model.opset_import.append(onnx.helper.make_opsetid(HIDDEN, 1))

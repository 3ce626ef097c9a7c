"""Store tensors of 4 and 2 bits in types of 4 and 2 bits; torch holds them in bytes.

For every quantized tensor with such a type:

1. its zero point, and its integers if they are stored, get that type, two or four values to a byte;
2. the result of its QuantizeLinear has the type of the zero point: the declared type of the value follows.

Source: ONNX INT4 and UINT4 (opset 21, IR version 10), INT2 and UINT2 (opset 25, IR version 13).
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from fxqat.onnx.name_tensors import tensors_of

NARROW = {name.lower(): ir.DataType[name] for name in ("INT4", "UINT4", "INT2", "UINT2")}


class StoreNarrow(ir.passes.InPlacePass):
    """Give narrow tensors their types, in a model of an opset that has these types."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Change the types in place."""
        types = {record.name: NARROW[record.dtype] for record in tensors_of(model).values() if record.dtype in NARROW}
        for node in model.graph:
            if node.op_type == "QuantizeLinear" and input_of(node, 0).name in types:
                dtype = types[str(input_of(node, 0).name)]
                _pack(input_of(node, 2), dtype)  # case 1
                node.outputs[0].type = ir.TensorType(dtype)  # case 2
            elif node.op_type == "DequantizeLinear" and _reads_stored(node) and node.outputs[0].name in types:
                for place in (0, 2):
                    _pack(input_of(node, place), types[str(node.outputs[0].name)])  # case 1
        return ir.passes.PassResult(model, modified=bool(types))


def _reads_stored(node: ir.Node) -> bool:
    # the result of any other can have the name of the next tensor, whose QuantizeLinear reads it at once
    return input_of(node, 0).const_value is not None


def input_of(node: ir.Node, place: int) -> ir.Value:
    """An input that the node must have."""
    value = node.inputs[place]
    assert value is not None
    return value


def block_size_of(node: ir.Node) -> int:
    """The block size of a QuantizeLinear or DequantizeLinear, 0 without blocks."""
    return node.attributes.get_int("block_size", 0)


def _pack(value: ir.Value, dtype: ir.DataType) -> None:
    """Store an initializer in a narrower type."""
    assert value.const_value is not None
    integers = value.const_value.numpy()
    packed = integers.astype(dtype.numpy())
    assert np.array_equal(packed.astype(integers.dtype), integers)  # clamped to the range when they were made
    value.const_value = ir.Tensor(packed, dtype=dtype, name=value.name)
    value.type = None if value.type is None else ir.TensorType(dtype)

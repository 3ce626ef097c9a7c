"""Storage: tensors of 4 and of 2 bits, which torch holds in bytes, get their own types, two and four values to a byte.

For every quantized tensor whose type is narrower than 8 bits:

1. its zero point, and its integers if they are stored, become tensors of that type;
2. what QuantizeLinear gives is of the type of its zero point: the value's declared type follows.

Source: ONNX INT4 and UINT4 (opset 21, IR version 10), INT2 and UINT2 (opset 25, IR version 13).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from fxqat.scheme import QuantizedTensor

NARROW = {name.lower(): TensorProto.DataType.Value(name) for name in ("INT4", "UINT4", "INT2", "UINT2")}


def store_narrow(model: onnx.ModelProto, tensors: Iterable[QuantizedTensor]) -> onnx.ModelProto:
    """Give narrow tensors their types.

    Args:
        model: a model of an opset that has them; changed in place.
        tensors: what its quantized tensors are, by the names in the model.

    Returns:
        The model.
    """
    types = {tensor.name: NARROW[tensor.dtype] for tensor in tensors if tensor.dtype in NARROW}
    initializers: dict[str, int] = {}
    values: dict[str, int] = {}
    for node in model.graph.node:
        if node.op_type == "QuantizeLinear" and node.input[0] in types:
            values[node.output[0]] = initializers[node.input[2]] = types[node.input[0]]
        elif node.op_type == "DequantizeLinear" and node.output[0] in types:
            initializers[node.input[0]] = initializers[node.input[2]] = types[node.output[0]]
    for tensor in model.graph.initializer:
        if tensor.name in initializers:
            tensor.CopyFrom(_packed(tensor, initializers[tensor.name]))
    for value in model.graph.value_info:
        if value.name in values:
            value.type.tensor_type.elem_type = values[value.name]
    return model


def _packed(tensor: TensorProto, data_type: int) -> TensorProto:
    integers = numpy_helper.to_array(tensor)
    packed = integers.astype(helper.tensor_dtype_to_np_dtype(data_type))
    assert np.array_equal(packed.astype(integers.dtype), integers)  # clamped to the range when they were made
    return numpy_helper.from_array(packed, tensor.name)

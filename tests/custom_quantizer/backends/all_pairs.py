"""A quantized operation on two operands, on all pairs of their integers."""

import numpy as np
import torch
from onnx import TensorProto, helper, numpy_helper

from fxqat import numerics

SHAPE = (256, 256)
OPS = {"Add": np.add, "Mul": np.multiply}


def binary_model(op_type, schemes):
    """``o = Q/DQ(op(Q/DQ(a), Q/DQ(b)))`` of uint8, each with its scale and zero point."""
    tensors, nodes = [], []
    for name, source in (("a", "x"), ("b", "y"), ("o", "result")):
        scale, zero_point = schemes[name]
        tensors += [
            numpy_helper.from_array(np.float32(scale), f"{name}_scale"),
            numpy_helper.from_array(np.uint8(zero_point), f"{name}_zero_point"),
        ]
        parameters = [f"{name}_scale", f"{name}_zero_point"]
        if name == "o":
            nodes.append(helper.make_node(op_type, ["a", "b"], ["result"]))
        nodes.append(helper.make_node("QuantizeLinear", [source, *parameters], [f"{name}_quantized"]))
        nodes.append(helper.make_node("DequantizeLinear", [f"{name}_quantized", *parameters], [name]))
    inputs, output = (
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, SHAPE) for name in names] for names in ("xy", "o")
    )
    graph = helper.make_graph(nodes, "binary", inputs, output, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def all_pairs(op_type, scales, zero_points):
    """The model as bytes, its inputs for all pairs of integers, and what the fake-quant computes of them."""
    schemes = dict(zip("abo", zip(scales, zero_points, strict=True), strict=True))
    integers = np.meshgrid(np.arange(256), np.arange(256))
    a, b = (((q - z) * s).astype(np.float32) for q, (s, z) in zip(integers, schemes.values(), strict=False))
    scale, zero_point = (torch.tensor(float(value)) for value in schemes["o"])
    expected = numerics.fake_quantize(torch.from_numpy(OPS[op_type](a, b)), scale, zero_point, 0, 255).numpy()
    return binary_model(op_type, schemes).SerializeToString(), (a, b), expected

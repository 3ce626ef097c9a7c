"""Small quantized ONNX graphs, written by hand: what an engine is tried with."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

SIDE = 12


class QuantizedGraph:
    """A graph under construction: one float input ``x`` (1, 8, 12, 12), Q/DQ pairs, and layers with integer weights.

    Args:
        signed: whether activations are int8; uint8 by default.
    """

    def __init__(self, signed: bool = False) -> None:
        self.dtype = np.int8 if signed else np.uint8
        self.random = np.random.default_rng(0)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, np.ndarray] = {}

    def op(self, kind: str, inputs: list[str], name: str, **attributes: Any) -> str:
        """Add a node; its name and that of its result."""
        self.nodes.append(helper.make_node(kind, inputs, [name], name=name, **attributes))
        return name

    def constant(self, value: Any, dtype: Any, name: str) -> str:
        """Add a constant."""
        self.constants[name] = np.array(value, dtype)
        return name

    def quantize(self, tensor: str, scale: float, zero_point: int, lowest: int | None = None) -> str:
        """Add a Q/DQ pair; with ``lowest`` the integers are clipped between the two."""
        places = [self.constant(scale, np.float32, f"{tensor}_scale")]
        places.append(self.constant(zero_point, self.dtype, f"{tensor}_zero"))
        integers = self.op("QuantizeLinear", [tensor, *places], f"{tensor}_q")
        if lowest is not None:
            bound = self.constant(lowest, self.dtype, f"{tensor}_lowest")
            integers = self.op("Clip", [integers, bound], f"{tensor}_clip")
        return self.op("DequantizeLinear", [integers, *places], f"{tensor}_dq")

    def conv(self, source: str, source_scale: float, name: str, channels: int = 8, scalar: bool = False) -> str:
        """Add a 3x3 convolution to 8 channels with a bias; ``scalar`` gives weight and bias one scale each."""
        scale = 2.0 ** self.random.integers(-9, -6, () if scalar else (8,))
        weight = self.constant(self.random.integers(-127, 128, (8, channels, 3, 3)), np.int8, f"{name}_w")
        bias = self.constant(self.random.integers(-2000, 2000, (8,)), np.int32, f"{name}_b")
        scales = [self.constant(scale * f, np.float32, f"{name}_s{i}") for i, f in enumerate((1, source_scale))]
        for place, (held, own) in enumerate(zip((weight, bias), scales, strict=True)):
            self.op("DequantizeLinear", [held, own], f"{name}_{place}", **({} if scalar else {"axis": 0}))
        return self.op("Conv", [source, f"{name}_0", f"{name}_1"], name, pads=[1, 1, 1, 1])

    def model(self, output: str) -> onnx.ModelProto:
        """The finished model."""
        graph = helper.make_graph(
            self.nodes,
            "graph",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 8, SIDE, SIDE])],
            [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)],
            [numpy_helper.from_array(value, name) for name, value in self.constants.items()],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
        onnx.checker.check_model(onnx.shape_inference.infer_shapes(model), full_check=True)
        return model


def example() -> np.ndarray:
    """An input off the grid, so that few of its values are ties."""
    return np.random.default_rng(1).uniform(-4, 4, (1, 8, SIDE, SIDE)).astype(np.float32)


def residual(zero_point: int = 128, scale: float = 1.5) -> onnx.ModelProto:
    """Two convolutions and a residual Add: ``x -> conv -> conv -> + -> y``. The branch and x have scales 2 and 1/32."""
    graph = QuantizedGraph()
    x = graph.quantize("x", 1 / 32, 128)
    inner = graph.quantize(graph.conv(x, 1 / 32, "inner"), 0.25, 128)
    branch = graph.quantize(graph.conv(inner, 0.25, "branch"), 2.0, 128)
    return graph.model(graph.quantize(graph.op("Add", [branch, x], "add"), scale, zero_point))


def concat(signed: bool, relu: bool = False) -> onnx.ModelProto:
    """Two convolutions, joined on one scale, and a third one; ``relu``: one of them ends in a ReLU."""
    graph, zero = QuantizedGraph(signed), 0 if signed else 128
    x = graph.quantize("x", 1 / 32, zero)
    left, right = (graph.conv(x, 1 / 32, name) for name in ("left", "right"))
    if relu:
        right = graph.op("Relu", [right], "relu")
    halves = [graph.quantize(half, 0.25, zero) for half in (left, right)]
    joined = graph.quantize(graph.op("Concat", halves, "concat", axis=1), 0.25, zero)
    return graph.model(graph.quantize(graph.conv(joined, 0.25, "last", 16), 4.0, zero))


def clipped() -> onnx.ModelProto:
    """A convolution whose ReLU stands behind the Q node, as a Clip of integers, and a second one."""
    graph = QuantizedGraph()
    x = graph.quantize("x", 1 / 32, 128)
    inner = graph.quantize(graph.conv(x, 1 / 32, "inner"), 0.25, 128, lowest=128)
    return graph.model(graph.quantize(graph.conv(inner, 0.25, "outer"), 2.0, 128))


def one_scale() -> onnx.ModelProto:
    """A convolution with one scale for its weight, and one for its bias."""
    graph = QuantizedGraph()
    x = graph.quantize("x", 1 / 32, 128)
    return graph.model(graph.quantize(graph.conv(x, 1 / 32, "conv", scalar=True), 0.25, 128))


def narrow() -> onnx.ModelProto:
    """A ReLU between values of 4 bits, whose integers numpy has no type for."""
    graph = QuantizedGraph()
    x = graph.quantize("x", 0.5, 8)
    model = graph.model(graph.quantize(graph.op("Relu", [x], "relu"), 0.25, 0))
    for tensor in model.graph.initializer:
        if tensor.name.endswith("_zero"):
            tensor.CopyFrom(
                helper.make_tensor(tensor.name, TensorProto.UINT4, [], [int(numpy_helper.to_array(tensor))])
            )
    model.opset_import[0].version = 21
    return model


def selecting() -> onnx.ModelProto:
    """Indices of the largest channel, many of them equal, that choose rows of a quantized table."""
    graph = QuantizedGraph()
    x = graph.quantize("x", 1.0, 128)
    indices = graph.op("ArgMax", [x], "argmax", axis=1, keepdims=0)
    table = graph.constant(np.arange(8), np.float32, "table")
    return graph.model(graph.quantize(graph.op("Gather", [table, indices], "gather"), 0.5, 0))

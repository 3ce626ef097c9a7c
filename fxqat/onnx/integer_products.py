"""Multiply values that are quantized at run time as integers.

After DynamicQuantizeLinear, a product with a stored weight of 8 bits is computed on the integers:

1. ``MatMul(DequantizeLinear(q, s, z), DequantizeLinear(w, t))`` becomes ``Mul(Cast(MatMulInteger(q, w, z)), Mul(s,
   t))``, with the weight's zero point as the fourth input if it is not 0. A Transpose of the weight then moves its
   integers;
2. ``Gemm``, which is the product with a bias, becomes the same and ``Add``;
3. ``Conv`` becomes the same with ``ConvInteger``, and its bias an ``Add``, if the weight has one zero point.

The int32 sums of the integers are exact. In float, each product would be rounded, so both may differ in the last bits
of a float32.

ONNX Runtime fuses this form to MatMulIntegerToFloat or DynamicQuantizeMatMul.

Source: ONNX DynamicQuantizeLinear, opset 11; MatMulInteger and ConvInteger, opset 10; ONNX Runtime,
``optimizer/matmul_integer_to_float.cc`` and ``optimizer/dynamic_quantize_matmul_fusion.cc``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from fxqat.onnx.narrow_types import input_of
from fxqat.onnx.remove_unread import remove_unread

OF_ALL = "_of_all"
"""Ending of the name of a zero point that all channels of a weight have: ConvInteger takes only one."""

EIGHT_BITS = (ir.DataType.INT8, ir.DataType.UINT8)


class IntegerProducts(ir.passes.InPlacePass):
    """Compute such products on integers."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite them in place."""
        found = [node for node in model.graph if _is_product(node)]
        for node in found:
            _Rewriting(model.graph, node).rewrite()
        return ir.passes.PassResult(model, modified=bool(found))


def _is_product(node: ir.Node) -> bool:
    if node.op_type not in ("MatMul", "Gemm", "Conv"):
        return False
    values = _producer(node, 0, "DequantizeLinear")
    weight = _weight_reader(node)
    if values is None or _producer(values, 0, "DynamicQuantizeLinear") is None or weight is None:
        return False
    integers, zero_point = input_of(weight, 0), input_of(weight, 2).const_value
    has_one = zero_point is not None and len(np.unique(zero_point.numpy())) == 1
    return integers.is_initializer() and integers.dtype in EIGHT_BITS and (node.op_type != "Conv" or has_one)


def _producer(node: ir.Node, place: int, kind: str) -> ir.Node | None:
    source = input_of(node, place).producer()
    return source if source is not None and source.op_type == kind else None


def _weight_reader(node: ir.Node) -> ir.Node | None:
    """The DequantizeLinear of the weight of a product, looking through a Transpose."""
    moved = _producer(node, 1, "Transpose")
    return _producer(node if moved is None else moved, int(moved is None), "DequantizeLinear")


class _Rewriting:
    """One product that is rewritten.

    Args:
        graph: its graph.
        node: the product.
    """

    def __init__(self, graph: ir.Graph, node: ir.Node) -> None:
        self.graph = graph
        self.node = node
        self.nodes: list[ir.Node] = []

    def rewrite(self) -> None:
        """Replace the product."""
        node, values, weight = self.node, _producer(self.node, 0, "DequantizeLinear"), _weight_reader(self.node)
        assert values is not None
        assert weight is not None
        integers, scale, zero_point = (input_of(values, place) for place in range(3))
        stored, weight_scale, weight_zero_point = (input_of(weight, place) for place in range(3))
        moved = _producer(node, 1, "Transpose")
        inputs = [integers, stored, zero_point]
        if node.op_type == "Conv":
            inputs += self._one_zero_point(weight_zero_point)
            product = self._add("ConvInteger", inputs, dict(node.attributes))
            assert stored.shape is not None
            shape = [1, -1, *[1] * (len(stored.shape) - 2)]
        else:
            if moved is not None or bool(node.attributes.get_int("transB", 0)):
                stored = self._add("Transpose", [stored], {"perm": [1, 0]})
            inputs[1] = stored
            if weight_zero_point.const_value is None or weight_zero_point.const_value.numpy().any():
                inputs.append(weight_zero_point)
            product, shape = self._add("MatMulInteger", inputs), [-1]
        product = self._add("Cast", [product], {"to": ir.DataType.FLOAT})
        scales = self._add("Mul", [scale, self._shaped(weight_scale, shape)])
        product = self._add("Mul", [product, scales])
        if len(node.inputs) > 2 and node.inputs[2] is not None:
            product = self._add("Add", [product, self._shaped(node.inputs[2], shape)])
        ir.convenience.replace_nodes_and_values(self.graph, node, [node], self.nodes, [node.outputs[0]], [product])
        remove_unread(self.graph, [values, *([] if moved is None else [moved]), weight])

    def _add(self, kind: str, inputs: list[ir.Value], attributes: Mapping[str, Any] | None = None) -> ir.Value:
        self.nodes.append(ir.node(kind, inputs, attributes or {}))
        result = self.nodes[-1].outputs[0]
        result.name = f"{self.node.outputs[0].name}_{kind.lower()}_{len(self.nodes)}"
        return result

    def _one_zero_point(self, value: ir.Value) -> list[ir.Value]:
        """The zero point that all channels have as the only number of a tensor; nothing if it is 0."""
        assert value.const_value is not None  # checked by _is_product
        values = value.const_value.numpy()
        if not values.any():
            return []
        name = f"{value.name}{OF_ALL}"
        if name not in self.graph.initializers:
            tensor = ir.tensor(values.reshape(-1)[:1], name=name)
            self.graph.register_initializer(ir.Value(name=name, const_value=tensor))
        return [self.graph.initializers[name]]

    def _shaped(self, value: ir.Value, shape: list[int]) -> ir.Value:
        """A constant per channel in the shape of the channels of the result."""
        if len(shape) == 1 or value.shape is None or not len(value.shape):
            return value
        name = f"{value.name}_shape"
        if name not in self.graph.initializers:
            tensor = ir.tensor(np.array(shape, np.int64), name=name)
            self.graph.register_initializer(ir.Value(name=name, const_value=tensor))
        return self._add("Reshape", [value, self.graph.initializers[name]])

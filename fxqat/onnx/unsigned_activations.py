"""Store signed 8-bit activations as unsigned integers, which the integer kernels of PC runtimes take.

For every quantized activation whose integers are int8, with b bits and c = 2**(b - 1):

1. its zero point z becomes the uint8 ``z + c``; QuantizeLinear then gives integers that are larger by c;
2. the declared type of its integers follows;
3. its record says so: the scheme is unsigned, and the zero point larger by c.

No real value changes: ``clamp(round(x / scale) + z, -c, c - 1) + c`` is ``clamp(round(x / scale) + z + c, 0, 2c - 1)``
in integers, and DequantizeLinear subtracts the zero point in integers, too: ``(q + c) - (z + c) = q - z``. With 5 to 7
bits, Max and Min clamp the reals before QuantizeLinear; they stay as they are.

All activations are rewritten, so tensors that share a scale still have equal parameters. Inputs and outputs of the
model are floats. Weights and biases stay signed. Activations of other widths have other types and stay as they are.

4. With ``keep_products``, activations that only products of activations read stay signed if their zero point is 0:
   OpenVINO (seen in 2026.4) runs a MatMul of two activations on integers if the zero point of the first is 0. Operators
   that move values may stand between.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir

from fxqat.onnx.name_tensors import RECORDS, tensors_of
from fxqat.onnx.narrow_types import input_of
from fxqat.scheme import QuantizedTensor

MOVES = ("DequantizeLinear", "Identity", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Gather", "Slice", "Split")
"""Operators through which a product reads an activation."""


class UnsignedActivations(ir.passes.InPlacePass):
    """Make int8 activations uint8.

    Args:
        keep_products: the activations of case 4 stay as they are.
    """

    def __init__(self, keep_products: bool = False) -> None:
        super().__init__()
        self.keep_products = keep_products

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Change zero points, types and records in place."""
        records = tensors_of(model)
        kept = _operands_of_products(model.graph) if self.keep_products else frozenset()
        signed = {path: r for path, r in records.items() if r.kind == "activation" and r.dtype == "int8"}
        changed = {path: unsigned(r) for path, r in signed.items() if r.name not in kept or any(r.zero_point)}
        by_name = {record.name: record for record in changed.values()}
        for node in model.graph:
            if node.op_type == "QuantizeLinear" and input_of(node, 0).name in by_name:
                set_zero_point(input_of(node, 2), by_name[str(input_of(node, 0).name)].zero_point)  # case 1
                node.outputs[0].type = ir.TensorType(ir.DataType.UINT8)  # case 2
        model.meta[RECORDS] = records | changed  # case 3
        return ir.passes.PassResult(model, modified=bool(changed))


def _operands_of_products(graph: ir.Graph) -> frozenset[str]:
    """The names of what is quantized for products of activations only."""
    quantizers = [node for node in graph if node.op_type == "QuantizeLinear"]
    return frozenset(str(input_of(node, 0).name) for node in quantizers if _feeds_products(node))


def _feeds_products(node: ir.Node) -> bool:
    """Whether products of activations read the results of a node, and nothing else does."""
    if any(value.is_graph_output() for value in node.outputs):
        return False
    readers = [use.node for value in node.outputs for use in value.uses()]
    return bool(readers) and all(
        _multiplies_activations(reader) or (reader.op_type in MOVES and _feeds_products(reader)) for reader in readers
    )


def _multiplies_activations(node: ir.Node) -> bool:
    """Whether a node is a product of which no operand is a constant."""
    if node.op_type != "MatMul":
        return False
    sources = [value.producer() for value in node.inputs if value is not None]
    return all(source is not None and input_of(source, 0).const_value is None for source in sources)


def set_zero_point(value: ir.Value, zero_points: tuple[int, ...]) -> None:
    """Store other zero points in the initializer that QuantizeLinear and DequantizeLinear read."""
    assert value.const_value is not None
    integers = np.array(zero_points, np.uint8).reshape(value.const_value.shape.numpy())
    value.const_value = ir.tensor(integers, name=value.name)
    value.type = None if value.type is None else ir.TensorType(ir.DataType.UINT8)


def unsigned(record: QuantizedTensor) -> QuantizedTensor:
    """The record of the same tensor with unsigned integers."""
    assert record.scheme is not None  # an activation has one
    middle = 1 << (record.scheme.bit_width - 1)
    return replace(
        record,
        dtype="uint8",
        scheme=replace(record.scheme, signed=False),
        zero_point=tuple(zero_point + middle for zero_point in record.zero_point),
    )

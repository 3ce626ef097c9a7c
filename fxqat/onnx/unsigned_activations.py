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
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir

from fxqat.onnx.name_tensors import RECORDS, tensors_of
from fxqat.onnx.narrow_types import input_of
from fxqat.scheme import QuantizedTensor


class UnsignedActivations(ir.passes.InPlacePass):
    """Make int8 activations uint8."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Change zero points, types and records in place."""
        records = tensors_of(model)
        changed = {path: _unsigned(r) for path, r in records.items() if r.kind == "activation" and r.dtype == "int8"}
        by_name = {record.name: record for record in changed.values()}
        for node in model.graph:
            if node.op_type == "QuantizeLinear" and input_of(node, 0).name in by_name:
                _set_zero_point(input_of(node, 2), by_name[str(input_of(node, 0).name)].zero_point)  # case 1
                node.outputs[0].type = ir.TensorType(ir.DataType.UINT8)  # case 2
        model.meta[RECORDS] = records | changed  # case 3
        return ir.passes.PassResult(model, modified=bool(changed))


def _set_zero_point(value: ir.Value, zero_points: tuple[int, ...]) -> None:
    """Store other zero points in the initializer that QuantizeLinear and DequantizeLinear read."""
    assert value.const_value is not None
    integers = np.array(zero_points, np.uint8).reshape(value.const_value.shape.numpy())
    value.const_value = ir.tensor(integers, name=value.name)
    value.type = None if value.type is None else ir.TensorType(ir.DataType.UINT8)


def _unsigned(record: QuantizedTensor) -> QuantizedTensor:
    """The record of the same tensor with unsigned integers."""
    assert record.scheme is not None  # an activation has one
    middle = 1 << (record.scheme.bit_width - 1)
    return replace(
        record,
        dtype="uint8",
        scheme=replace(record.scheme, signed=False),
        zero_point=tuple(zero_point + middle for zero_point in record.zero_point),
    )

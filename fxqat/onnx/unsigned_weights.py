"""Store signed 8-bit weights as unsigned integers, whose sums of products do not saturate on x86 without VNNI.

There ONNX Runtime's kernels for uint8 activations and int8 weights add two products in 16 bits. Those for uint8 and
uint8 add in 32 bits. For every weight of 8 bits whose integers are int8:

1. the stored integers q become the uint8 ``q + 128``, and the zero point z becomes ``z + 128``;
2. a weight that is stored in float is quantized to the same integers: its QuantizeLinear has the zero point z + 128;
3. its record says so: the scheme is unsigned, and the zero points are larger by 128.

No real value changes: DequantizeLinear subtracts the zero point in integers, ``(q + 128) - (z + 128) = q - z``.

4. Weights of fewer bits stay as they are, since two of their products fit into 16 bits: ``2 * 255 * 63 < 2**15``. So
   do tables of which only rows are looked up.

Source: ONNX Runtime documentation, "Quantize ONNX Models", on U8S8 and U8U8; ``optimizer/avx2_weight_s8_to_u8.cc``.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from fxqat.onnx.name_tensors import RECORDS, tensors_of
from fxqat.onnx.narrow_types import input_of
from fxqat.onnx.unsigned_activations import set_zero_point, unsigned

LOOKUPS = ("Gather", "GatherND", "GatherElements")


class UnsignedWeights(ir.passes.InPlacePass):
    """Make int8 weights uint8."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Change integers, zero points, types and records in place."""
        records = tensors_of(model)
        changed = {
            path: unsigned(record)
            for path, record in records.items()
            if (record.kind, record.dtype) == ("weight", "int8") and record.scheme and record.scheme.bit_width == 8
        }
        by_name = {record.name: path for path, record in changed.items()}
        stored: dict[ir.Value, str] = {}
        for node in model.graph:
            if node.op_type == "DequantizeLinear" and node.outputs[0].name in by_name:
                stored[input_of(node, 0)] = by_name[str(node.outputs[0].name)]
            elif node.op_type == "QuantizeLinear" and input_of(node, 0).name in by_name:  # case 2
                path = by_name[str(input_of(node, 0).name)]
                set_zero_point(input_of(node, 2), changed[path].zero_point)
                node.outputs[0].type = ir.TensorType(ir.DataType.UINT8)
        for integers, path in stored.items():
            if integers.const_value is None or _is_table(integers):  # case 4
                del changed[path]
                continue
            for value in {input_of(use.node, 2) for use in integers.uses()}:  # a shared layer has several readers
                set_zero_point(value, changed[path].zero_point)
            shifted = integers.const_value.numpy().astype(np.int16) + 128
            integers.const_value = ir.tensor(shifted.astype(np.uint8), name=integers.name)
            integers.type = None if integers.type is None else ir.TensorType(ir.DataType.UINT8)
        model.meta[RECORDS] = records | changed  # case 3
        return ir.passes.PassResult(model, modified=bool(changed))


def _is_table(integers: ir.Value) -> bool:
    """Whether only lookups read what the integers stand for."""
    readers = [use.node for reader in integers.uses() for use in reader.node.outputs[0].uses()]
    return bool(readers) and all(reader.op_type in LOOKUPS for reader in readers)

"""Store the scales of weights in blocks as float16, in half the size.

With a float32 scale for each 16 weights of 4 bits, the scales are a third of the file. For a weight NAME, the
initializer NAME_scale is replaced by ``Mul(Cast(NAME_scale_float16), NAME_scale_unit)``. The unit is a power of two
that brings the largest scale just below 65536, so that scales which are 2**29 times smaller are exact, too. No value
changes, because the cast and the product with a power of two are exact. Scales with more than 11 significant bits are
refused.

The engine must fold constants when it loads the file, as ONNX Runtime and OpenVINO do.

Source: ONNX Cast, Mul (opset 13); IEEE 754 binary16.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir

from fxqat.errors import ExportError
from fxqat.onnx.external_data import values_of
from fxqat.onnx.name_tensors import tensors_of
from fxqat.onnx.remove_unread import drop_unread

HALF, UNIT = "_float16", "_unit"
BITS = 11
"""Significant bits of float16."""
LARGEST_EXPONENT = 16
"""All float16 are below 2 to this power."""


class HalfScales(ir.passes.InPlacePass):
    """Store the scales of all weights in blocks as float16.

    Raises:
        ExportError: no weight has blocks, or float16 does not hold a scale.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Replace the initializers in place."""
        records = tensors_of(model).values()
        weights = dict.fromkeys(t.name for t in records if t.scheme is not None and t.scheme.block_size)
        if not weights:
            raise ExportError(
                "scales='float16' is for weights that have a scale for each block, and the model has none. Leave the "
                "argument out, or give w_qscheme a block_size"
            )
        for name in weights:
            _replace(model.graph, name)
        return ir.passes.PassResult(model, modified=True)


def _replace(graph: ir.Graph, weight: str) -> None:
    name = f"{weight}_scale"
    scale = graph.initializers[name]
    assert scale.const_value is not None
    values = scale.const_value.numpy()
    unit = np.float32(2.0 ** (int(np.frexp(values.max(initial=1e-6))[1]) - LARGEST_EXPONENT))
    with np.errstate(over="ignore"):
        halves = (values / unit).astype(np.float16)
    lost = np.count_nonzero(halves.astype(np.float32) * unit != values)
    if lost:
        raise ExportError(
            f"{weight}: float16 does not hold {lost} of its {values.size} scales: it has {BITS} significant bits. "
            f"Prepare the model with w_qscheme {{\"scale_bits\": {BITS}}} or fewer, or leave out scales='float16'"
        )
    cast = ir.node("Cast", [_constant(graph, name + HALF, halves)], {"to": ir.DataType.FLOAT})
    product = ir.node("Mul", [cast.outputs[0], _constant(graph, name + UNIT, unit)])
    result = product.outputs[0]
    result.shape, result.type = scale.shape, scale.type
    scale.replace_all_uses_with(result)
    drop_unread(graph, [scale])
    for node, value in ((cast, f"{name}{HALF}_cast"), (product, name)):
        node.name = node.outputs[0].name = value
    graph.insert_before(graph[0], [cast, product])


def _constant(graph: ir.Graph, name: str, values: np.ndarray | np.float32) -> ir.Value:
    value = ir.Value(name=name, const_value=ir.tensor(np.asarray(values), name=name))
    graph.register_initializer(value)
    return value


def half_scales_of(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """The float32 scales that a file holds as float16, by the names that their readers read."""
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    names = [name.removesuffix(HALF) for name in constants if name.endswith(f"_scale{HALF}")]
    return {
        name: values_of(constants[name + HALF]).astype(np.float32) * values_of(constants[name + UNIT])
        for name in names
        if name + UNIT in constants
    }

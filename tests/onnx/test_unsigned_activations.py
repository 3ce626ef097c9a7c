"""int8 activations as uint8: the same values, and records that describe the file."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from fxqat.onnx.name_tensors import RECORDS, tensors_of
from fxqat.onnx.quant_params import check_params
from fxqat.onnx.unsigned_activations import UnsignedActivations
from fxqat.scheme import QuantizedTensor, QuantizeScheme
from tests.export_models import constants, session

SHAPE = (4, 3, 5, 7)
X = np.random.default_rng(0).normal(0, 3, SHAPE).astype(np.float32)


def model_of(scheme: QuantizeScheme, zero_point: int, dtype: str = "int8") -> ir.Model:
    """``y = dq(q(min(max(x, low), high))) * dq(w)``, with the records of x and of the weight w."""
    low, high = ((end - zero_point) * np.float32(0.03) for end in (scheme.quant_min, scheme.quant_max))
    held = {
        **{"low": np.float32(low), "high": np.float32(high)},
        **{"x_scale": np.float32(0.03), "x_zero_point": np.array(zero_point, dtype)},
        **{"w_quantized": np.arange(-3, 4, dtype=np.int8), "w_scale": np.float32(0.5), "w_zero_point": np.int8(0)},
    }
    nodes = [
        helper.make_node("Max", ["x", "low"], ["raised"]),
        helper.make_node("Min", ["raised", "high"], ["clamped"]),
        helper.make_node("QuantizeLinear", ["clamped", "x_scale", "x_zero_point"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "x_scale", "x_zero_point"], ["dq"]),
        helper.make_node("DequantizeLinear", ["w_quantized", "w_scale", "w_zero_point"], ["w"]),
        helper.make_node("Mul", ["dq", "w"], ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, SHAPE) for name in "xy")
    q = helper.make_tensor_value_info("q", helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), SHAPE)
    initializers = [numpy_helper.from_array(np.asarray(array), name) for name, array in held.items()]
    graph = helper.make_graph(nodes, "graph", [x], [y], initializers, value_info=[q])
    model = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))
    scale = (float(np.float32(0.03)),)
    model.meta[RECORDS] = {
        "0": QuantizedTensor("clamped", "activation", "x", dtype, scheme, None, scale, (zero_point,)),
        "1": QuantizedTensor("w", "weight", "w", "int8", QuantizeScheme(), None, (0.5,), (0,)),
    }
    return model


def run(model: onnx.ModelProto) -> tuple[np.ndarray, np.ndarray]:
    """The output, and the integers of x."""
    onnx.checker.check_model(model, full_check=True)
    result = onnx.ModelProto()
    result.CopyFrom(model)
    result.graph.output.extend(value for value in model.graph.value_info if value.name == "q")
    y, q = session(result).run(None, {"x": X})
    return y, q


@pytest.mark.parametrize(
    ("scheme", "zero_point"),
    [
        (QuantizeScheme(8), 0),
        (QuantizeScheme(8, narrow_range=True), 0),
        (QuantizeScheme(8, symmetric=False), -37),
        (QuantizeScheme(5), 0),
        (QuantizeScheme(7, symmetric=False), 63),
    ],
    ids=str,
)
def test_the_values_are_the_same(scheme: QuantizeScheme, zero_point: int) -> None:
    expected, signed = run(ir.to_proto(model_of(scheme, zero_point)))
    result = UnsignedActivations()(model_of(scheme, zero_point))
    file = ir.to_proto(result.model)
    found, unsigned = run(file)
    assert result.modified
    assert np.array_equal(found, expected)
    assert (signed.dtype, unsigned.dtype) == (np.int8, np.uint8)
    assert np.array_equal(unsigned.astype(int), signed.astype(int) + 2 ** (scheme.bit_width - 1))
    assert len(np.unique(signed)) > 20
    record = tensors_of(result.model)["0"]
    assert (unsigned.min(), unsigned.max()) == (record.scheme.quant_min, record.scheme.quant_max)
    assert record.dtype == "uint8"
    check_params(file, tensors_of(result.model).values())


def test_symmetric_means_the_middle() -> None:
    record = tensors_of(UnsignedActivations()(model_of(QuantizeScheme(8), 0)).model)["0"]
    assert record.zero_point == (record.scheme.symmetric_zero_point,) == (128,)
    assert record.as_json()["symmetric"] is True


@pytest.mark.parametrize(("bits", "dtype"), [(4, "int4"), (16, "int16"), (8, "uint8")])
def test_other_types_and_weights_stay(bits: int, dtype: str) -> None:
    scheme = QuantizeScheme(bits, signed=not dtype.startswith("u"))
    model = model_of(scheme, 5, "int8" if bits == 4 else dtype)
    model.meta[RECORDS]["0"] = QuantizedTensor("clamped", "activation", "x", dtype, scheme, None, (0.03,), (5,))
    before = constants(ir.to_proto(model))
    result = UnsignedActivations()(model)
    assert not result.modified
    after = constants(ir.to_proto(result.model))
    assert all(np.array_equal(before[name], after[name]) and before[name].dtype == after[name].dtype for name in before)


def product(reader: str, weight: bool = False) -> ir.Model:
    """``y = dq(q(x))^T @ dq(q(x))``, a further reader of the first operand, or a constant as the second."""
    held = {"s": np.float32(0.03), "z": np.int8(0), "w_q": np.ones((7, 7), np.int8)}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["dq"]),
        helper.make_node("Transpose", ["dq"], ["moved"], perm=[1, 0]),
        helper.make_node("DequantizeLinear", ["w_q", "s", "z"], ["w"]),
        helper.make_node("MatMul", ["moved", "w" if weight else "dq"], ["product"]),
        helper.make_node(reader, ["dq"], ["further"]),
        helper.make_node("Add", ["product", "further"], ["y"]),
    ]
    if reader == "DequantizeLinear":  # no further one
        del nodes[-2:]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, (7, 7)) for name in ("x", nodes[-1].output[0]))
    initializers = [numpy_helper.from_array(np.asarray(array), name) for name, array in held.items()]
    graph = helper.make_graph(nodes, "graph", [x], [y], initializers)
    model = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))
    record = QuantizedTensor("x", "activation", "x", "int8", QuantizeScheme(8), None, (float(np.float32(0.03)),), (0,))
    model.meta[RECORDS] = {"0": record}
    return model


@pytest.mark.parametrize(
    ("reader", "weight", "dtype"),
    [("DequantizeLinear", False, "int8"), ("Relu", False, "uint8"), ("DequantizeLinear", True, "uint8")],
    ids=["products only", "another reader", "a layer"],
)
def test_operands_of_products_stay_signed_where_asked(reader: str, weight: bool, dtype: str) -> None:
    kept = UnsignedActivations(keep_products=True)(product(reader, weight)).model
    assert tensors_of(kept)["0"].dtype == dtype
    check_params(ir.to_proto(kept), tensors_of(kept).values())
    assert tensors_of(UnsignedActivations()(product(reader, weight)).model)["0"].dtype == "uint8"

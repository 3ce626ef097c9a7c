"""Clamps: what ONNX Runtime's optimizer would drop before a narrow Q node is written so that it does not."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from fxqat.onnx.clamps import WriteClamps
from tests.export_models import after, node_types, session

X = np.linspace(-9, 9, 24, dtype=np.float32).reshape(1, 2, 3, 4)
BOUNDS = {"": [], "low": ["low", ""], "high": ["", "high"], "both": ["low", "high"], "none": ["", ""]}


def model_of(clamp: str, dtype: int, bounds: str = "", between: tuple[str, ...] = ()) -> onnx.ModelProto:
    """``y = exp(dq(q(between(clamp(x)))))`` with a zero point at which the clamp has an effect."""
    nodes = [helper.make_node(clamp, ["x", *BOUNDS[bounds]], ["clamped"])]
    for operator in between:
        extra = ["shape"] if operator == "Reshape" else []
        attributes = {"kernel_shape": [1, 1]} if operator == "MaxPool" else {}
        nodes.append(helper.make_node(operator, [nodes[-1].output[0], *extra], [f"{operator}_out"], **attributes))
    nodes += [
        helper.make_node("QuantizeLinear", [nodes[-1].output[0], "scale", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["dq"]),
        helper.make_node("Exp", ["dq"], ["y"]),
    ]
    held = {
        "scale": np.float32(0.5),
        "zero": np.array(int(dtype == TensorProto.UINT4), helper.tensor_dtype_to_np_dtype(dtype)),
    }
    held |= {"low": np.float32(-0.5), "high": np.float32(1.0), "shape": np.array([2, 12])}
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, X.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * (2 if "Reshape" in between else 4))],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in held.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)], ir_version=13)


def outputs(model: onnx.ModelProto, optimized_to=None) -> np.ndarray:
    onnx.checker.check_model(model, full_check=True)
    return session(model, optimized_to).run(None, {"x": X})[0]


@pytest.mark.parametrize("dtype", [TensorProto.INT4, TensorProto.UINT4, TensorProto.INT2])
@pytest.mark.parametrize(
    ("clamp", "bounds", "between", "written"),
    [
        ("Relu", "", (), ["Max"]),
        ("Relu", "", ("Reshape",), ["Max"]),
        ("Relu", "", ("Transpose", "MaxPool"), ["Max"]),
        ("Clip", "both", (), ["Max", "Min"]),
        ("Clip", "low", (), ["Max"]),
        ("Clip", "high", ("Transpose",), ["Min"]),
    ],
)
def test_a_clamp_before_a_narrow_type_computes_the_same(
    clamp: str, bounds: str, between: tuple[str, ...], written: list[str], dtype: int, tmp_path
) -> None:
    expected = outputs(model_of(clamp, dtype, bounds, between))
    model = after(model_of(clamp, dtype, bounds, between), WriteClamps())
    assert node_types(model)[: len(written)] == written
    assert clamp not in node_types(model)
    assert np.array_equal(outputs(model), expected)
    assert len(np.unique(expected)) > 1
    if "MaxPool" not in between and (dtype != TensorProto.INT2 or not between):  # it has no kernels for those then
        assert np.array_equal(outputs(model, tmp_path / "optimized.onnx"), expected)


@pytest.mark.parametrize(
    ("clamp", "bounds", "dtype", "between"),
    [
        ("Relu", "", TensorProto.INT8, ()),
        ("Clip", "both", TensorProto.UINT8, ()),
        ("Relu", "", TensorProto.INT16, ()),
        ("Clip", "none", TensorProto.INT4, ()),
        ("Relu", "", TensorProto.INT4, ("Sigmoid",)),
        ("Sigmoid", "", TensorProto.INT4, ()),
    ],
)
def test_others_stay_as_they_are(clamp: str, bounds: str, dtype: int, between: tuple[str, ...]) -> None:
    model = ir.from_proto(model_of(clamp, dtype, bounds, between))
    before = ir.to_proto(model).SerializeToString()
    assert not WriteClamps()(model).modified
    assert ir.to_proto(model).SerializeToString() == before

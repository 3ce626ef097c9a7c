"""Clamps: what ONNX Runtime's optimizer would drop by mistake is written so that it does not."""

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


STEPS = np.linspace(-150, 150, 24, dtype=np.float32).reshape(1, 2, 3, 4)


def tiny(scale: float, zero: int, dtype: type, low: float | None, high: float | None, operator: str = "Clip"):
    """``y = dq(q(clamp(-x))) / scale``; the bounds are in steps from zero."""
    held = {"scale": np.float32(scale), "zero": np.array(zero, dtype)}
    held |= {name: np.float32(v * scale) for name, v in (("low", low), ("high", high)) if v is not None}
    bounds = [name if name in held else "" for name in ("low", "high")] if operator == "Clip" else []
    nodes = [
        helper.make_node("Neg", ["x"], ["negative"]),
        helper.make_node(operator, ["negative", *bounds], ["clamped"]),
        helper.make_node("QuantizeLinear", ["clamped", "scale", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["dq"]),
        helper.make_node("Div", ["dq", "scale"], ["y"]),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, X.shape) for name in ("x", "y")]
    initializers = [numpy_helper.from_array(np.asarray(array), name) for name, array in held.items()]
    graph = helper.make_graph(nodes, "graph", values[:1], values[1:], initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize(
    ("scale", "zero", "dtype", "low", "high"),
    [
        (9e-10, 0, np.int8, 0.0, None),  # the ReLU6 of a model with tiny activations
        (9e-10, 0, np.int8, 0.0, 6e9),
        (1e-12, 0, np.int8, 0.0, 6e12),
        (1e-10, 0, np.uint8, 0.0, 100.0),
        (1e-10, -128, np.int8, 0.0, 100.0),
        (1e-12, 0, np.int16, 0.0, 100.0),
    ],
)
def test_a_clip_before_tiny_steps_is_kept(scale: float, zero: int, dtype: type, low, high, tmp_path) -> None:
    given = tiny(scale, zero, dtype, low, high)
    feeds = {"x": STEPS * np.float32(scale)}
    expected = session(given).run(None, feeds)[0]
    assert np.array_equal(expected.round(), np.clip(-STEPS, low, high).round().clip(None, np.iinfo(dtype).max - zero))
    model = after(given, WriteClamps())
    assert "Clip" not in node_types(model)
    assert np.array_equal(session(model).run(None, feeds)[0], expected)
    assert np.array_equal(session(model, tmp_path / "optimized.onnx").run(None, feeds)[0], expected)


@pytest.mark.parametrize(
    ("scale", "zero", "dtype", "low", "high", "operator"),
    [
        (1e-3, 0, np.int8, 0.0, 6e3, "Clip"),  # it cuts, and ONNX Runtime sees it
        (9e-10, 0, np.uint8, 0.0, 6e9, "Clip"),  # it cuts nothing
        (0.0235294122248888, 0, np.uint8, 0.0, 255.0 - 1e-6, "Clip"),  # it cuts less than half a step
        (9e-10, 0, np.int8, None, None, "Relu"),  # ONNX Runtime compares integers here
    ],
)
def test_a_clamp_that_the_optimizer_judges_rightly_stays(scale, zero, dtype, low, high, operator, tmp_path) -> None:
    given = tiny(scale, zero, dtype, low, high, operator)
    assert not WriteClamps()(ir.from_proto(given)).modified
    feeds = {"x": STEPS * np.float32(scale)}
    expected = session(given).run(None, feeds)[0]
    assert np.array_equal(session(given, tmp_path / "optimized.onnx").run(None, feeds)[0], expected)

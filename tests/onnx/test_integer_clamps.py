"""Clamps behind QuantizeLinear: the same integers, an integer convolution in ONNX Runtime, and where they stay."""

from itertools import product

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from fxqat.onnx.integer_clamps import ClampIntegers
from tests.export_models import after, constants, node_types, session

X = np.random.default_rng(0).normal(0, 2, (2, 3, 6, 7)).astype(np.float32)
NUMBERS = {"zero": 0.0, "six": 6.0, "low": -0.52, "high": 1.0, "far": 1e6, "nan": np.nan}
SCALE = np.float32(0.03)
CLAMPS = {
    "relu": [("Relu", [])],
    "relu6": [("Clip", ["zero", "six"])],
    "clip": [("Clip", ["low", "high"])],
    "clip_low": [("Clip", ["low"])],
    "clip_high": [("Clip", ["", "high"])],
    "clip_none": [("Clip", [])],
    "max_min": [("Max", ["low"]), ("Min", ["high"])],
    "constant_first": [("Max", ["low", None]), ("Min", ["high", None])],
    "relu_narrow": [("Relu", []), ("Max", ["low"]), ("Min", ["high"])],
    "outside": [("Clip", ["zero", "six"]), ("Max", ["far"])],
}
CENTERS = [("int8", 0), ("uint8", 128), ("uint8", 0), ("uint8", 90), ("int8", -128)]


def model_of(
    clamps: list[tuple[str, list[str | None]]], dtype: str = "uint8", zero_point: int = 128, producer: str = "Conv"
) -> onnx.ModelProto:
    """``y = dq(q(clamps(conv(dq(q(x)), w))))``; None among the inputs of a clamp is the place of its value."""
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "x_scale", "x_zero"], ["x_q"]),
        helper.make_node("DequantizeLinear", ["x_q", "x_scale", "x_zero"], ["x_dq"]),
        helper.make_node("DequantizeLinear", ["w_q", "w_scale", "w_zero"], ["w"]),
    ]
    if producer == "Conv":
        nodes.append(helper.make_node("Conv", ["x_dq", "w"], ["value"]))
    value = {"Conv": "value", "DequantizeLinear": "x_dq", "input": "x"}[producer]
    for number, (kind, inputs) in enumerate(clamps):
        given = [value if name is None else name for name in inputs] if None in inputs else [value, *inputs]
        value = f"clamped_{number}"
        nodes.append(helper.make_node(kind, given, [value], name=value))
    nodes += [
        helper.make_node("QuantizeLinear", [value, "y_scale", "y_zero"], ["y_q"]),
        helper.make_node("DequantizeLinear", ["y_q", "y_scale", "y_zero"], ["y"]),
    ]
    held = {name: np.float32(number) for name, number in NUMBERS.items()}
    held |= {"x_scale": SCALE, "x_zero": np.uint8(128), "y_scale": SCALE, "y_zero": np.array(zero_point, dtype)}
    weight = np.random.default_rng(1).integers(-99, 99, (4, 3, 1, 1), np.int8)
    held |= {"w_q": weight, "w_scale": np.float32(0.01), "w_zero": np.int8(0)}
    used = {name for node in nodes for name in node.input}
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, X.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * 4)],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in held.items() if name in used],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def run(model: onnx.ModelProto, optimized_to=None, x: np.ndarray = X) -> np.ndarray:
    onnx.checker.check_model(model, full_check=True)
    return session(model, optimized_to).run(None, {"x": x})[0]


@pytest.mark.parametrize(("clamps", "center"), [*product(CLAMPS, CENTERS)], ids=str)
def test_the_integers_are_the_same(clamps: str, center: tuple[str, int]) -> None:
    before = model_of(CLAMPS[clamps], *center)
    expected, model = run(before), after(before, ClampIntegers())
    assert np.array_equal(run(model), expected)
    types = node_types(model)
    assert types[types.index("Conv") + 1] == "QuantizeLinear"
    assert types.count("Clip") <= 1
    assert not {"Relu", "Max", "Min"} & set(types)
    made = {name for node in model.graph.node for name in node.output}
    assert {f"clamped_{len(CLAMPS[clamps]) - 1}", "y_q"} <= made  # the names stay
    assert not set(NUMBERS) & set(constants(model))  # no unread bound is left


@pytest.mark.parametrize("zero_point", range(0, 256, 51))
def test_ties_and_borders_are_the_same(zero_point: int) -> None:
    """Values on every rounding boundary and far beyond the range."""
    steps = np.arange(-300, 300.5, 0.5, np.float32) * SCALE
    x = np.resize(np.concatenate([steps, [-1e9, 1e9, -np.inf, np.inf]]), (2, 3, 6, 7, 5)).astype(np.float32)
    for clamps in CLAMPS.values():
        before = model_of(clamps, "uint8", zero_point)
        before.graph.node[3].CopyFrom(helper.make_node("Identity", ["x"], ["value"]))
        model = after(before, ClampIntegers())
        for part in np.moveaxis(x, -1, 0):
            assert np.array_equal(run(model, x=part), run(before, x=part))
        assert node_types(model) != node_types(before)


@pytest.mark.parametrize(("clamps", "left"), [("relu", 1), ("relu6", 1), ("max_min", 1)])
def test_a_convolution_is_an_integer_one(clamps: str, left: int, tmp_path) -> None:
    before = model_of(CLAMPS[clamps])
    run(before, tmp_path / "before.onnx")
    model = after(before, ClampIntegers())
    run(model, tmp_path / "after.onnx")
    assert "QLinearConv" not in node_types(onnx.load(tmp_path / "before.onnx"))
    assert "QLinearConv" in node_types(onnx.load(tmp_path / "after.onnx"))
    assert node_types(model).count("Clip") == left


def test_a_relu_to_the_smallest_integer_needs_no_clip() -> None:
    assert "Clip" not in node_types(after(model_of(CLAMPS["relu"], "uint8", 0), ClampIntegers()))
    assert "Clip" not in node_types(after(model_of(CLAMPS["clip_none"]), ClampIntegers()))


@pytest.mark.parametrize(
    "case", ["other reader", "output", "input", "dequantized", "per channel", "int16", "nan", "computed bound"]
)
def test_a_clamp_stays(case: str) -> None:
    """Cases 4 to 6 of the pass."""
    producer = {"input": "input", "dequantized": "DequantizeLinear"}.get(case, "Conv")
    dtype, clamps = "int16" if case == "int16" else "uint8", CLAMPS["relu"]
    if case == "nan":
        clamps = [("Clip", ["nan"])]
    if case == "computed bound":
        clamps = [("Max", ["w"])]
    model = model_of(clamps, dtype, 7, producer)
    if case == "other reader":
        model.graph.node.append(helper.make_node("Abs", ["clamped_0"], ["abs"]))
        model.graph.output.append(helper.make_tensor_value_info("abs", TensorProto.FLOAT, [None] * 4))
    if case == "output":
        model.graph.output.append(helper.make_tensor_value_info("clamped_0", TensorProto.FLOAT, [None] * 4))
    if case == "per channel":
        for tensor in model.graph.initializer:
            if tensor.name.startswith("y_"):
                tensor.CopyFrom(numpy_helper.from_array(np.repeat(numpy_helper.to_array(tensor), 4), tensor.name))
    result = after(model, ClampIntegers())
    assert node_types(result) == node_types(model)
    assert set(constants(result)) == set(constants(model))

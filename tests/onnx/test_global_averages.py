"""Means of whole images as GlobalAveragePool: the same values, an integer operator, and which means stay."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from fxqat.onnx.global_averages import GlobalAverages
from tests.export_models import after, constants, node_types, session

NODES = ["DequantizeLinear", "ReduceMean", "QuantizeLinear"]


def model_of(
    shape: tuple[int, ...], axes: list[int] | None, opset: int = 18, keepdims: int = 1, reader: str = "DequantizeLinear"
) -> onnx.ModelProto:
    """``y = q(mean(dq(x)))``; with another reader, of a float x."""
    given = {"axes": axes} if opset < 18 and axes is not None else {}
    inputs = ["axes"] if opset >= 18 and axes is not None else []
    read = ["x", "scale", "zero"] if reader == "DequantizeLinear" else ["x"]
    nodes = [
        helper.make_node(reader, read, ["value"]),
        helper.make_node("ReduceMean", ["value", *inputs], ["mean"], name="the_mean", keepdims=keepdims, **given),
        helper.make_node("QuantizeLinear", ["mean", "mean_scale", "mean_zero"], ["y"]),
    ]
    held = {"scale": np.float32(0.0625), "zero": np.uint8(120), "mean_scale": np.float32(0.031)}
    held |= {"mean_zero": np.uint8(118)} | ({"axes": np.array(axes)} if inputs else {})
    used = {name for node in nodes for name in node.input}
    dtype = TensorProto.UINT8 if reader == "DequantizeLinear" else TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", dtype, shape)],
        [helper.make_tensor_value_info("y", TensorProto.UINT8, [None] * (len(shape) if keepdims else 0))],
        [numpy_helper.from_array(array, name) for name, array in held.items() if name in used],
        value_info=[helper.make_tensor_value_info("value", TensorProto.FLOAT, shape)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


@pytest.mark.parametrize("opset", [13, 18, 21])
@pytest.mark.parametrize(
    ("shape", "axes"),
    [((2, 64, 7, 7), [2, 3]), ((2, 64, 8, 6), [-1, -2]), ((1, 64, 9), [2]), ((1, 64, 3, 4, 5), [2, 3, 4])],
)
def test_the_integers_are_the_same_on_an_integer_operator(shape, axes, opset, tmp_path):
    before = model_of(shape, axes, opset)
    model = after(before, GlobalAverages())
    onnx.checker.check_model(model, full_check=True)
    assert node_types(model) == ["DequantizeLinear", "GlobalAveragePool", "QuantizeLinear"]
    assert (model.graph.node[1].name, list(model.graph.node[1].output)) == ("the_mean", ["mean"])
    assert "axes" not in constants(model)
    x = {"x": np.random.default_rng(0).integers(90, 150, shape, np.uint8)}
    expected = session(before).run(None, x)[0]
    assert len(np.unique(expected)) > 8
    assert np.array_equal(session(model).run(None, x)[0], expected)
    assert np.array_equal(session(model, tmp_path / "optimized.onnx").run(None, x)[0], expected)
    if len(shape) == 4:
        assert node_types(onnx.load(tmp_path / "optimized.onnx")) == ["QLinearGlobalAveragePool"]


@pytest.mark.parametrize(
    "model",
    [
        model_of((2, 4, 6, 6), [1, 2, 3]),
        model_of((2, 4, 6, 6), [3]),
        model_of((2, 4, 6, 6), None),
        model_of((2, 4), [1]),
        model_of((2, 4, 6, 6), [2, 3], keepdims=0),
        model_of((2, 4, 6, 6), [2, 3], 13, keepdims=0),
        model_of((2, 4, 6, 6), [2, 3], reader="Relu"),
    ],
    ids=["channels_too", "one_axis", "all_axes", "no_image", "drops_axes", "drops_axes_13", "float"],
)
def test_another_mean_stays(model):
    assert node_types(after(model, GlobalAverages())) == node_types(model)

"""The rounding before an addition: a Clip that changes nothing, where OpenVINO would drop it."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from fxqat.onnx.add_branches import KeepAddBranches
from tests.export_models import after, node_types, session

X = np.random.default_rng(0).normal(0, 1, (2, 16, 12, 12)).astype(np.float32)


def model_of(
    operator: str = "Add", dtype: str = "uint8", between: str = "", further: str = "", branches: int = 2
) -> onnx.ModelProto:
    """``y = dq(q(op(branch(x), branch(x))))`` with ``branch = dq(q(between(conv(dq(q(x))))))``."""
    nodes, held = [], {"zero": np.array(128 if dtype == "uint8" else 0, dtype)}

    def rounded(value: str, name: str) -> str:
        held[f"{name}_s"] = np.float32({"x": 0.03125, "y": 0.109375}.get(name, 0.0625))
        nodes.append(helper.make_node("QuantizeLinear", [value, f"{name}_s", "zero"], [f"{name}_q"]))
        nodes.append(helper.make_node("DequantizeLinear", [f"{name}_q", f"{name}_s", "zero"], [f"{name}_dq"]))
        return f"{name}_dq"

    x = rounded("x", "x")
    operands = [x] * 2
    for number in range(branches):
        name = f"branch_{number}"
        held[f"{name}_w"] = np.random.default_rng(number).integers(-99, 99, (16, 16, 3, 3), np.int8)
        held |= {"w_scale": np.float32(0.00390625), "w_zero": np.int8(0)}
        nodes.append(helper.make_node("DequantizeLinear", [f"{name}_w", "w_scale", "w_zero"], [f"{name}_w_dq"]))
        nodes.append(helper.make_node("Conv", [x, f"{name}_w_dq"], [f"{name}_conv"], pads=[1] * 4))
        value = f"{name}_conv"
        if between:
            nodes.append(helper.make_node(between, [value], [f"{name}_between"]))
            value = f"{name}_between"
        operands[number] = rounded(value, name)
    nodes.append(helper.make_node(operator, operands, ["sum"]))
    outputs = [rounded("sum", "y")]
    if further:
        nodes.append(helper.make_node("Abs", [further], ["abs"]))
        outputs.append("abs")
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, X.shape)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, X.shape) for name in outputs],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in held.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def run(model: onnx.ModelProto) -> np.ndarray:
    onnx.checker.check_model(model, full_check=True)
    return session(model).run(None, {"x": X})[0]


@pytest.mark.parametrize("operator", ["Add", "Sub"])
@pytest.mark.parametrize(("dtype", "branches"), [("uint8", 2), ("uint8", 1), ("int8", 2)])
def test_the_values_are_the_same(operator: str, dtype: str, branches: int) -> None:
    before = model_of(operator, dtype, branches=branches)
    model = after(before, KeepAddBranches())
    assert node_types(model).count("Clip") == branches
    expected = run(before)
    assert np.array_equal(run(model), expected)
    assert len(np.unique(expected)) > 100


@pytest.mark.parametrize(
    ("change", "clips"),
    [
        ({"operator": "Mul"}, 0),
        ({"between": "Relu"}, 0),
        ({"further": "branch_0_dq"}, 1),
        ({"branches": 0}, 0),
        ({"dtype": "int16"}, 0),
    ],
    ids=str,
)
def test_nothing_is_added_elsewhere(change: dict[str, str], clips: int) -> None:
    model = model_of(**change)
    changed = after(model, KeepAddBranches())
    assert node_types(changed).count("Clip") == clips
    assert [kind for kind in node_types(changed) if kind != "Clip"] == node_types(model)


def test_openvino_computes_the_sum_of_rounded_values() -> None:
    openvino = pytest.importorskip("openvino")

    def share_off(model: onnx.ModelProto, expected: np.ndarray) -> float:
        compiled = openvino.Core().compile_model(openvino.Core().read_model(model.SerializeToString()), "CPU")
        return float((compiled([X])[0] != expected).mean())

    before = model_of()
    expected = run(before)
    assert share_off(before, expected) > 0.02  # a version of OpenVINO that rounds needs the pass no more
    assert share_off(after(before, KeepAddBranches()), expected) == 0.0

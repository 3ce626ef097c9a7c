"""A Clip that changes nothing, where OpenVINO would drop a rounding or fail."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from fxqat.onnx.keep_integers import KeepIntegers
from tests.export_models import after, needs_exact_sums, node_types, session

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
    model = after(before, KeepIntegers())
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
    changed = after(model, KeepIntegers())
    assert node_types(changed).count("Clip") == clips
    assert [kind for kind in node_types(changed) if kind != "Clip"] == node_types(model)


def test_openvino_computes_the_sum_of_rounded_values() -> None:
    openvino = pytest.importorskip("openvino")
    needs_exact_sums()

    def share_off(model: onnx.ModelProto, expected: np.ndarray) -> float:
        compiled = openvino.Core().compile_model(openvino.Core().read_model(model.SerializeToString()), "CPU")
        return float((compiled([X])[0] != expected).mean())

    before = model_of()
    expected = run(before)
    assert share_off(before, expected) > 0.02  # a version of OpenVINO that rounds needs the pass no more
    assert share_off(after(before, KeepIntegers()), expected) == 0.0


HEADER = '<ir_version: 8, opset_import: ["": 18]>'
HALVES = "(float[1, 8, 6, 6] a, float[1, 8, 6, 6] b) => (float[1, 16, 6, 6] y)"
HELD = "<float s = {0.125}, float t = {0.3125}, uint8 z = {128}, float c = {1.5}, float[4] d = {0.25, -0.75, 3, 1.5}>"


def text_model(signature: str, body: str) -> onnx.ModelProto:
    """A model of ONNX's text form."""
    return onnx.parser.parse_model(f"{HEADER} graph {signature} {HELD} {{ {body} }}")


def behind_concat(before: str, between: str) -> onnx.ModelProto:
    """``y = dq(q(between(dq(q(before(concat(a, b)))))))``; ``before`` may be empty."""
    return text_model(
        HALVES,
        f"""{"joined" if before else "x"} = Concat<axis = 1>(a, b)
        {f"x = {before}" * bool(before)}
        x_q = QuantizeLinear(x, s, z)
        x_dq = DequantizeLinear(x_q, s, z)
        v = {between}
        y_q = QuantizeLinear(v, t, z)
        y = DequantizeLinear(y_q, t, z)""",
    )


def with_constant(operator: str, computed: str = "Identity(d)") -> onnx.ModelProto:
    """``y = dq(q(x)) operator dq(q(constant))``, where the constant may be computed from ``d``."""
    return text_model(
        "(float[2, 3, 4] x) => (float[2, 3, 4] y)",
        f"""x_q = QuantizeLinear(x, s, z)
        x_dq = DequantizeLinear(x_q, s, z)
        d_used = {computed}
        d_q = QuantizeLinear(d_used, t, z)
        d_dq = DequantizeLinear(d_q, t, z)
        y = {operator}(x_dq, d_dq)""",
    )


def product_behind_concat(axis: int, half: str, whole: str, operator: str = "MatMul") -> onnx.ModelProto:
    """``y = dq(q(concat(dq(q(a)), dq(q(b))))) operator dq(w)``."""
    weight = ", ".join(str(number * 37 % 199 - 99) for number in range(16))
    model = onnx.parser.parse_model(f"""{HEADER} graph (float[{half}] a, float[{half}] b) => (float[{whole}] y)
        <float s = {{0.125}}, uint8 z = {{130}}, int8 n = {{0}}, int8[4, 4] w = {{{weight}}}> {{
        a_q = QuantizeLinear(a, s, z)
        a_dq = DequantizeLinear(a_q, s, z)
        b_q = QuantizeLinear(b, s, z)
        b_dq = DequantizeLinear(b_q, s, z)
        joined = Concat<axis = {axis}>(a_dq, b_dq)
        x_q = QuantizeLinear(joined, s, z)
        x_dq = DequantizeLinear(x_q, s, z)
        w_dq = DequantizeLinear(w, s, n)
        y = {operator}(x_dq, w_dq) }}""")
    return onnx.shape_inference.infer_shapes(model)


def feeds_of(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    shapes = {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in model.graph.input}
    return {name: random.normal(0, 3, shape).astype(np.float32) for name, shape in shapes.items()}


FAILING = {
    "two roundings": behind_concat("", "Identity(x_dq)"),
    "two roundings behind Relu": behind_concat("Relu(joined)", "Identity(x_dq)"),
    "product between": behind_concat("", "Mul(x_dq, c)"),
    "clamp between": behind_concat("", "Clip(x_dq)"),
    "product behind joined rows": product_behind_concat(1, "1, 4, 4", "1, 8, 4"),
    "Gemm behind joined rows": product_behind_concat(0, "4, 4", "8, 4", "Gemm"),
    "sum with a constant": with_constant("Add"),
    "product with a constant": with_constant("Mul"),
    "sum with a computed constant": with_constant("Add", "Abs(d)"),
}


@pytest.mark.parametrize("name", FAILING)
def test_the_values_behind_concat_and_of_constants_are_the_same(name: str) -> None:
    model = after(FAILING[name], KeepIntegers())
    assert node_types(model).count("Clip") == node_types(FAILING[name]).count("Clip") + 1
    feeds = feeds_of(model)
    onnx.checker.check_model(model, full_check=True)
    expected = session(FAILING[name]).run(None, feeds)[0]
    assert np.array_equal(session(model).run(None, feeds)[0], expected)
    assert len(np.unique(expected)) > 10


@pytest.mark.parametrize(
    "model",
    [
        behind_concat("Sigmoid(joined)", "Identity(x_dq)"),
        behind_concat("Relu(joined)", "Sigmoid(x_dq)"),
        behind_concat("Relu(joined)", "Mul(x_dq, joined)"),
        behind_concat("Relu(joined)", "Add(x_dq, x_dq)"),
        product_behind_concat(2, "1, 4, 2", "1, 4, 4"),
    ],
    ids=["operator behind Concat", "operator between", "product of two", "two readers", "joined columns"],
)
def test_other_roundings_behind_concat_stay(model: onnx.ModelProto) -> None:
    assert node_types(after(model, KeepIntegers())) == node_types(model)


@pytest.mark.parametrize("name", FAILING)
def test_openvino_fails_unless_the_file_keeps_the_integers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "true")
    openvino = pytest.importorskip("openvino")
    onnx.save(FAILING[name], tmp_path / "model.onnx")
    lines = "import openvino, sys; openvino.Core().compile_model(sys.argv[1], 'CPU')"
    done = subprocess.run([sys.executable, "-c", lines, tmp_path / "model.onnx"], capture_output=True, check=False)
    assert done.returncode  # a version of OpenVINO that compiles it needs the pass no more

    model = after(FAILING[name], KeepIntegers())
    feeds = feeds_of(model)
    read = openvino.Core().read_model(model.SerializeToString())
    settings = {"INFERENCE_PRECISION_HINT": "f32"}
    found = openvino.Core().compile_model(read, "CPU", settings)([*feeds.values()])[0]
    assert np.allclose(found, session(model).run(None, feeds)[0], rtol=0, atol=1e-5)  # a step is 0.3125

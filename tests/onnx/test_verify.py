"""The certificate: known differences give exactly the shares they should, and the verdict follows the rules."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from fxqat.errors import ExportError, ParityError
from fxqat.onnx import ort_runs
from fxqat.onnx.output_parity import OutputParity
from fxqat.onnx.selections import SelectionParity
from fxqat.onnx.verify import ParityCertificate, Shares, TensorParity, verify

SCALES = {"x": 0.25, "mid": 0.5, "late": 1.0}
ROWS, COLUMNS = 100, 10
SIZE = ROWS * COLUMNS


def chain(dtype: int = TensorProto.INT8) -> onnx.ModelProto:
    """x (100, 10) is quantized; ``mid = relu(x)`` is quantized; ``late = 2 * mid`` is quantized; ``y = late + 1``."""
    nodes = []
    steps = {"x": [], "mid": [("Relu", ["x_dq"])], "late": [("Mul", ["mid_dq", "two"])]}
    for name, ops in steps.items():
        nodes += [helper.make_node(op, inputs, [name]) for op, inputs in ops]
        parameters = [f"{name}_scale", f"{name}_zero"]
        nodes.append(helper.make_node("QuantizeLinear", [name, *parameters], [f"{name}_q"]))
        nodes.append(helper.make_node("DequantizeLinear", [f"{name}_q", *parameters], [f"{name}_dq"]))
    nodes.append(helper.make_node("Add", ["late_dq", "one"], ["y"]))
    held = {"two": np.array(2, np.float32), "one": np.array(1, np.float32)}
    for name, scale in SCALES.items():
        held |= {f"{name}_scale": np.array(scale, np.float32)}
        held |= {f"{name}_zero": np.array(0, helper.tensor_dtype_to_np_dtype(dtype))}
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", COLUMNS])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", COLUMNS])],
        [numpy_helper.from_array(array, name) for name, array in held.items()],
    )
    opset = 18 if dtype == TensorProto.INT8 else 25
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=13 if opset > 18 else 10
    )
    onnx.checker.check_model(model, full_check=True)
    return model


def truth(rows: int = ROWS) -> tuple[np.ndarray, dict[str, np.ndarray], np.ndarray]:
    """An input on the grid, so that no value is near a rounding boundary; what ``chain`` computes of it."""
    x = np.random.default_rng(0).integers(-40, 40, (rows, COLUMNS)) * 0.5
    mid = np.maximum(x, 0)
    integers = {"x": x / 0.25, "mid": mid / 0.5, "late": 2 * mid}
    return x.astype(np.float32), {k: v.astype(np.int32) for k, v in integers.items()}, (2 * mid + 1).astype(np.float32)


def certify(change: Callable[[dict[str, np.ndarray]], None] | None = None, rows: int = ROWS) -> ParityCertificate:
    """The certificate for integers that a change has been made to."""
    x, integers, y = truth(rows)
    if change is not None:
        change(integers)
    return verify(chain(), [x], integers, [y])


def off(name: str, count: int, steps: int = 1) -> Callable[[dict[str, np.ndarray]], None]:
    def change(integers: dict[str, np.ndarray]) -> None:
        integers[name].reshape(-1)[:count] += steps

    return change


def tensor(certificate: ParityCertificate, name: str) -> TensorParity:
    return next(t for t in certificate.tensors if t.name == name)


# Shares


def test_a_file_that_is_right_has_nothing_off() -> None:
    certificate = certify()
    assert certificate.passed
    assert certificate.off_share == 0.0
    assert certificate.first_diverging is None
    assert [(t.name, t.size, t.is_first) for t in certificate.tensors] == [
        (name, SIZE, True) for name in ("x", "mid", "late")
    ]
    output = certificate.outputs[0]
    assert (output.name, output.max_abs_error) == ("y", 0.0)
    assert min(output.cosine, output.step_cosine, output.cosine_optimized) > 1 - 1e-12


@pytest.mark.parametrize(("count", "passed"), [(1, True), (5, True), (6, False), (500, False)])
def test_values_off_by_one_pass_up_to_half_a_percent(count: int, passed: bool) -> None:
    certificate = certify(off("late", count))
    late = tensor(certificate, "late")
    assert late.step == late.free == Shares(count / SIZE, 0.0)
    assert (late.off_by_0, late.off_by_1, late.off_by_2_plus) == (1 - count / SIZE, count / SIZE, 0.0)
    assert (late.passed, certificate.passed) == (passed, passed)
    assert certificate.first_diverging == "late"
    assert certificate.off_share == pytest.approx(count / (3 * SIZE))


@pytest.mark.parametrize("steps", [2, -2, 3, 100])
def test_one_value_off_by_two_fails(steps: int) -> None:
    certificate = certify(off("late", 1, steps))
    late = tensor(certificate, "late")
    assert late.free == Shares(0.0, 1 / SIZE)
    assert not late.passed
    assert not certificate.passed
    assert certificate.first_diverging == "late"


@pytest.mark.parametrize("rows", [1, 5, 10])
def test_in_a_small_tensor_one_value_on_a_rounding_boundary_is_no_failure(rows: int) -> None:
    """The share of one value in the ten logits of one image is 10 %; it is still one rounding."""
    certificate = certify(off("late", 1), rows)
    late = tensor(certificate, "late")
    assert late.size == rows * COLUMNS
    assert late.free.off_by_1 == 1 / late.size
    assert late.passed


def at_boundaries(distance: float, wrong: int = 0, dtype: int = TensorProto.INT8) -> ParityCertificate:
    """Half of ``mid`` lies so many steps from a rounding boundary, and was rounded to the other side of it."""
    x, integers, y = truth()
    above = (x > 0) & (np.arange(SIZE).reshape(x.shape) % 2 == 0)
    steps = integers["mid"] // 2 * 2 + 0.5 - distance  # ONNX Runtime rounds down, to an even number
    x = np.where(above, steps * 0.5, x).astype(np.float32)
    integers["x"] = np.rint(x / 0.25).astype(np.int32)
    integers["mid"] = np.where(above, integers["mid"] // 2 * 2 + 1, integers["mid"]).astype(np.int32)
    integers["mid"].reshape(-1)[np.flatnonzero(~above)[:wrong]] += 1
    model = chain(dtype)
    del model.graph.node[:2]  # x itself is read, so that the distance is not rounded
    relu = next(node for node in model.graph.node if node.op_type == "Relu")
    relu.input[0] = "x"
    del integers["x"]
    integers["late"] = integers["mid"]  # 2 * 0.5 / 1.0
    return verify(model, [x], integers, [(integers["late"] + 1).astype(np.float32)])


@pytest.mark.parametrize(("distance", "passed"), [(0.0, True), (9e-5, True), (2e-4, False), (0.1, False)])
def test_values_on_a_rounding_boundary_are_not_counted(distance: float, passed: bool) -> None:
    mid = tensor(at_boundaries(distance), "mid")
    assert mid.step.off_by_1 > 0.2
    assert mid.step.ties == (mid.step.off_by_1 if passed else 0.0)
    assert mid.passed is passed


@pytest.mark.parametrize(("distance", "passed"), [(9e-5 * 256, True), (2e-4 * 256, False), (0.2, False)])
def test_a_rounding_boundary_of_16_bits_is_as_wide_as_one_of_8_bits_in_reals(distance: float, passed: bool) -> None:
    mid = tensor(at_boundaries(distance, dtype=TensorProto.INT16), "mid")
    assert mid.step.ties == (mid.step.off_by_1 if passed else 0.0)
    assert mid.passed is passed
    assert not tensor(at_boundaries(distance), "mid").passed


@pytest.mark.parametrize("dtype", [TensorProto.INT4, TensorProto.INT2, TensorProto.INT16])
def test_integers_of_every_type_are_given_and_compared(dtype: int) -> None:
    limit = {TensorProto.INT4: 7, TensorProto.INT2: 1, TensorProto.INT16: 1000}[dtype]
    x = np.random.default_rng(0).integers(-limit, limit + 1, (ROWS, COLUMNS))
    mid = np.clip(np.maximum(x * 0.25, 0) / 0.5, None, limit).round()  # half to even
    integers = {name: value.astype(np.int32) for name, value in {"x": x, "mid": mid, "late": mid}.items()}
    reals = (x * 0.25).astype(np.float32)
    certificate = verify(chain(dtype), [reals], integers, [(mid + 1).astype(np.float32)])
    assert certificate.passed
    assert certificate.off_share == 0.0
    integers["late"][3, 3] -= 1
    wrong = verify(chain(dtype), [reals], integers, [(mid + 1).astype(np.float32)])
    assert tensor(wrong, "late").step.off_by_1 == 1 / SIZE


@pytest.mark.parametrize(("wrong", "passed"), [(5, True), (6, False)])
def test_the_others_of_such_a_tensor_are(wrong: int, passed: bool) -> None:
    mid = tensor(at_boundaries(0.0, wrong), "mid")
    assert mid.step.off_by_1 - mid.step.ties == pytest.approx(wrong / SIZE)
    assert mid.passed is passed


def test_step_by_step_a_later_tensor_is_judged_by_what_it_is_given() -> None:
    """If ``mid`` is off in the fake-quant model, ``late`` is computed from that ``mid``, so only ``mid`` fails."""

    def change(integers: dict[str, np.ndarray]) -> None:
        integers["mid"] += 1
        integers["late"] += 1  # 2 * 0.5 / 1.0: consistent with the mid before it

    certificate = certify(change)
    mid, late = tensor(certificate, "mid"), tensor(certificate, "late")
    assert (mid.step.off_by_1, mid.is_first, mid.passed) == (1.0, True, False)
    assert (late.step.off, late.free.off_by_1, late.is_first, late.passed) == (0.0, 1.0, False, True)
    assert not certificate.passed
    assert certificate.first_diverging == "mid"


def test_saturated_integers_are_compared_without_wrapping_around() -> None:
    def change(integers: dict[str, np.ndarray]) -> None:
        integers["x"][0, 0] += 200

    x = tensor(certify(change), "x")
    assert x.free.off_by_2_plus == 1 / SIZE
    assert x.free.off_by_1 == 0.0


# Outputs


@pytest.mark.parametrize(("noise", "passed"), [(0.0, True), (0.01, True), (3.0, False)])
def test_an_output_passes_by_its_error(noise: float, passed: bool) -> None:
    x, integers, y = truth()
    wrong = y + noise * np.random.default_rng(1).standard_normal(y.shape).astype(np.float32)
    certificate = verify(chain(), [x], integers, [wrong])
    output = certificate.outputs[0]
    expected = float((wrong.ravel() @ y.ravel()) / (np.linalg.norm(wrong) * np.linalg.norm(y)))
    assert output.step_cosine == pytest.approx(expected, abs=1e-5)
    assert output.cosine == output.step_cosine
    assert output.max_abs_error == pytest.approx(float(np.abs(wrong - y).max()))
    assert (output.passed, certificate.passed) == (passed, passed)


@pytest.mark.parametrize(("expected", "cosine"), [(0.0, 1.0), (1.0, 0.0)])
def test_an_output_of_zeros_equals_zeros_only(expected: float, cosine: float) -> None:
    model = chain()
    model.graph.initializer[1].CopyFrom(numpy_helper.from_array(np.array(0, np.float32), "one"))
    x = np.full((3, COLUMNS), -1.0, np.float32)
    integers = {"x": np.full(x.shape, -4), "mid": np.zeros(x.shape, np.int32), "late": np.zeros(x.shape, np.int32)}
    certificate = verify(model, [x], integers, [np.full(x.shape, expected, np.float32)])
    assert certificate.outputs[0].step_cosine == cosine
    assert certificate.passed is (cosine == 1.0)


# The rest


def test_tensors_that_are_not_given_are_left_alone() -> None:
    x, integers, y = truth()
    certificate = verify(chain(), [x], {"mid": integers["mid"]}, [y])
    assert [t.name for t in certificate.tensors] == ["mid"]
    assert certificate.passed


@pytest.mark.parametrize("wrong", [0, 7])
def test_integers_that_a_clip_follows_are_those_after_it(wrong: int) -> None:
    """As a file for a runtime has them: the clamp of ``mid`` is behind its QuantizeLinear."""
    model = chain()
    relu, quantizer = model.graph.node[2:4]
    relu.op_type, quantizer.output[0] = "Identity", "mid_unclamped"
    model.graph.node.insert(4, helper.make_node("Clip", ["mid_unclamped", "mid_zero"], ["mid_q"]))
    onnx.checker.check_model(model, full_check=True)
    x, integers, y = truth()
    integers["mid"].flat[:wrong] += 1
    certificate = verify(model, [x], integers, [y])
    assert tensor(certificate, "mid").step.off_by_1 == wrong / SIZE
    assert tensor(certificate, "late").free.off == 0
    assert certificate.passed == (wrong == 0)


def test_the_model_is_not_changed() -> None:
    model, (x, integers, y) = chain(), truth()
    before = model.SerializeToString()
    first, second = (verify(model, [x], integers, [y]) for _ in range(2))
    assert model.SerializeToString() == before
    assert first == second


def test_it_prints_as_a_table_and_is_json() -> None:
    certificate = certify(off("mid", 6))
    lines = str(certificate).splitlines()
    assert lines[0] == "parity FAILED: 0.2000% of the quantized values off, first: mid"
    row = next(line for line in lines if line.startswith("| mid"))
    assert "0.6000%" in row
    assert "FAILED" in row
    assert "FAILED" not in next(line for line in lines if line.startswith("| x "))
    assert lines[-1].startswith(
        "output y: error 0 and cosine 1.0000000 step by step, cosine 1.0000000 end to end (larg"
    )
    data = json.loads(json.dumps(certificate.as_json()))
    assert (data["format"], data["version"], data["passed"]) == ("fxqat.parity", 2, False)
    assert data["tensors"][1]["step"] == {"off_by_1": 0.006, "off_by_2_plus": 0.0, "ties": 0.0}


@pytest.mark.parametrize("broken", ["node", "input"])
def test_a_model_that_does_not_run_is_an_export_error(broken: str) -> None:
    model, (x, integers, y) = chain(), truth()
    if broken == "node":
        model.graph.node[-1].op_type = "NoSuchOperator"
    else:
        x = x[:, :3]
    with pytest.raises(ExportError, match="ONNX Runtime") as caught:
        verify(model, [x], integers, [y])
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize(
    ("step", "free", "is_first", "passed"),
    [
        (Shares(0, 0), Shares(0, 0), True, True),
        (Shares(0.005, 0), Shares(0.005, 0), True, True),
        (Shares(0, 0), Shares(0.5, 0.1), False, True),  # what it is computed from is off already
        (Shares(0, 0), Shares(0.5, 0.0), True, False),
        (Shares(0.5, 0), Shares(0, 0), False, False),
        (Shares(0, 0.001), Shares(0, 0), False, False),
        (Shares(0.5, 0, 0.499), Shares(0.5, 0, 0.499), True, True),
        (Shares(0.5, 0, 0.49), Shares(0, 0), False, False),
        (Shares(0.5, 0.001, 0.5), Shares(0, 0), False, False),
    ],
)
def test_the_rules_for_a_tensor(step: Shares, free: Shares, is_first: bool, passed: bool) -> None:
    parity = TensorParity("t", 10_000, step, free, is_first)
    assert parity.passed is passed
    assert parity.off_by_0 == 1 - free.off


def test_the_certificate_passes_only_if_all_of_it_does() -> None:
    good = TensorParity("t", 10_000, Shares(0, 0), Shares(0, 0), True)
    output = OutputParity("y", 0.0, 0, 1.0, 1.0, 0.0, 1.0, 1.0)
    selection = SelectionParity("places", 10, 3, 0)
    certificate = ParityCertificate((good,), (output,), 0.0, None, "1", (selection,))
    assert certificate.passed
    assert not replace(certificate, tensors=(good, replace(good, step=Shares(0, 1.0)))).passed
    assert not replace(certificate, outputs=(replace(output, step_error=0.015),)).passed
    assert not replace(certificate, outputs=(replace(output, step_mismatches=1),)).passed
    assert not replace(certificate, selections=(replace(selection, wrong=1),)).passed
    assert replace(certificate, outputs=(replace(output, cosine_optimized=0.5),)).passed  # for information only
    assert replace(certificate, second_size=certificate).passed
    assert not replace(certificate, second_size=replace(certificate, outputs=(replace(output, step_error=1.0),))).passed


@pytest.mark.parametrize(
    ("changes", "said"),
    [((0.995, None), None), ((0.98, None), "y0 0.9800."), ((0.98, 0.97), "y0 0.9800, y1 0.9700."), ((None,), None)],
)
def test_outputs_that_the_optimizer_changes_are_told_in_one_sentence(changes: tuple, said: str | None) -> None:
    outputs = tuple(OutputParity(f"y{i}", 0.0, 0, 1.0, 1.0, 0.0, 1.0, change) for i, change in enumerate(changes))
    warnings = ParityCertificate((), outputs, 0.0, None, "1.32").warnings(onnx.ModelProto())
    assert len(warnings) == int(said is not None)
    assert all(f"without optimizations: {said} Compare" in text and "1.32" in text for text in warnings)


def test_an_optimizer_that_fails_is_in_the_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error that a user of a default session gets."""
    real = ort_runs.open_session

    def open_session(model: onnx.ModelProto, level: ort.GraphOptimizationLevel, **options: Any):
        if level == ort.GraphOptimizationLevel.ORT_ENABLE_ALL:
            raise RuntimeError("[ONNXRuntimeError] : 10 : INVALID_GRAPH")
        return real(model, level, **options)

    monkeypatch.setattr(ort_runs, "open_session", open_session)
    certificate = certify()
    assert certificate.passed
    assert certificate.outputs[0].cosine_optimized is None
    assert certificate.outputs[0].optimized_change is None
    assert "INVALID_GRAPH" in str(certificate.optimized_error)
    assert "INVALID_GRAPH" in str(certificate)
    assert "INVALID_GRAPH" in json.loads(json.dumps(certificate.as_json()))["optimized_error"]
    (warning,) = certificate.warnings(onnx.ModelProto())
    assert "default optimization level" in warning
    assert "INVALID_GRAPH" in warning


def test_an_output_of_another_shape_is_a_parity_error() -> None:
    x, integers, y = truth()
    with pytest.raises(ParityError, match=r"output y: .* shape \(100, 10\), the model \(50, 10\)"):
        verify(chain(), [x], integers, [y[:50]])


@pytest.mark.parametrize(("folded", "transposes"), [(12, 0), (11, 1)])
def test_large_transposed_constants_are_not_folded(
    folded: int, transposes: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Folding a transposed weight computes it in float; the outputs are the same."""
    monkeypatch.setattr(ort_runs, "FOLDED", folded)
    real, path = ort_runs.open_session, tmp_path / "optimized.onnx"
    monkeypatch.setattr(ort_runs, "open_session", partial(real, optimized=path))
    weight = np.arange(12, dtype=np.float32).reshape(4, 3)
    nodes = [helper.make_node("Transpose", ["w"], ["t"]), helper.make_node("MatMul", ["x", "t"], ["y"])]
    model = _product(nodes, [numpy_helper.from_array(weight, "w")])
    x = np.ones((2, 3), np.float32)
    outputs, error, without = ort_runs.run_optimized(model, {"x": x})
    assert error is None
    assert without == (("ConstantFolding",) if transposes else ())
    np.testing.assert_array_equal(outputs["y"], x @ weight.T)
    left = [node.op_type for node in onnx.load(path).graph.node]
    assert sum("Transpose" in name or name == "FusedMatMul" for name in left) == transposes


@pytest.mark.parametrize("transposed", [True, False])
def test_integers_of_transposed_weights_count(transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight that no Transpose reads stays integers when constants are folded, whatever its size."""
    monkeypatch.setattr(ort_runs, "FOLDED", 11)
    given: list[Sequence[str]] = []
    real = ort_runs.open_session

    def open_session(*args: Any, without: Sequence[str] = (), **kwargs: Any) -> ort.InferenceSession:
        given.append(without)
        return real(*args, without=without, **kwargs)

    monkeypatch.setattr(ort_runs, "open_session", open_session)
    weight = np.arange(12, dtype=np.int8).reshape(4, 3)
    constants = [numpy_helper.from_array(weight if transposed else weight.T.copy(), "w")]
    constants.append(numpy_helper.from_array(np.float32(1), "one"))
    nodes = [helper.make_node("DequantizeLinear", ["w", "one"], ["real"])]
    nodes += [helper.make_node("Transpose", ["real"], ["t"])] if transposed else []
    nodes += [helper.make_node("MatMul", ["x", "t" if transposed else "real"], ["y"])]
    x = np.ones((2, 3), np.float32)
    outputs, *_ = ort_runs.run_optimized(_product(nodes, constants), {"x": x})
    np.testing.assert_array_equal(outputs["y"], x @ weight.T)
    assert given == [("ConstantFolding",) if transposed else ()]


def test_float_weights_before_quantizers_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A float weight is clamped, quantized and dequantized before it is transposed."""
    monkeypatch.setattr(ort_runs, "FOLDED", 11)
    weight = np.arange(12, dtype=np.float32).reshape(4, 3)
    constants = [numpy_helper.from_array(array, name) for name, array in (("w", weight), ("one", np.float32(1)))]
    constants.append(numpy_helper.from_array(np.float32(9), "high"))
    chain_of = [("Min", "w", "high"), ("QuantizeLinear", "Min", "one"), ("DequantizeLinear", "QuantizeLinear", "one")]
    nodes = [helper.make_node(kind, [value, other], [kind]) for kind, value, other in chain_of]
    nodes.append(helper.make_node("Transpose", ["DequantizeLinear"], ["t"]))
    nodes.append(helper.make_node("MatMul", ["x", "t"], ["y"]))
    x = np.ones((2, 3), np.float32)
    outputs, _, without = ort_runs.run_optimized(_product(nodes, constants), {"x": x})
    np.testing.assert_array_equal(outputs["y"], x @ np.minimum(weight, 9).T)
    assert without == ("ConstantFolding",)


def test_the_certificate_tells_of_optimizers_that_were_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert certify().optimized_without == ()
    assert "full optimization ran without" not in str(certify())
    monkeypatch.setattr(ort_runs, "FOLDED", -1)
    certificate = certify()
    assert certificate.optimized_without == ("ConstantFolding",)
    assert "full optimization ran without ConstantFolding" in certificate.summary()
    assert json.loads(json.dumps(certificate.as_json()))["optimized_without"] == ["ConstantFolding"]


def _product(nodes: list[onnx.NodeProto], constants: list[TensorProto]) -> onnx.ModelProto:
    ends = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, (2, size))] for name, size in (("x", 3), ("y", 4))]
    graph = helper.make_graph(nodes, "product", *ends, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)

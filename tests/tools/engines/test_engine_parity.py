"""An engine that computes what the file says passes; one that does not is seen, and the tensor is named."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

from fxqat.errors import ExportError
from fxqat.onnx.ort_runs import open_session
from fxqat.onnx.verify import Shares
from fxqat.tools.engines import Engine, EngineReport, add_to_certificate, verify
from fxqat.tools.engines.engine_parity import TensorOnEngine
from fxqat.tools.engines.onnxruntime_engine import OnnxRuntimeFile
from tests.export_models import needs_exact_sums
from tests.quantized_graph import clipped, concat, example, narrow, residual, selecting

Change = Callable[[onnx.ModelProto], None]


class ChangedEngine(Engine):
    """Computes what the file says, after a change of every file that it gets."""

    name = "changed"
    version = "1"

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change = change

    def compile(self, content: bytes) -> OnnxRuntimeFile:
        model = onnx.load_model_from_string(content)
        self.change(model)
        changed = model.SerializeToString()
        session = open_session(changed, ort.GraphOptimizationLevel.ORT_DISABLE_ALL, 1)
        return OnnxRuntimeFile(session, changed, 1)


def nothing(model: onnx.ModelProto) -> None:
    """Leave the file as it is."""


def drop_pairs(model: onnx.ModelProto) -> None:
    """Drop the Q/DQ pair between a convolution and an Add, as OpenVINO does."""
    made = {node.output[0]: node for node in model.graph.node}
    for node in model.graph.node:
        if node.op_type == "Add":
            for place, name in enumerate(node.input):
                quantizer = made[made[name].input[0]]
                if made.get(quantizer.input[0], node).op_type == "Conv":
                    node.input[place] = quantizer.input[0]


def wrong_weights(model: onnx.ModelProto) -> None:
    """Make the weights of the convolution ``branch`` a quarter larger."""
    for tensor in model.graph.initializer:
        if tensor.name == "branch_s0":
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(1.25), tensor.name))


def report_of(model: onnx.ModelProto, folder: Path, engine: str | Engine, x: np.ndarray | None = None) -> EngineReport:
    path = folder / "model.onnx"
    onnx.save(model, path)
    return verify(path, example() if x is None else x, engine)


@pytest.mark.parametrize(
    "model", [residual(), concat(True), concat(False, relu=True), clipped(), narrow(), selecting()], ids=lambda _: ""
)
def test_an_engine_that_computes_what_the_file_says_is_equal_in_every_tensor(
    model: onnx.ModelProto, tmp_path: Path
) -> None:
    report = report_of(model, tmp_path, ChangedEngine(nothing))
    quantizers = [n for n in model.graph.node if n.op_type == "QuantizeLinear"]
    assert [t.name for t in report.tensors] == [node.input[0] for node in quantizers]
    assert report.passed
    assert all(t.alone.off == t.together.off == 0 for t in report.tensors)
    assert all(o.end_to_end.max_abs == 0 for o in report.outputs)


def test_a_dropped_pair_is_right_alone_and_wrong_together(tmp_path: Path) -> None:
    report = report_of(residual(), tmp_path, ChangedEngine(drop_pairs))
    by_name = {t.name: t for t in report.tensors}
    assert not report.passed
    assert report.first_diverging == "add (Add add)"
    assert by_name["add"].alone.off == 0
    assert by_name["add"].together.off_by_1 > 0.05
    assert all(t.passed for name, t in by_name.items() if name != "add")


def test_wrong_weights_are_wrong_alone_and_only_there(tmp_path: Path) -> None:
    report = report_of(residual(), tmp_path, ChangedEngine(wrong_weights))
    by_name = {t.name: t for t in report.tensors}
    assert report.first_diverging == "branch (Conv branch)"
    assert by_name["branch"].alone.off_by_2_plus > 0.1
    assert by_name["add"].alone.off == by_name["add"].together.off == 0
    text = str(report)
    assert "FAILED, first: branch (Conv branch)" in text
    assert "3 of 4 quantized tensors are equal" in text


def test_the_report_is_written_as_json(tmp_path: Path) -> None:
    document = report_of(residual(), tmp_path, ChangedEngine(wrong_weights)).as_json()
    assert (document["format"], document["version"], document["passed"]) == ("fxqat.engine", 1, False)
    tensor = document["report"]["tensors"][2]
    assert (tensor["name"], tensor["operators"]) == ("branch", ("Conv branch",))
    assert tensor["alone"]["off_by_2_plus"] > 0.1


def test_the_report_goes_into_the_certificate(tmp_path: Path) -> None:
    report, path = report_of(residual(), tmp_path, ChangedEngine(drop_pairs)), tmp_path / "model.parity.json"
    path.write_text(json.dumps({"format": "fxqat.parity", "passed": True}))
    add_to_certificate(report, path)
    add_to_certificate(replace(report, engine="other"), path)
    document = json.loads(path.read_text())
    assert document["passed"]
    assert list(document["engines"]) == ["changed", "other"]
    assert document["engines"]["changed"]["first_diverging"] == "add (Add add)"
    path.write_text("{}")
    with pytest.raises(ExportError, match="is no parity certificate"):
        add_to_certificate(report, path)
    with pytest.raises(ExportError, match="cannot read the certificate"):
        add_to_certificate(report, tmp_path / "none.json")


def test_ties_are_told_apart(tmp_path: Path) -> None:
    """ONNX Runtime's QLinearAdd adds an odd zero point before it rounds a tie to the even integer."""
    report = report_of(residual(zero_point=127), tmp_path, "onnxruntime")
    add = next(t for t in report.tensors if t.name == "add")
    assert add.alone.off_by_1 > 0
    assert add.alone.ties == add.alone.off_by_1


def test_a_convolution_beside_a_shared_relu_runs_in_float_in_onnxruntime(tmp_path: Path) -> None:
    needs_exact_sums()
    beside = report_of(concat(False, relu=True), tmp_path, "onnxruntime")
    behind = report_of(clipped(), tmp_path, "onnxruntime")
    assert "Conv right" in beside.in_float
    assert {"Conv left", "Conv last"} <= set(beside.in_integers)
    assert behind.in_float == ()
    assert set(behind.in_integers) == {"Conv inner", "Conv outer"}
    assert beside.passed
    assert behind.passed


def test_inputs_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(residual(), path)
    for inputs in ({"y": example()}, [example(), example()]):
        with pytest.raises(ExportError, match="the file has the inputs x: give an array for each"):
            verify(path, inputs, "onnxruntime")


def test_files_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    with pytest.raises(ExportError, match="cannot read .*model.onnx"):
        verify(path, example(), "onnxruntime")
    path.write_bytes(b"no model")
    with pytest.raises(ExportError, match="is no ONNX file"):
        verify(path, example(), "onnxruntime")
    with pytest.raises(ExportError, match="export one with export_tflite"):
        verify(path, example(), "litert")
    model = residual()
    for node in [n for n in model.graph.node if n.op_type == "QuantizeLinear"]:
        node.op_type = "Identity"
        del node.input[1:]
    onnx.save(model, path)
    with pytest.raises(ExportError, match="no QuantizeLinear nodes of activations"):
        verify(path, example(), "onnxruntime")


@pytest.mark.parametrize("engine", ["openvino", "litert"])
@pytest.mark.parametrize("saturates", [True, False])
@pytest.mark.parametrize("error", [0.0, 1.0])
def test_a_failure_names_the_processor(
    engine: str, saturates: bool, error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fxqat.tools.engines.engine_parity.sums_saturate", lambda: saturates)
    tensor = TensorOnEngine("x", (), 100, Shares(error, 0.0), Shares(error, 0.0))
    text = str(EngineReport(engine, "1", {}, (tensor,), (), (), (), ()))
    assert ("FAILED" in text) == (error > 0)
    assert ("OpenVINO_AVX2, whose weights have 7 bits" in text) == (engine == "openvino" and saturates and error > 0)

"""What OpenVINO makes of small files: those that fxqat writes for it are exact, and the others are seen to differ.

Needs ``pip install -e ".[engines]"``.
"""

import json
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest

from fxqat.errors import ExportError
from fxqat.onnx.keep_integers import KeepIntegers
from fxqat.tools.engines import EngineReport, load_engine, verify
from tests.export_models import needs_exact_sums
from tests.quantized_graph import clipped, concat, example, one_scale, residual
from tests.without_amx import run_without_amx


@pytest.fixture(autouse=True)
def _silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first import of OpenVINO reports no use of it."""
    monkeypatch.setenv("CI", "true")
    pytest.importorskip("openvino")


def report_of(model: onnx.ModelProto, folder: Path, **settings: object) -> EngineReport:
    needs_exact_sums()
    path = folder / "model.onnx"
    onnx.save(model, path)
    return verify(path, example(), "openvino", **settings)


def keeping_branches(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with the pass that ``convert_export(runtime="openvino")`` runs to keep integers."""
    found = ir.from_proto(model)
    KeepIntegers()(found)
    return ir.to_proto(found)


@pytest.mark.parametrize(
    "model",
    [concat(False), concat(False, relu=True), clipped(), one_scale()],
    ids=["concat", "concat with relu", "clip behind Q", "one scale"],
)
def test_files_that_are_exact(model: onnx.ModelProto, tmp_path: Path) -> None:
    report = report_of(model, tmp_path)
    assert report.passed
    assert all(t.alone.off == t.together.off == 0 for t in report.tensors)
    assert min(o.end_to_end.cosine for o in report.outputs) > 1 - 1e-6
    assert report.in_float == ()


def test_the_rounding_of_a_residual_branch_is_dropped_unless_the_file_keeps_it(tmp_path: Path) -> None:
    plain, kept = report_of(residual(), tmp_path), report_of(keeping_branches(residual()), tmp_path)
    assert plain.first_diverging == "add (Add add)"
    add = next(t for t in plain.tensors if t.name == "add")
    assert add.alone.off == 0
    assert add.together.off_by_1 > 0.1
    assert kept.passed
    assert min(o.end_to_end.cosine for o in kept.outputs) > 1 - 1e-6


def test_a_sum_with_an_odd_zero_point_rounds_ties_the_other_way(tmp_path: Path) -> None:
    odd, even = (report_of(keeping_branches(residual(zero)), tmp_path) for zero in (127, 128))
    add = next(t for t in odd.tensors if t.name == "add")
    assert add.alone.ties == add.alone.off_by_1 > 0
    assert all(t.alone.off == 0 for t in even.tensors)


def test_signed_integers_before_concat_and_convolution_are_wrong(tmp_path: Path) -> None:
    """``convert_export(runtime="openvino")`` writes them unsigned, which is exact."""
    needs_exact_sums()
    program = """import json, sys
from fxqat.tools.engines import verify
from tests.quantized_graph import example
report = verify(sys.argv[1], example(), "openvino")
last = next(t for t in report.tensors if t.name == "last")
print(json.dumps([report.first_diverging, last.alone.off, last.together.off_by_1]))"""
    onnx.save(concat(True), tmp_path / "model.onnx")
    first, alone, together = json.loads(run_without_amx(program, tmp_path / "model.onnx").splitlines()[-1])
    assert first == "last (Conv last)"
    assert alone == 0
    assert together > 0.1


def test_settings_reach_the_engine() -> None:
    settings = load_engine("openvino", threads=2, precision="f32").settings
    assert settings == {"INFERENCE_NUM_THREADS": 2, "INFERENCE_PRECISION_HINT": "f32"}
    with pytest.raises(ExportError, match="OpenVINO cannot run the file"):
        load_engine("openvino").compile(onnx.ModelProto().SerializeToString())

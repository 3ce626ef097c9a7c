"""The table of runtimes: every pass is one that changes no integer, and a name that is not in it is refused."""

from pathlib import Path

import onnx_ir as ir
import pytest

from fxqat import convert_export
from fxqat.errors import ExportError
from fxqat.onnx.runtimes import RUNTIMES, check_runtime, rewriting_for
from tests.models import calibrated, inputs


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_every_runtime_has_passes_of_its_own(runtime: str) -> None:
    first, second = ([*each.types, *each.operators] for each in (rewriting_for(runtime), rewriting_for(runtime)))
    assert first
    assert all(isinstance(each, ir.passes.InPlacePass) for each in first)
    assert not set(map(id, first)) & set(map(id, second))


@pytest.mark.parametrize("backend", ["OpenVINO", "ONNXRuntime"])
def test_the_runtime_of_a_table_is_the_default(backend: str, tmp_path: Path) -> None:
    """The integers of a residual block have a Clip on OpenVINO; ONNX Runtime's ReLU is gone."""
    x = inputs("residual")
    gm = calibrated("residual", backend)
    found = []
    for runtime in (None, backend.lower()):
        report = convert_export(gm, x, tmp_path / "model.onnx", tmp_path / "model.json", runtime=runtime)
        assert report.runtime == backend.lower()
        found.append((report.onnx_path.read_bytes(), (tmp_path / "model.json").read_text(encoding="utf-8")))
    assert found[0] == found[1]
    other = convert_export(gm, x, tmp_path / "other.onnx", runtime={"OpenVINO": "onnxruntime"}.get(backend, "openvino"))
    assert other.onnx_path.read_bytes() != found[0][0]


@pytest.mark.parametrize("runtime", ["", "tensorrt", None])
def test_a_file_for_a_chip_is_not_rewritten(runtime: str) -> None:
    assert rewriting_for(runtime) == ((), ())


@pytest.mark.parametrize("runtime", ["tensorrt", "ONNXRuntime", "", 1, ["openvino"]])
def test_an_unknown_runtime_names_the_known_ones(runtime: object) -> None:
    with pytest.raises(ExportError, match="None or one of 'onnxruntime', 'onnxruntime_avx2', 'openvino'") as caught:
        check_runtime(runtime)
    assert repr(runtime) in str(caught.value)

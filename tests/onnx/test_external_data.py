"""Large tensors stay in files while a model is proven, and in a second one if there are too many bytes for one."""

import importlib
import os

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import nn

from fxqat import convert_export, load_quant_params, prepare_by_platform
from fxqat.errors import ExportError, ParityError
from fxqat.tools.engines import verify
from tests.export_models import calibrate, run_file

DATA = importlib.import_module("fxqat.onnx.external_data")
EXPORT = importlib.import_module("fxqat.convert_export")
X = torch.linspace(-1, 1, 1200).reshape(1, 3, 20, 20)


@pytest.fixture(scope="module")
def gm():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(72, 7))
    return calibrate(prepare_by_platform(model.eval(), "ONNXRuntime", example_inputs=X), (X,))


@pytest.fixture
def large(monkeypatch):
    """Tensors of more than 100 bytes are large."""
    monkeypatch.setattr(DATA, "LARGE", 100)


@pytest.mark.parametrize("weights", ["integer", "float"])
def test_a_file_that_is_proven_with_references_has_the_same_bytes(gm, weights, tmp_path, monkeypatch):
    convert_export(gm, X, tmp_path / "a.onnx", weights=weights)
    monkeypatch.setattr(DATA, "LARGE", 100)
    report = convert_export(gm, X, tmp_path / "b.onnx", weights=weights)
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()
    written = onnx.load(tmp_path / "b.onnx")
    assert sorted(written.SerializeToString(deterministic=True)) == sorted((tmp_path / "b.onnx").read_bytes())
    assert not any(tensor.external_data for tensor in written.graph.initializer)
    assert report.certificate.passed
    assert sorted(os.listdir(tmp_path)) == ["a.onnx", "a.parity.json", "b.onnx", "b.parity.json"]


def test_a_file_whose_tensors_are_cut_off_is_not_written(gm, large, tmp_path):
    path = convert_export(gm, X, tmp_path / "a.onnx").onnx_path
    with DATA.in_temporary_files(ir.load(path), tmp_path / "b.onnx") as made:
        os.truncate(DATA.data_path(made.path), 300)
        with pytest.raises(ExportError, match=r"ends before byte \d+: is the disk full"):
            made.files(tmp_path / "b.onnx")
    assert sorted(os.listdir(tmp_path)) == ["a.onnx", "a.parity.json"]


@pytest.mark.parametrize(("weights", "options"), [("integer", {"opset_version": 21}), ("float", {})])
def test_a_file_that_is_too_large_has_a_second_one(gm, large, weights, options, tmp_path, monkeypatch):
    whole = convert_export(gm, X, tmp_path / "one.onnx", weights=weights, **options)
    expected = run_file(whole.onnx_path, (X,))
    monkeypatch.setattr(DATA, "MAX_BYTES", 1000)
    path = tmp_path / "new" / "two.onnx"
    path.parent.mkdir()
    report = convert_export(
        gm, X, path, path.with_suffix(".json"), weights=weights, runtime="onnxruntime", dynamic_batch=True, **options
    )
    assert report.certificate.passed
    assert report.certificate.second_size.passed
    assert sorted(os.listdir(path.parent)) == ["two.json", "two.onnx", "two.onnx.data", "two.parity.json"]
    weights_in_it = (8 * 27 + 7 * 72) * (1 if weights == "integer" else 4)
    assert path.with_name("two.onnx.data").stat().st_size >= weights_in_it
    outside = [t for t in onnx.load(path, load_external_data=False).graph.initializer if t.external_data]
    assert {entry.value for t in outside for entry in t.external_data if entry.key == "location"} == {"two.onnx.data"}
    onnx.checker.check_model(str(path), full_check=True)
    found = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, {"input": X.numpy()})
    assert np.allclose(found[0], expected[0], atol=0.05)
    load_quant_params(gm, path.with_suffix(".json"))


def test_nothing_is_left_behind_by_an_export_that_fails(gm, large, tmp_path, monkeypatch):
    def differs(*_):
        raise ParityError("differs")

    monkeypatch.setattr(DATA, "MAX_BYTES", 1000)
    monkeypatch.setattr(EXPORT, "require_parity", differs)
    with pytest.raises(ParityError, match="differs"):
        convert_export(gm, X, tmp_path / "m.onnx")
    assert not os.listdir(tmp_path)


def test_the_old_files_stay_if_the_new_ones_cannot_be_written(gm, large, tmp_path, monkeypatch):
    monkeypatch.setattr(DATA, "MAX_BYTES", 1000)
    (tmp_path / "m.onnx").write_text("old")
    (tmp_path / "m.onnx.data").mkdir()
    with pytest.raises(ExportError, match="is a folder"):
        convert_export(gm, X, tmp_path / "m.onnx")
    assert (tmp_path / "m.onnx").read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["m.onnx", "m.onnx.data"]


def test_a_folder_reached_through_a_link(gm, large, tmp_path, monkeypatch):
    monkeypatch.setattr(DATA, "MAX_BYTES", 1000)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert convert_export(gm, X, tmp_path / "link" / "m.onnx").certificate.passed
    assert sorted(os.listdir(tmp_path / "real")) == ["m.onnx", "m.onnx.data", "m.parity.json"]


def test_engines_read_both_files(gm, large, tmp_path, monkeypatch):
    monkeypatch.setattr(DATA, "MAX_BYTES", 1000)
    report = convert_export(gm, X, tmp_path / "m.onnx")
    assert verify(report.onnx_path, X.numpy(), "onnxruntime").passed

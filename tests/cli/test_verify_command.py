"""``fxqat verify``: a right file passes every check, and each check finds what is wrong."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

import fxqat
from fxqat.config.effective import effective_config
from tests.cli.programs import Net, batches
from tests.cli.test_main import call


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``fxqat quantize`` writes, and the same model with raw inputs."""
    folder = tmp_path_factory.mktemp("out")
    gm = fxqat.prepare_by_platform(Net().eval(), "ONNXRuntime", example_inputs=(batches()[0],)).eval()
    fxqat.calibrate(gm, batches(), progress=False)
    fxqat.convert_export(
        gm, batches()[0], folder / "model.onnx", folder / "model.json", dynamic_batch=True, runtime="openvino"
    )
    raw, stats = torch.randint(0, 256, (1, 3, 8, 8)), [([120.0, 110.0, 100.0], [60.0, 60.0, 60.0])]
    fxqat.convert_export(gm, raw, folder / "raw.onnx", folder / "raw.json", input_stats=stats)
    fxqat.save_checkpoint(gm, folder / "model.pth")
    effective_config(gm, folder / "config.yaml")
    return folder


def checkpoint(folder: Path) -> str:
    return f"--model @:net --weights {folder}/model.pth --config {folder}/config.yaml"


def test_a_right_file_passes_all_checks(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        f"verify {folder}/model.onnx --json {folder}/model.json {checkpoint(folder)} --engine onnxruntime --threads 2"
    )
    assert call(f"{words} --input x=3x3x8x8", monkeypatch) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "passed"
    for start in (
        "ONNX Runtime: ",
        "scales of ",
        "float model: output: cosine ",
        "certificate: parity passed",
        "engine",
    ):
        assert any(line.startswith(start) for line in lines), start


def test_raw_inputs_are_normalized_for_the_models(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(f"verify {folder}/raw.onnx --json {folder}/raw.json {checkpoint(folder)}", monkeypatch) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("float model")]
    assert float(lines[0].split("cosine ")[1].split(",")[0]) > 0.99


def test_real_data_is_one_batch_of_the_file(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "x.npy", np.ones((12, 3, 8, 8), np.float32))
    np.save(tmp_path / "small.npy", np.ones((12, 3, 4, 4), np.float32))
    assert call(f"verify {folder}/model.onnx --data {tmp_path}/x.npy", monkeypatch) == 0
    assert call(f"verify {folder}/model.onnx --data @:batches", monkeypatch) == 0
    capsys.readouterr()
    assert call(f"verify {folder}/raw.onnx --data {tmp_path}/small.npy", monkeypatch) == 2
    assert "input x of the file is 1x3x8x8, the data gives 1x3x4x4" in capsys.readouterr().err


def test_another_scale_differs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    document = json.loads((folder / "model.json").read_text())
    document["tensors"]["head.weight"]["scale"][1] *= 2
    (tmp_path / "other.json").write_text(json.dumps(document))
    assert call(f"verify {folder}/model.onnx --json {tmp_path}/other.json", monkeypatch) == 1
    assert "head.weight: the ONNX file holds other parameters" in capsys.readouterr().out
    del document["tensors"]["x"]
    document["tensors"]["head.weight"]["scale"][1] /= 2
    (tmp_path / "other.json").write_text(json.dumps(document))
    assert call(f"verify {folder}/model.onnx --json {tmp_path}/other.json", monkeypatch) == 1
    assert "x: quantized in the ONNX file, but not in the JSON" in capsys.readouterr().out


def test_another_integer_differs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = onnx.load(folder / "model.onnx")
    weight = next(t for t in model.graph.initializer if t.name == "body.0.weight_quantized")
    weight.CopyFrom(numpy_helper.from_array(-numpy_helper.to_array(weight), weight.name))
    onnx.save(model, tmp_path / "wrong.onnx")
    assert call(f"verify {tmp_path}/wrong.onnx {checkpoint(folder)}", monkeypatch) == 1
    assert "certificate: FAILED" in capsys.readouterr().out


def test_another_model_differs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(f"verify {folder}/model.onnx --model @:light", monkeypatch) == 1
    assert "float model: FAILED: the model has outputs of the shapes [(1, 64, 6, 6)]" in capsys.readouterr().out
    torch.save(Net().state_dict(), tmp_path / "w.pth")
    words = f"verify {folder}/model.onnx --model @:net --weights {tmp_path}/w.pth"
    assert call(f"{words} --config {folder}/config.yaml", monkeypatch) == 2
    assert "holds only weights" in capsys.readouterr().err
    assert call(words, monkeypatch) == 0
    assert "certificate" not in capsys.readouterr().out

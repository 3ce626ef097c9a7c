"""``fxqat quantize``: the files, and that they are those of the model."""

import json
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from PIL import Image

import fxqat
from fxqat.cli.load_model import load_model
from fxqat.errors import ExportError
from fxqat.litert_conversion import litert_versions
from tests.cli.programs import net
from tests.cli.test_main import PROGRAMS, call

FILES = [
    "config.yaml",
    "continue_training.py",
    "index.html",
    "model.json",
    "model.onnx",
    "model.parity.json",
    "model.pth",
]


def test_the_files_are_written_and_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = f"quantize @:net --calib @:batches --eval @:closeness --max-drop 5 -b ONNXRuntime -o {out} --dynamic-batch"
    assert call(words, monkeypatch) == 0
    assert sorted(path.name for path in out.iterdir()) == FILES
    assert json.loads((out / "model.parity.json").read_text())["passed"]
    printed = capsys.readouterr().out
    assert "within the budget of 5" in printed
    assert "parity passed" in printed
    assert "within the budget" in (out / "index.html").read_text()

    model = load_model(f"{PROGRAMS}:net").model
    gm = fxqat.prepare_by_platform(model, "ONNXRuntime", out / "config.yaml").eval()
    fxqat.load_checkpoint(gm, out / "model.pth")
    fxqat.enable_quantization(gm)
    x = torch.randn(3, 3, 8, 8)
    session = ort.InferenceSession(str(out / "model.onnx"), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, {"x": x.numpy()})[0], gm(x).detach(), atol=1e-5)


def test_sizes_are_left_open_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = "--dynamic-shapes x=2:height,3:width --input-names image --output-names scores"
    assert call(f"quantize @:net --calib @:batches {options} -o {tmp_path / 'out'}", monkeypatch) == 0
    session = ort.InferenceSession(str(tmp_path / "out" / "model.onnx"), providers=["CPUExecutionProvider"])
    (given,), (found,) = session.get_inputs(), session.get_outputs()
    assert (given.name, given.shape, found.name) == ("image", [1, 3, "height", "width"], "scores")
    assert session.run(None, {"image": np.zeros((1, 3, 10, 12), np.float32)})[0].shape == (1, 4)


def test_a_file_for_litert_is_written_where_its_converter_is_and_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert call(f"quantize @:net --calib @:batches -b LiteRT -o {out}", monkeypatch) == 0
    names = sorted(path.name for path in out.iterdir())
    printed = capsys.readouterr().out
    try:
        litert_versions()
    except ExportError:
        assert names == FILES
        assert "no .tflite file: " in printed
        assert 'pip install "fxqat[litert]"' in printed
        return
    assert set(names) - set(FILES) == {"model.tflite", "model.tflite.parity.json"}
    checkpoint = f"--model @:net --weights {out}/model.pth --config {out}/config.yaml --input 1x3x8x8"
    assert call(f"verify {out}/model.tflite {checkpoint}", monkeypatch) == 0
    printed = capsys.readouterr().out
    assert "LiteRT parity passed" in printed
    assert printed.endswith("passed\n")
    assert call(f"verify {out}/model.tflite --model @:net", monkeypatch) == 2


def test_a_budget_that_is_not_met_is_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding to the float model itself: nothing is better than no rounding at all."""
    monkeypatch.setattr("fxqat.tools.ladder._Ladder.widen", lambda self: ["body.0.weight"])
    words = f"quantize @:net --calib @:batches --eval @:closeness --max-drop 0 -o {tmp_path / 'out'}"
    assert call(words, monkeypatch) == 1
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == FILES


@pytest.mark.parametrize("weights", [False, True])
def test_the_script_to_continue_with_trains_and_exports(
    weights: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ""
    if weights:
        torch.save({name: tensor + 0.5 for name, tensor in net().state_dict().items()}, tmp_path / "net.pth")
        options = f"--weights {tmp_path / 'net.pth'}"
    assert call(f"quantize @:net {options} --calib @:batches -o {tmp_path}", monkeypatch) == 0
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.onnx").unlink()
    text = (tmp_path / "continue_training.py").read_text()
    assert "in ...:" in text
    names = {"data": [(torch.randn(4, 3, 8, 8), torch.arange(4))]}
    exec(text.replace("in ...:", "in data:"), names)
    assert names["gm"].quant_report.backend == "TSQAT"
    assert torch.equal(names["model"].head.bias, net().head.bias + 0.5 * weights)
    assert (tmp_path / "model.onnx").exists()


def test_an_output_that_cannot_be_written_is_told_before_the_ladder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("fxqat.cli.quantize_command.climb", lambda *_, **__: pytest.fail("climbed"))
    assert call(f"quantize @:net --calib @:batches -o {tmp_path / 'file' / 'out'}", monkeypatch) == 2
    assert f"cannot write -o {tmp_path / 'file' / 'out'}" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("form", ["folder", "npz"])
def test_images_are_read_with_labels(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 12, 10, 3), dtype=np.uint8)
    data = tmp_path / "data"
    if form == "folder":
        for i, image in enumerate(pixels):
            (data / "abcd"[i % 4]).mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(data / "abcd"[i % 4] / f"{i}.png")
        options = "--resize 10 --crop 8"
    else:
        data = tmp_path / "data.npz"
        np.savez(data, x=pixels.transpose(0, 3, 1, 2), y=np.arange(8) % 4)
        options = ""
    options += " --mean 0.5,0.4,0.3 --std 0.2,0.2,0.2"
    words = f"quantize @:net --calib {data} --eval {data} --max-drop 100 {options} -o {tmp_path / 'out'}"
    assert call(words, monkeypatch) == 0
    parameters = json.loads((tmp_path / "out" / "model.json").read_text())["tensors"]["x"]
    largest = (pixels.max() / 255 - 0.3) / 0.2
    assert parameters["scale"][0] * 127 == pytest.approx(largest, rel=0.2)

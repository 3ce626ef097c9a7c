"""The main job: its command line in a subprocess, and its parts in this process where that saves the imports."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
import torchvision
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from fxqat import load_checkpoint, prepare_by_platform
from tests.example.imagenet_example.conftest import EXAMPLE, printed_table

SMALL = "squeezenet1_1"


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The default job with one epoch: the folder of its files, and what it printed."""
    folder = tmp_path_factory.mktemp("digits")
    command = [sys.executable, str(EXAMPLE / "main.py"), "--epochs", "1", "--output-dir", str(folder)]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # other tests have the other cores
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=one_thread)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, done.stdout


def digits_val() -> tuple[torch.Tensor, torch.Tensor]:
    """The validation split of the default job, written down once more."""
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
    images = torch.nn.functional.interpolate(images, size=32, mode="bilinear", align_corners=False)
    images = ((images - 0.3053) / 0.3760).expand(-1, 3, -1, -1)
    _, val = train_test_split(range(len(images)), test_size=0.2, stratify=digits.target, random_state=0)
    return images[val].contiguous(), torch.tensor(digits.target)[val]


def run_file(path: Path, images: torch.Tensor) -> torch.Tensor:
    """Outputs of an ONNX file of batch 1 with graph optimizations off."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return torch.cat([torch.from_numpy(session.run(None, {name: image[None].numpy()})[0]) for image in images])


def test_files(digits_run: tuple[Path, str]) -> None:
    folder, _ = digits_run
    written = {path.name for path in folder.iterdir()}
    pairs = [f"resnet18_{kind}_quantization{end}" for kind in ("onnx", "bestonnx") for end in (".onnx", ".json")]
    assert {"resnet18_checkpoint.pth", "resnet18_model_best.pth", *pairs} <= written
    assert not [name for name in written if "partial" in name or "write_test" in name]
    state = torch.load(folder / "resnet18_model_best.pth", weights_only=True)["state_dict"]
    assert not torchvision.models.resnet18(num_classes=10).load_state_dict(state).missing_keys


def test_printed_lines(digits_run: tuple[Path, str]) -> None:
    _, printed = digits_run
    assert "Epoch: [0][0/44] Time " in printed
    assert " * Acc@1 " in printed
    rows = printed_table(printed)
    kinds = ["model", "float", "fake-quant, calibrated", "fake-quant, finetuned", "ONNX Runtime int8"]
    assert list(rows) == kinds
    assert float(rows["float"][0]) > 95
    assert float(rows["fake-quant, finetuned"][0]) > float(rows["float"][0]) - 1.5


def test_table_tells_the_truth(digits_run: tuple[Path, str]) -> None:
    folder, printed = digits_run
    rows, path = printed_table(printed), folder / "resnet18_bestonnx_quantization.onnx"
    images, target = digits_val()
    output = run_file(path, images)
    assert abs(float(rows["ONNX Runtime int8"][0]) - 100 * (output.argmax(1) == target).float().mean().item()) < 0.6

    gm = prepare_by_platform(torchvision.models.resnet18(num_classes=10), "TSQAT", example_inputs=(images[:1],))
    load_checkpoint(gm, folder / "resnet18_model_best.pth")
    with torch.no_grad():
        expected = torch.cat([gm.eval()(part) for part in images.split(64)])
    accuracy = 100 * (expected.argmax(1) == target).float().mean().item()
    assert float(rows["fake-quant, finetuned"][0]) == pytest.approx(accuracy, abs=0.006)

    off = ((output - expected).abs() > scale_of_output(path) / 2).float().mean().item()
    assert float(rows["ONNX Runtime int8"][4].rstrip("%")) == pytest.approx(100 * off, abs=0.2)
    sizes = [float(rows[name][2]) for name in ("float", "ONNX Runtime int8")]
    assert sizes[1] == pytest.approx(path.stat().st_size / 1e6, abs=0.006)
    assert sizes[1] < 0.27 * sizes[0]


def scale_of_output(path: Path) -> float:
    """The scale of the file's output, which the JSON beside it must give to the last bit."""
    graph = onnx.load(path).graph
    dequantize = graph.node[-1]
    assert dequantize.op_type == "DequantizeLinear"
    scale = next(onnx.numpy_helper.to_array(t) for t in graph.initializer if t.name == dequantize.input[1])
    tensors = json.loads(path.with_suffix(".json").read_text())["tensors"]
    assert any(np.array_equal(np.float32(tensor["scale"]), scale.reshape(-1)) for tensor in tensors.values())
    return float(scale)


def test_equal_outputs_are_ranked_as_argmax_ranks_them(example: ModuleType) -> None:
    torch.manual_seed(0)
    output = torch.randint(0, 4, (500, 10)).float()  # many ties
    for target in (output.argmax(1), torch.randint(0, 10, (500,))):
        first, _ = sys.modules["engine"].ranks_hit(output, target)
        assert torch.equal(first.bool(), output.argmax(1) == target)
    assert not sys.modules["engine"].ranks_hit(torch.zeros(8, 10), torch.full((8,), 5))[1].any()
    assert sys.modules["engine"].ranks_hit(torch.zeros(8, 10), torch.full((8,), 4))[1].all()


def test_evaluate_a_checkpoint(
    digits_run: tuple[Path, str], example: ModuleType, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    folder, printed = digits_run
    checkpoint = folder / "resnet18_checkpoint.pth"
    example.main(["-e", "--resume", str(checkpoint), "--onnx-batch", "7", "--output-dir", str(tmp_path)])
    rows = printed_table(capsys.readouterr().out)
    before = printed_table(printed)
    assert rows["float"][:2] == before["float"][:2]
    assert rows["fake-quant, finetuned"][:2] == before["fake-quant, finetuned"][:2]
    session = ort.InferenceSession(tmp_path / "resnet18_onnx_quantization.onnx")
    assert session.get_inputs()[0].shape[0] == 7
    with pytest.raises(SystemExit, match="has all of its 1 epochs behind it"):
        example.main(["--resume", str(checkpoint), "--output-dir", str(tmp_path)])


def test_float_only(example: ModuleType, image_tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    flags = ["--not-qat", "--data", str(image_tree), "-a", SMALL, "-b", "8", "--output-dir", str(tmp_path)]
    example.main([*flags, "--epochs", "1", "--lr", "1e-3", "--optim", "adam", "--onnx-batch", "4"])
    rows = printed_table(capsys.readouterr().out)
    assert list(rows) == ["model", "float"]
    assert not list(tmp_path.glob("*quantization*"))
    session = ort.InferenceSession(tmp_path / f"{SMALL}_onnx_float.onnx")
    assert session.get_inputs()[0].shape == [4, 3, 224, 224]
    example.main([*flags, "-e", "--model-path", str(tmp_path / f"{SMALL}_model_best.pth")])
    assert printed_table(capsys.readouterr().out)["float"][:2] == rows["float"][:2]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("-e", "give --model-path, --pretrained or --resume"),
        ("-e --model-path x.pth --lr 1", "--lr has no effect with -e"),
        ("--not-qat --backend TSQAT", "--backend has no effect with --not-qat"),
        ("-b 1", "give 2 or more"),
        ("-a resnet81", "near it: resnet18"),
        ("-a alexnet", "does not take images of 32 px"),
        ("--data nowhere", "nowhere/train is not there"),
        ("--model-path nowhere.pth", "nowhere.pth cannot be read"),
        ("--model-path text.pth", "text.pth is not a file of weights"),
        ("--resume weights.pth", "weights.pth is not a checkpoint of this example"),
        ("--model-path weights.pth", "weights.pth holds the weights of another model: conv1.weight is not in the file"),
        ("--output-dir text.pth/below", "cannot be written"),
    ],
)
def test_errors_are_one_line(
    example: ModuleType, flags: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.pth").write_text("no weights")
    torch.save({"weight": torch.zeros(1)}, "weights.pth")
    output = [] if "--output-dir" in flags else ["--output-dir", "out"]
    with pytest.raises(SystemExit) as caught:
        example.main([*flags.split(), *output])
    assert str(caught.value).startswith("error: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("out/*quantization*"))


@pytest.mark.parametrize("flags", ["--opset-version 12", "--onnx-batch 0", "--lr nan", "--seed -1", "--backend TSQUAT"])
def test_impossible_values_leave_with_status_2(example: ModuleType, flags: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as caught:
        example.main(flags.split())
    assert caught.value.code == 2
    assert flags.split()[0] in capsys.readouterr().err.splitlines()[-1]

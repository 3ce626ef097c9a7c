"""The default job from float training to the table, on the embedded digits, with a small model."""

import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from fxqat import load_checkpoint, prepare_by_platform
from tests.example.imagenet_example.conftest import MODELS, Run
from tests.example.imagenet_example.tiny_models import Small


@pytest.fixture(scope="module")
def digits_run(example: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, str]:
    """The default job with one epoch of a small model: its files and output, and what it wrote to stderr."""
    folder = tmp_path_factory.mktemp("digits")
    with pytest.MonkeyPatch.context() as patch:
        streams = {name: (folder / name).open("w+") for name in ("stdout", "stderr")}
        for name, stream in streams.items():
            patch.setattr(sys, name, stream)
        example.main(["-a", f"{MODELS}:Small", "--epochs", "1", "--output-dir", str(folder / "out")])
    for stream in streams.values():
        stream.close()
    return Run(folder / "out", (folder / "stdout").read_text()), (folder / "stderr").read_text()


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


def test_files(digits_run: tuple[Run, str]) -> None:
    folder = digits_run[0].folder
    written = {path.name for path in folder.iterdir()}
    pairs = [f"Small_{kind}_quantization{end}" for kind in ("onnx", "bestonnx") for end in (".onnx", ".json")]
    assert {
        "Small_checkpoint.pth",
        "Small_model_best.pth",
        "Small_float.pth",
        "Small_onnx_float.onnx",
        *pairs,
    } <= written
    assert not [name for name in written if "partial" in name or "write_test" in name]
    state = torch.load(folder / "Small_model_best.pth", weights_only=True)["state_dict"]
    assert not Small(10).load_state_dict(state).missing_keys
    exported = (folder / "Small_onnx_quantization.onnx").read_bytes()
    assert (folder / "Small_bestonnx_quantization.onnx").read_bytes() == exported  # of one epoch
    assert onnx.load_from_string(exported).opset_import[0].version == 18


def test_printed_lines(digits_run: tuple[Run, str]) -> None:
    run, errors = digits_run
    epochs = [f"Epoch: [{epoch}][{step}/44] Time " for epoch in range(6) for step in (0, 43)]  # of the float model
    epochs += [f"Epoch: [0][{step}/44] Time " for step in (0, 43)]
    lines = [line for line in run.printed.splitlines() if line.startswith("Epoch: ")]
    assert [line[: len(start)] for line, start in zip(lines, epochs, strict=True)] == epochs
    assert sum(line.startswith(" * Acc@1 ") for line in run.printed.splitlines()) == 7
    assert "Small_onnx_quantization.onnx: verified; " in run.printed
    assert errors == ""  # no progress bars in a file
    rows = run.table
    kinds = ["model", "float", "fake-quant, calibrated", "fake-quant, finetuned", "ONNX Runtime int8"]
    assert list(rows) == kinds
    assert float(rows["float"][0]) > 95
    assert float(rows["fake-quant, finetuned"][0]) > float(rows["float"][0]) - 1.5


def test_table_tells_the_truth(digits_run: tuple[Run, str]) -> None:
    run, _ = digits_run
    rows, path = run.table, run.path("bestonnx_quantization.onnx")
    images, target = digits_val()
    output = run_file(path, images)
    assert abs(float(rows["ONNX Runtime int8"][0]) - 100 * (output.argmax(1) == target).float().mean().item()) < 0.6

    gm = prepare_by_platform(Small(10), "TSQAT", example_inputs=(images[:1],))
    load_checkpoint(gm, run.path("model_best.pth"))
    with torch.no_grad():
        expected = torch.cat([gm.eval()(part) for part in images.split(64)])
    accuracy = 100 * (expected.argmax(1) == target).float().mean().item()
    assert float(rows["fake-quant, finetuned"][0]) == pytest.approx(accuracy, abs=0.006)

    off = ((output - expected).abs() > scale_of_output(path) / 2).float().mean().item()
    assert float(rows["ONNX Runtime int8"][4].rstrip("%")) == pytest.approx(100 * off, abs=0.2)
    float_file = run.path("onnx_float.onnx")
    sizes = [float(rows[name][2]) for name in ("float", "ONNX Runtime int8")]
    assert sizes == pytest.approx([float_file.stat().st_size / 1e6, path.stat().st_size / 1e6], abs=0.006)
    assert sizes[1] < 0.35 * sizes[0]

    float_model = Small(10)
    float_model.load_state_dict(torch.load(run.path("float.pth"), weights_only=True)["state_dict"])
    with torch.no_grad():
        correct = (float_model.eval()(images).argmax(1) == target).float().mean().item()
    assert float(rows["float"][0]) == pytest.approx(100 * correct, abs=0.006)


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
    ranks_hit = sys.modules["accuracy"].ranks_hit
    output = torch.randint(0, 4, (500, 10)).float()  # many ties
    for target in (output.argmax(1), torch.randint(0, 10, (500,))):
        first, _ = ranks_hit(output, target)
        assert torch.equal(first.bool(), output.argmax(1) == target)
    assert not ranks_hit(torch.zeros(8, 10), torch.full((8,), 5))[1].any()
    assert ranks_hit(torch.zeros(8, 10), torch.full((8,), 4))[1].all()


def test_evaluate_a_checkpoint(
    digits_run: tuple[Run, str], example: ModuleType, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    before, checkpoint = digits_run[0].table, str(digits_run[0].path("checkpoint.pth"))
    example.main(["-e", "--resume", checkpoint, "--onnx-batch", "7", "--output-dir", str(tmp_path)])
    after = Run(tmp_path, capsys.readouterr().out)
    assert after.table["float"][:2] == before["float"][:2]
    assert after.table["fake-quant, finetuned"][:2] == before["fake-quant, finetuned"][:2]
    session = ort.InferenceSession(after.path("onnx_quantization.onnx"))
    assert session.get_inputs()[0].shape[0] == 7
    with pytest.raises(SystemExit, match="has finished all 1 epochs"):
        example.main(["--resume", checkpoint, "--output-dir", str(tmp_path)])

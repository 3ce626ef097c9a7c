"""The example, from training to a file whose weights have the chosen widths."""

import json
import math

import onnx
import pytest
import yaml

from tests.example.modules import EXAMPLES, modules_of

FILES = {"widths.yaml", "scores.json", "pareto.json", "pareto.png", "model.onnx", "model.json", "model.pth"}


@pytest.fixture(scope="module")
def example():
    """The example, on a quarter of its images at a quarter of their size."""
    with modules_of(EXAMPLES / "mixed_precision_example", "main") as module:
        images, labels, test_images, test_labels = module.digits()
        few = images[::4, :, ::2, ::2], labels[::4], test_images[::4, :, ::2, ::2], test_labels[::4]
        module.digits = lambda: few
        yield module


def test_from_training_to_a_file(example, tmp_path, capsys):
    folder = tmp_path / "found"
    flags = ["--epochs", "1", "--qat-epochs", "1", "--method", "fisher", "--size", "150", "--output-dir", str(folder)]
    example.main(flags)
    printed = capsys.readouterr().out
    assert {path.name for path in folder.iterdir()} >= FILES
    rules = yaml.safe_load((folder / "widths.yaml").read_text())["overrides"]
    chosen = {rule["match"]["module"]: rule["weight"]["bit_width"] for rule in rules if "weight" in rule}
    tensors = json.loads((folder / "model.json").read_text())["tensors"]
    found = {t["module"]: t["bit_width"] for t in tensors.values() if t["kind"] == "weight"}
    assert {path.removesuffix(".weight_fake_quant"): bits for path, bits in found.items()} == chosen
    assert set(chosen.values()) == {4, 8}
    weights = {
        t.name: t for t in onnx.load(folder / "model.onnx").graph.initializer if t.name.endswith("weight_quantized")
    }
    assert len(weights) == len(chosen)
    for name, tensor in weights.items():
        bits = chosen[name.removesuffix(".weight_quantized")]
        assert tensor.data_type == (onnx.TensorProto.INT4 if bits == 4 else onnx.TensorProto.INT8)
        assert len(tensor.raw_data) == math.prod(tensor.dims) * bits // 8
    assert 0.97 * 150_000 < (folder / "model.onnx").stat().st_size <= 150_000
    assert "chosen, finetuned" in printed
    assert "verified" in printed


def test_errors_are_one_line(example, tmp_path, monkeypatch):
    monkeypatch.setattr(example, "train", lambda *_: None)
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="^error: "):
        example.main(["--epochs", "1", "--output-dir", str(tmp_path / "file" / "below")])
    with pytest.raises(SystemExit) as caught:
        example.main(["--size", "0"])
    assert caught.value.code == 2
    with pytest.raises(SystemExit, match="^error: .*file: budget 1000 bytes, at least [0-9]+ needed"):
        example.main(["--epochs", "1", "--method", "fisher", "--size", "1", "--output-dir", str(tmp_path / "tight")])

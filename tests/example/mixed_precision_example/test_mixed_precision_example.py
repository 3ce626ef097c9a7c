"""The example, from training to a file whose weights have the chosen widths."""

import json

import onnx
import pytest
import yaml

from tests.example.modules import EXAMPLES, modules_of

FILES = {"widths.yaml", "scores.json", "pareto.json", "pareto.png", "model.onnx", "model.json", "model.pth"}


@pytest.fixture(scope="module")
def example():
    with modules_of(EXAMPLES / "mixed_precision_example", "main") as module:
        yield module


def test_from_training_to_a_file(example, tmp_path, capsys):
    folder = tmp_path / "found"
    flags = ["--epochs", "1", "--qat-epochs", "1", "--method", "fisher", "--bits", "3.5", "--output-dir", str(folder)]
    example.main(flags)
    printed = capsys.readouterr().out
    assert {path.name for path in folder.iterdir()} >= FILES
    rules = yaml.safe_load((folder / "widths.yaml").read_text())["overrides"]
    chosen = {rule["match"]["module"]: rule["weight"]["bit_width"] for rule in rules if "weight" in rule}
    tensors = json.loads((folder / "model.json").read_text())["tensors"]
    found = {t["module"]: t["bit_width"] for t in tensors.values() if t["kind"] == "weight"}
    assert {path.removesuffix(".weight_fake_quant"): bits for path, bits in found.items()} == chosen
    types = {t.data_type for t in onnx.load(folder / "model.onnx").graph.initializer}
    assert onnx.TensorProto.INT4 in types
    assert "chosen, finetuned" in printed
    assert "verified" in printed


def test_errors_are_one_line(example, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="^error: "):
        example.main(["--epochs", "1", "--output-dir", str(tmp_path / "file" / "below")])
    with pytest.raises(SystemExit) as caught:
        example.main(["--bits", "9"])
    assert caught.value.code == 2

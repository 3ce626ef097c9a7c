"""ONNX files as models: the same function, and the names of the file."""

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from onnx import NodeProto, TensorProto, helper, numpy_helper, save
from torch import nn

import fxqat
from fxqat.cli.load_model import load_model
from fxqat.errors import ConfigError
from tests.cli.test_main import call

pytest.importorskip("onnx2torch")


class Mixed(nn.Module):
    """Operators that ONNX changed after opset 17: ReduceMean, Split, Reshape, Gelu."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.gelu(self.norm(self.conv(x)).mean((2, 3)))
        a, b = y.split(4, 1)
        return self.head((a + b).reshape(-1, 4))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("onnx") / "mixed.onnx"
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    torch.onnx.export(
        Mixed().eval(), (x,), path, input_names=["image"], output_names=["scores"], dynamo=True, verbose=False
    )
    return path


def test_the_module_computes_what_the_file_does(path: Path) -> None:
    source = load_model(str(path))
    assert (source.input_shape, source.input_names, source.output_names) == ((3, 8, 8), ("image",), ("scores",))
    x = torch.randn(2, 3, 8, 8)
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(source.model(x).detach(), session.run(None, {"image": x.numpy()})[0], atol=1e-5)


def test_the_quantized_file_has_the_same_names(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(4, 3, 8, 8)).astype(np.float32))
    words = f"quantize {path} --calib {tmp_path / 'x.npy'} --batch-size 2 -o {tmp_path / 'out'}"
    assert call(words, monkeypatch) == 0
    assert (tmp_path / "out" / "model.parity.json").exists()
    session = ort.InferenceSession(str(tmp_path / "out" / "model.onnx"), providers=["CPUExecutionProvider"])
    assert [value.name for value in session.get_inputs()] == ["image"]
    assert [value.name for value in session.get_outputs()] == ["scores"]


@pytest.fixture(scope="module")
def constants(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Constants in nodes, a value of unknown rank before a BatchNorm, and axes and factors as inputs."""
    generator = np.random.default_rng(0)

    def constant(name: str, value: object, dtype: type = np.int64) -> NodeProto:
        return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.array(value, dtype)))

    def random(name: str, *shape: int) -> NodeProto:
        return constant(name, generator.uniform(0.5, 1, shape), np.float32)

    node = helper.make_node
    nodes = [
        constant("factors", [1, 1, 2, 2], np.float32), constant("axes", [2, 3]), constant("last", [3]),
        random("w", 4, 3, 1, 1), random("b", 4), *(random(name, 4) for name in ("scale", "bias", "mean", "var")),
        node("Shape", ["x"], ["shape"]), node("Reshape", ["x", "shape"], ["same"]),  # of which rank, it is not known
        node("Resize", ["same", "", "factors"], ["large"], mode="nearest", coordinate_transformation_mode="asymmetric",
             nearest_mode="floor"),
        node("Conv", ["large", "w", "b"], ["y"]),
        node("BatchNormalization", ["y", "scale", "bias", "mean", "var"], ["z"]),
        node("ReduceMean", ["z"], ["m"], axes=[2, 3]), node("Squeeze", ["m", "axes"], ["scores"]),
        node("Unsqueeze", ["scores", "axes"], ["u"]), node("Squeeze", ["u", "last"], ["rest"]),
    ]  # fmt: skip
    values = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", [1, 3, 4, 4]), ("scores", None))
    ]
    graph = helper.make_graph(nodes, "g", values[:1], [*values[1:], helper.make_tensor_value_info("rest", 1, None)])
    path = tmp_path_factory.mktemp("onnx") / "constants.onnx"
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), path)
    return path


def test_constants_are_no_tensors_of_the_graph(constants: Path, tmp_path: Path) -> None:
    source, x = load_model(str(constants)), torch.randn(1, 3, 4, 4)
    assert source.batch_size == 1
    session = ort.InferenceSession(str(constants), providers=["CPUExecutionProvider"])
    for found, exact in zip(source.model(x), session.run(None, {"x": x.numpy()}), strict=True):
        np.testing.assert_allclose(found.detach(), exact, rtol=1e-5)
    gm = fxqat.prepare_by_platform(source.model, "TSQAT", example_inputs=(x,), check="off").eval()
    fxqat.calibrate(gm, [x], progress=False)
    report = fxqat.convert_export(gm, x, tmp_path / "q.onnx", output_names=source.output_names)
    assert report.certificate is not None
    assert [output.name for output in report.certificate.outputs] == ["scores", "rest"]


def test_a_file_of_one_sample_is_calibrated_sample_by_sample(
    constants: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(3, 3, 4, 4)).astype(np.float32))
    words = f"profile {constants} --calib {tmp_path / 'x.npy'}"
    assert call(words, monkeypatch) == 0
    assert call(f"{words} --batch-size 3", monkeypatch) == 2
    assert "the file takes batches of 1 only" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("node", "opset", "message"),
    [
        (helper.make_node("Det", ["x"], ["y"]), 17, "Det"),
        (helper.make_node("Gelu", ["x"], ["y"], approximate="tanh"), 20, "Gelu with approximate='tanh'"),
    ],
)
def test_what_cannot_be_read_is_named(node: object, opset: int, message: str, tmp_path: Path) -> None:
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 4])
    weight = helper.make_tensor_value_info("w", TensorProto.FLOAT, [4, 4])
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "g", [value, weight], [result])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)]), tmp_path / "m.onnx")
    with pytest.raises(ConfigError, match=message):
        load_model(str(tmp_path / "m.onnx"))


def test_what_is_no_onnx_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_text("nothing")
    with pytest.raises(ConfigError, match="is not an ONNX file"):
        load_model(str(tmp_path / "m.onnx"))
    with pytest.raises(ConfigError, match="no file"):
        load_model(str(tmp_path / "missing.onnx"))

"""Operators that onnx2torch lacks, as modules or written with others: the same function as the file."""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper, save
from torch import nn

from fxqat.cli.load_model import load_model
from fxqat.errors import ConfigError
from tests.cli.test_main import call

pytest.importorskip("onnx2torch")

SIZE = (2, 3, 6, 7)


def write(path: Path, kind: str, inputs: tuple[str, ...], rank: int = 4, **attributes: Any) -> None:
    """A file of one operator and a Relu."""
    generator = np.random.default_rng(0)
    constants = {
        "w": generator.normal(size=(5, 3, *(2, 3)[: rank - 2])).astype(np.float32),
        "reflect": np.array([0, 1, 2, 0, 0, 0, 1, 3] if rank == 4 else [0, 2, 0, 1], np.int64),
    }
    constants |= {"1": np.array([4, 1]), "-1": np.array([-1, -2]), "-3": np.array([-3, -1]), "-9": np.array([-9, 9])}
    nodes = [helper.make_node(kind, ["x", *inputs], ["y"], **attributes), helper.make_node("Relu", ["y"], ["z"])]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, list(SIZE[:rank]))
    z = helper.make_tensor_value_info("z", TensorProto.FLOAT, None)
    initializers = [numpy_helper.from_array(constants[name], name) for name in inputs]
    graph = helper.make_graph(nodes, "g", [x], [z], initializers)
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), path)


@pytest.mark.parametrize(
    ("kind", "inputs", "rank", "attributes"),
    [
        ("Conv", ("w",), 4, {"auto_pad": "SAME_UPPER"}),
        ("Conv", ("w",), 4, {"auto_pad": "SAME_LOWER"}),
        ("MaxPool", (), 4, {"auto_pad": "SAME_UPPER", "kernel_shape": [2, 3]}),
        ("MaxPool", (), 4, {"auto_pad": "SAME_LOWER", "kernel_shape": [2, 2]}),
        ("GlobalMaxPool", (), 4, {}),
        ("GlobalMaxPool", (), 3, {}),
        ("Pad", ("reflect",), 4, {"mode": "reflect"}),
        ("Pad", ("reflect",), 4, {"mode": "edge"}),
        ("Pad", ("reflect",), 2, {"mode": "reflect"}),
        ("Slice", ("1", "-9", "-3", "-1"), 4, {}),
        ("Slice", ("-1", "-9", "-3", "-1"), 4, {}),
        ("Slice", ("1", "-1"), 2, {}),
    ],
)
def test_the_module_computes_what_the_file_does(
    kind: str, inputs: tuple[str, ...], rank: int, attributes: dict[str, Any], tmp_path: Path
) -> None:
    write(tmp_path / "m.onnx", kind, inputs, rank, **attributes)
    x = torch.randn(SIZE[:rank], generator=torch.Generator().manual_seed(0))
    session = ort.InferenceSession(str(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"])
    (exact,) = session.run(None, {"x": x.numpy()})
    found = load_model(str(tmp_path / "m.onnx")).model(x).detach()
    assert found.shape == exact.shape
    np.testing.assert_allclose(found, exact, atol=1e-5)


def test_same_padding_with_strides_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "m.onnx", "Conv", ("w",), auto_pad="SAME_UPPER", strides=[2, 2])
    with pytest.raises(ConfigError, match="SAME_UPPER") as refused:
        load_model(str(tmp_path / "m.onnx"))
    assert "onnx2torch does not know an operator of it" in str(refused.value)


class Wrong(nn.Module):
    """Not what the file computes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.max_pool2d(x, x.shape[2:]).relu() + 0.01


@pytest.mark.parametrize("command", ["quantize", "profile", "check"])
def test_a_file_that_is_read_wrongly_is_refused(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "m.onnx", "GlobalMaxPool", ())
    monkeypatch.setattr("onnx2torch.convert", lambda _: torch.fx.symbolic_trace(Wrong()))
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=SIZE).astype(np.float32))
    data = f"--input {'x'.join(map(str, SIZE))}" if command == "check" else f"--calib {tmp_path / 'x.npy'}"
    out = f"-o {tmp_path / 'out'}" if command == "quantize" else ""
    assert call(f"{command} {tmp_path / 'm.onnx'} {data} {out}", monkeypatch) == 2
    assert "does not compute what the file does in ONNX Runtime: output 'z' differs by 0.01" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()

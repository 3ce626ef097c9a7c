"""The parts of a lowered graph in an export: one node each, and their tensors only in the file."""

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn

import fxqat
from fxqat.custom_symbolic_opset import run_exporter
from fxqat.nn.deployed import QuantizeDequantize, ReadBytes, StoredTensor
from fxqat.quantization.exported_parts import ExportedParts
from fxqat.scheme import QuantizeScheme
from tests.export_models import run_file


class Layer(nn.Module):
    """A quantized input times a stored weight that is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = QuantizeDequantize(QuantizeScheme(8), torch.tensor(0.5), torch.tensor(0.0), 18)
        integers = torch.arange(-6, 6, dtype=torch.int8).reshape(3, 4)
        self.weight = StoredTensor(integers, torch.tensor([0.5, 1.0, 2.0]), torch.zeros(3, dtype=torch.int8), 0)

    def forward(self, x: Tensor) -> Tensor:
        return self.pair(x) @ self.weight().mT + self.weight().sum()


class Bytes(nn.Module):
    """Raw bytes and the values that they stand for."""

    def __init__(self) -> None:
        super().__init__()
        self.read = ReadBytes(torch.tensor(0.25), torch.tensor(7.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.read(x) + 1


def test_the_exporter_sees_one_node_for_each_part_and_no_tensor() -> None:
    module = Layer()
    ExportedParts(module)
    program = torch.export.export(module, (torch.randn(2, 4),))
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert [target for target in targets if target.startswith("fxqat")] == [
        *("fxqat.quantize_dequantize.default", "fxqat.dequantize.stored", "fxqat.dequantize.stored")
    ]
    assert [node.name for node in program.graph.nodes if node.op == "placeholder"] == ["x"]
    assert program.state_dict == program.constants == {}


def test_the_tensors_are_in_the_model_once_under_the_path_of_the_part() -> None:
    module = Layer()
    graph = run_exporter(module, (torch.randn(2, 4),)).graph
    parts = {"pair": module.pair, "weight": module.weight}
    assert sorted(graph.initializers) == [
        *("pair.scale", "pair.zero_point", "weight.integers", "weight.scale", "weight.zero_point")
    ]
    for name, value in graph.initializers.items():
        path, tensor = name.split(".")
        expected = getattr(parts[path], tensor).numpy()
        found = value.const_value.numpy()
        assert found.dtype == expected.dtype == value.dtype.numpy()
        assert np.array_equal(found, expected)
    assert [node.op_type for node in graph if node.op_type.endswith("Linear")] == [
        *("QuantizeLinear", "DequantizeLinear", "DequantizeLinear", "DequantizeLinear")
    ]


def test_bytes_are_only_dequantized(tmp_path: Path) -> None:
    module = Bytes()
    x = torch.arange(256, dtype=torch.uint8).reshape(2, 128)
    model = run_exporter(module, (x,))
    assert [node.op_type for node in model.graph if "Linear" in node.op_type] == ["DequantizeLinear"]
    ir.save(model, tmp_path / "m.onnx")
    (found,) = run_file(tmp_path / "m.onnx", [x])
    expected = [(q - 7) / 4 + 1 for q in range(256)]
    assert found.flatten().tolist() == module(x).flatten().tolist() == pytest.approx(expected)


def test_a_part_of_another_graph_has_no_constants() -> None:
    parts, other = ExportedParts(Layer()), Layer()
    assert other.weight.number == -1
    with pytest.raises(KeyError, match="-1"):
        parts.translations()[torch.ops.fxqat.dequantize.stored](other.weight.number, [3, 4])


def test_a_module_computes_the_same_after_an_export() -> None:
    module, x = Layer(), torch.randn(2, 4)
    before = module(x)
    run_exporter(module, (x,))
    assert torch.equal(module(x), before)
    assert [part.number for part in (module.pair, module.weight)] == [0, 1]


class Constants(nn.Module):
    """Computes with tensors of one element and of none that its forward makes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x) * torch.tensor(0.5)
        y = torch.where(y > 0, y, torch.tensor([0.1])) + y.new_tensor(0.25)
        return self.last(torch.cat([torch.tensor([]), torch.maximum(y, torch.tensor(0.3))], -1))


@pytest.mark.parametrize("backend", ["TSQAT", "Experimental", "OpenVINO"])
def test_constants_of_forward_are_exported(backend: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    gm, x = fxqat.prepare_by_platform(Constants(), backend, example_inputs=(torch.randn(2, 4),)), torch.randn(16, 4)
    fxqat.calibrate(gm, [x], progress=False)
    fxqat.enable_quantization(gm)
    gm.eval()
    fxqat.convert_export(gm, (x,), tmp_path / "model.onnx")
    found = torch.from_numpy(*run_file(tmp_path / "model.onnx", [x]))
    torch.testing.assert_close(found, gm(x).detach(), rtol=0.0, atol=1e-6)

"""The tensors of the file are known before the export."""

import math
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

from fxqat import calibrate, convert_export, enable_quantization, prepare_by_platform
from fxqat.quantization.file_size import float_bytes, stored_tensors


class Tied(nn.Module):
    """An embedding of 1000 floats, a linear layer of its 1000 integers, and 100 integers with 10 floats of bias."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(100, 10)
        self.hidden = nn.Linear(10, 10)
        self.unread = nn.Linear(1000, 1000)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.hidden(self.emb(tokens)), self.emb.weight)


def test_of_a_computed_bias_the_file_has_the_result() -> None:
    layer = nn.utils.prune.l1_unstructured(nn.Linear(10, 20), "bias", 0.5)
    tensors = list(stored_tensors(prepare_by_platform(nn.Sequential(layer, nn.ReLU()))))
    assert sorted(tensor.numel() for tensor, bits in tensors if bits is None) == [20]
    assert [tensor.numel() for tensor, bits in tensors if bits == 8] == [200]


def test_of_a_computed_weight_the_file_has_the_integers() -> None:
    model = nn.Sequential(*(nn.utils.parametrizations.weight_norm(nn.Linear(10, 10, bias=False)) for _ in range(3)))
    tensors = list(stored_tensors(prepare_by_platform(model)))
    assert [tensor.numel() for tensor, bits in tensors if bits == 8] == [100] * 3
    assert not [tensor for tensor, bits in tensors if bits is None]


def test_what_is_in_the_file_is_found() -> None:
    tensors = list(stored_tensors(prepare_by_platform(Tied(), example_inputs=(torch.zeros(2, 3, dtype=torch.long),))))
    assert float_bytes(tensor for tensor, bits in tensors if bits is None) == 40
    assert sorted(tensor.numel() for tensor, bits in tensors if bits == 8) == [100, 1000]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_weights_of_recurrent_layers_are_integers(kind: type[nn.RNNBase], tmp_path: Path) -> None:
    model, x = nn.Sequential(kind(6, 10, 2, bidirectional=True)).eval(), (torch.randn(5, 3, 6),)
    gm = prepare_by_platform(model, "Experimental", example_inputs=x)
    calibrate(gm, [x], progress=False, compare=False)
    enable_quantization(gm)
    path = convert_export(gm, x, tmp_path / "a.onnx", verify=False).onnx_path
    stored = [math.prod(t.dims) for t in onnx.load(path).graph.initializer if t.data_type == onnx.TensorProto.INT8]
    tensors = list(stored_tensors(gm))
    assert sum(tensor.numel() for tensor, bits in tensors if bits == 8) == sum(size for size in stored if size > 100)
    assert {tensor.dim() for tensor, bits in tensors if bits is None} == {1}


@pytest.mark.parametrize(("bits", "stored"), [(2, 4), (3, 4), (5, 8), (7, 8), (8, 8)])
def test_integers_are_as_wide_as_their_type(bits: int, stored: int, tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(16, 32, bias=False)).eval(), (torch.randn(4, 16),)
    config = {"extra_qconfig_dict": {"w_qscheme": {"bit": bits}}}
    gm = prepare_by_platform(model, "Experimental", config, example_inputs=x)
    calibrate(gm, [x], progress=False, compare=False)
    enable_quantization(gm)
    path = convert_export(gm, x, tmp_path / "a.onnx", verify=False).onnx_path
    (weight,) = [tensor for tensor in onnx.load(path).graph.initializer if math.prod(tensor.dims) == 512]
    assert [found for _, found in stored_tensors(gm)] == [stored]
    assert len(weight.raw_data) == 512 * stored // 8

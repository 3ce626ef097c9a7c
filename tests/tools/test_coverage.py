"""What of a model computes in integers."""

import re

import pytest
import torch
from torch import nn

from fxqat import prepare_by_platform
from fxqat.tools.coverage import coverage


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cumsum(self.q(x) @ self.k(x).transpose(1, 2), 1)


def test_products_of_two_values_count() -> None:
    x = torch.randn(2, 5, 8)
    found = coverage(prepare_by_platform(Attention(), "TSQAT", example_inputs=(x,)), x)
    assert found.macs == found.integer_macs == 2 * 5 * 8 * 8 + 5 * 5 * 8
    config = {"overrides": [{"match": {"function": "matmul"}, "activation": None}]}
    found = coverage(prepare_by_platform(Attention(), "TSQAT", config, example_inputs=(x,)), x)
    assert found.macs == 2 * 5 * 8 * 8 + 5 * 5 * 8
    assert found.integer_macs == 2 * 5 * 8 * 8


def test_a_weight_whose_layer_is_float_counts_as_float() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    config = {"overrides": [{"match": {"module": "1"}, "weight": None}]}
    found = coverage(prepare_by_platform(model, "TSQAT", config), torch.zeros(3, 4))
    assert (found.macs, found.integer_macs) == (36, 24)
    assert found.stored_bytes == 24 + 4 * 6 + 4 * (12 + 2)


def test_reasons_that_differ_in_numbers_are_one_row() -> None:
    layers = (nn.Conv2d(1, 2, 1), nn.Hardswish(), nn.Conv2d(2, 40, 1), nn.Hardswish(), nn.Conv2d(40, 64, 3))
    model = nn.Sequential(*layers)
    x = torch.zeros(1, 1, 6, 6)
    found = coverage(prepare_by_platform(model, "ONNXRuntime", example_inputs=(x,)), x)
    (group,) = [group for group in found.float_groups if "conv2d" in group.ops]
    assert group.nodes == ("0", "2")
    assert re.search(r"cost too much: \d+ to \d+ multiply-accumulates", group.reason)
    assert group.macs == 36 * (2 + 80)
    assert found.macs - found.integer_macs == group.macs
    assert "cost too much" in str(found)


class Positions(nn.Module):
    """Adds the first of its positions, as transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(1, 6, 4))
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x + self.positions[:, : x.shape[1]])


def test_slices_of_parameters_are_counted_over() -> None:
    x = torch.zeros(2, 6, 4)
    gm = prepare_by_platform(Positions(), "TSQAT", example_inputs=x)
    found = coverage(gm, x)
    assert found.macs == 6 * 4 * 4
    assert found.integer_share == 1


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_multiplies_integers_and_its_float_state(kind: type[nn.RNNBase]) -> None:
    x = torch.randn(5, 3, 6)
    gm = prepare_by_platform(nn.Sequential(kind(6, 10)).eval(), "Experimental", example_inputs=(x,))
    layer = gm.get_submodule("0")
    (w,), (r,) = layer.weight_tensors()
    found = coverage(gm, x)
    rows = x.shape[0] * x.shape[1] / len(x)  # for each of the first dimension, which counts as samples
    assert found.macs == rows * (w.numel() + r.numel())
    assert found.integer_macs == pytest.approx(rows * w.numel())
    biases = sum(p.numel() for name, p in layer.named_parameters() if name.startswith("bias"))
    assert found.stored_bytes == w.numel() + r.numel() + 4 * biases


class Output(nn.Module):
    """The output of a recurrent layer, without its states."""

    def forward(self, results: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return results[0]


def test_a_float_recurrent_layer_counts() -> None:
    model, x = nn.Sequential(nn.LSTM(6, 10), Output(), nn.Linear(10, 4)).eval(), torch.randn(5, 3, 6)
    found = coverage(prepare_by_platform(model, "OpenVINO", example_inputs=(x,)), x)
    of_lstm = 3 * sum(weight.numel() for weight in model[0].parameters() if weight.dim() == 2)
    assert (found.macs, found.integer_macs) == (of_lstm + 3 * 40, 3 * 40)
    (group,) = [group for group in found.float_groups if "lstm" in group.ops]
    assert group.macs == of_lstm


def test_float_attention_counts() -> None:
    model, x = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval(), torch.randn(3, 8, 16)
    config = {"overrides": [{"match": {"function": "matmul"}, "activation": None}]}
    gm = prepare_by_platform(model, "LiteRT", config, example_inputs=(x,))
    found = coverage(gm, x)
    products = 2 * 8 * 8 * 16
    assert found.macs == 4 * 8 * 16 * 16 + 2 * 8 * 16 * 32 + products
    assert found.integer_macs == found.macs - products
    assert re.search(rf"float inside quantized nodes +{products / found.macs:.1%}", str(found))


def test_a_product_of_integers_with_a_float_result_is_one_of_integers() -> None:
    model, x = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval(), torch.randn(3, 8, 16)
    found = coverage(prepare_by_platform(model, "OpenVINO", example_inputs=(x,)), x)
    assert "matmul" in {op for group in found.float_groups for op in group.ops}
    assert found.integer_macs == found.macs
    assert not any(group.macs for group in found.float_groups)

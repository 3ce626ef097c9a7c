"""Costs, by hand."""

import pytest
import torch
from torch import nn

from fxqat import convert_export
from fxqat.tools.mixed_precision.bank import WidthBank
from fxqat.tools.mixed_precision.costs import (
    activation_peak,
    average_weight_bits,
    bit_operations,
    file_bytes,
    weight_bytes,
)

A, B, C, HEAD = 8 * 3 * 9, 8 * 8 * 9, 8 * 8, 5 * 16


def test_memory_of_weights(bank):
    widths = dict.fromkeys(bank.units, 8) | {"a.weight": 4, "c.weight": 2}
    assert weight_bytes(bank).of(widths) == A / 2 + B + C / 4 + HEAD
    elements = A + B + C + HEAD
    assert average_weight_bits(bank).of(widths) == pytest.approx((4 * A + 8 * B + 2 * C + 8 * HEAD) / elements)


@pytest.mark.parametrize("narrow", [(), ("b.weight",), ("b.weight", "head.weight", "a.weight", "c.weight")])
def test_the_size_of_the_file(bank, batches, narrow, tmp_path):
    cost = file_bytes(bank, (batches[0],))
    widths = {name: choice[-1] for name, choice in bank.widths.items()} | dict.fromkeys(narrow, 4)
    report = convert_export(bank.mix(widths), (batches[0],), tmp_path / "a.onnx", opset_version=21)
    assert cost.of(widths) == pytest.approx(report.onnx_path.stat().st_size, abs=32)  # the lengths of numbers differ
    assert cost.of(widths | dict.fromkeys(narrow, 2)) == cost.of(widths)  # 2 bits are stored in 4


def test_bit_operations_of_a_sample(bank, batches):
    widths = dict.fromkeys(bank.units, 8) | {"a.weight": 4, "c.weight": 2, "x": 4}
    expected = 64 * (A * 4 * 4 + B * 8 * 8 + C * 2 * 8) + HEAD * 8 * 8
    assert bit_operations(bank, (batches[0],)).of(widths) == pytest.approx(expected)
    assert bit_operations(bank, (batches[0][:1],)) == bit_operations(bank, (batches[0],))


class Chain(nn.Module):
    """x (3, 4, 4) -> 8 x 16 -> 2 x 16 -> 4 x 16; of a residual, the second is read once more."""

    def __init__(self, way):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 2, 1), nn.Conv2d(2, 2, 1)
        self.way = way

    def forward(self, x):
        y = self.b(self.a(x))
        z = self.c(y)
        return z + y if self.way == "residual" else torch.cat((z, y), 1)


@pytest.mark.parametrize(("way", "shared"), [("residual", False), ("concat", True)])
def test_the_peak_of_activations(way, shared):
    bank = WidthBank(Chain(way).eval(), [torch.randn(5, 3, 4, 4)], (8,), (2, 8))
    cost = activation_peak(bank, (torch.randn(7, 3, 4, 4),))
    x, a, b, c, last = 3 * 16, 8 * 16, 2 * 16, 2 * 16, (4 if shared else 2) * 16
    for narrow in (None, "a", "x"):
        widths = {name: 8 for name in bank.units} | ({narrow: 2} if narrow else {})
        bits = {"x": widths["x"], "a": widths["a"]}
        schedule = [
            x * bits["x"] + a * bits["a"],  # while a runs
            a * bits["a"] + b * 8,
            (b + c) * 8,  # b is read once more
            (b + c + last) * 8,
        ]
        assert cost.of(widths) == max(schedule) / 8
    assert len(cost.rows) < 5  # what cannot be the peak is left out

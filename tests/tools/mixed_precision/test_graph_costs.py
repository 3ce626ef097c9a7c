"""Costs that depend on the graph, against values computed by hand."""

import pytest
import torch
from torch import nn

from fxqat.tools.mixed_precision.bank import WidthBank
from fxqat.tools.mixed_precision.graph_costs import activation_peak, bit_operations
from tests.tools.mixed_precision.test_costs import HEAD, A, B, C


def test_bit_operations_of_a_sample(bank, batches):
    widths = dict.fromkeys(bank.units, 8) | {"a.weight": 4, "c.weight": 2, "x": 4}
    expected = 64 * (A * 4 * 4 + B * 8 * 8 + C * 2 * 8) + HEAD * 8 * 8
    assert bit_operations(bank, (batches[0],)).of(widths) == pytest.approx(expected)
    assert bit_operations(bank, (batches[0][:1],)) == bit_operations(bank, (batches[0],))


class Product(nn.Module):
    """A product of two values, in one of its spellings."""

    def __init__(self, product):
        super().__init__()
        self.a, self.b = nn.Linear(6, 4), nn.Linear(6, 4)
        self.product = product

    def forward(self, x):
        return self.product(self.a(x), torch.flatten(input=self.b(x), start_dim=1))


@pytest.mark.parametrize(
    "product",
    [
        lambda a, b: torch.matmul(a, b.t()),
        lambda a, b: torch.matmul(a, other=b.t()),
        lambda a, b: torch.matmul(input=a, other=b.t()),
        lambda a, b: torch.einsum("ik,jk->ij", a, b),
    ],
)
def test_both_factors_of_a_product_count_however_they_are_given(product):
    x = torch.randn(3, 6)
    bank = WidthBank(Product(product).eval(), [x], (8,), (2, 8))
    widths = dict.fromkeys(bank.units, 8) | {"a": 2}
    cost = bit_operations(bank, (x,))
    assert cost.of(widths) == pytest.approx((2 * 6 * 4 * 8 * 8) + 3 * 4 * 2 * 8)
    assert cost.of(widths | {"a": 8}) == pytest.approx((2 * 6 * 4 * 8 * 8) + 3 * 4 * 8 * 8)


def test_an_activation_function_is_computed_with_its_input():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1)

        def forward(self, x):
            y = self.a(x)
            return (self.b(y) + y).relu()

    bank = WidthBank(Residual().eval(), [torch.randn(2, 3, 4, 4)], (8,), (2, 8))
    cost, widths = activation_peak(bank, (torch.randn(2, 3, 4, 4),)), dict.fromkeys(bank.units, 8)
    # a and b and their sum, which is rounded after the ReLU
    assert cost.of(widths) == (1 + 1 + 1) * 8 * 16
    assert cost.of(widths | {"relu": 2}) == (1 + 1 + 2 / 8) * 8 * 16


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
    assert len(cost.rows) < 5  # rows that cannot be the peak are removed

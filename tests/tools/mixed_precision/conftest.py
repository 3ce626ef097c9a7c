"""A small network with a residual and a concatenation, and its bank."""

import pytest
import torch
from torch import nn

from fxqat.tools.mixed_precision.bank import WidthBank


class Net(nn.Module):
    """Four weights; the sum and its operands, and the operands of the concatenation, share scales."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.bn = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.b, self.c, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1), nn.Linear(16, 5)

    def forward(self, x):
        y = self.bn(self.a(x)).relu()
        z = (self.b(y) + self.c(y)).relu()
        return self.head(torch.cat((z, y), 1).mean((2, 3)))


@pytest.fixture(scope="package")
def batches():
    torch.manual_seed(1)
    return [torch.randn(8, 3, 8, 8) for _ in range(2)]


@pytest.fixture(scope="package")
def net(batches):
    """In eval mode, with weights that are large enough for classes to differ."""
    model = Net().eval()
    with torch.no_grad():
        model.head.weight.mul_(20)
    return model


@pytest.fixture(scope="package")
def bank(net, batches):
    return WidthBank(net, batches, weight_widths=(2, 4, 8), value_widths=(4, 8))

"""Which activation reads the output of a layer."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxqat
from fxqat.tools.post_training.activations import activation_after
from tests.models import calibrate


class Net(nn.Module):
    """A convolution and what reads it; its name is ``conv``."""

    def __init__(self, after, channels=4):
        super().__init__()
        self.conv, self.after, self.last = nn.Conv2d(3, 4, 1), after, nn.Conv2d(channels, 2, 1)

    def forward(self, x):
        """``(N, 3, H, W)`` to ``(N, 2, H, W)``."""
        return self.last(self.after(self.conv(x)))


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        """Call it."""
        return self.function(x)


def found_for(after, backend, channels=4):
    x = torch.randn(2, 3, 8, 8)
    gm = calibrate(fxqat.prepare_by_platform(Net(after, channels).eval(), backend, example_inputs=(x,)), (x,))
    return activation_after([node for node in gm.graph.nodes if node.target == "conv"])


@pytest.mark.parametrize("backend", ["TSQAT", "ONNXRuntime", "LiteRT"])
@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (nn.SiLU(), F.silu),
        (nn.GELU(), F.gelu),
        (nn.Hardswish(), F.hardswish),
        (Function(lambda x: x * x.sigmoid()), F.silu),
        (Function(lambda x: F.hardsigmoid(x) * x), F.hardswish),
        (Function(torch.tanh), F.tanh),
    ],
    ids=["silu", "gelu", "hardswish", "x sigmoid x", "x hardsigmoid x", "tanh"],
)
def test_an_activation_after_the_layer(after, expected, backend):
    found = found_for(after, backend)
    assert found is expected
    x = torch.linspace(-8, 8, 100)
    torch.testing.assert_close(found(x), after(x))


def test_an_activation_in_the_layer():
    found = found_for(nn.ReLU(), "TSQAT")
    assert isinstance(found, nn.ReLU)
    assert found(torch.tensor([-1.0, 2.0])).tolist() == [0, 2]


@pytest.mark.parametrize(
    "after",
    [
        nn.Identity(),
        Function(lambda x: x.mean(1, keepdim=True)),
        Function(lambda x: F.silu(x) + x),
        Function(lambda x: x * x.mean(1, keepdim=True).sigmoid()),
    ],
    ids=["nothing", "mean", "silu and add", "a gate of something else"],
)
def test_other_readers_and_several_of_them(after):
    channels = 1 if after(torch.zeros(1, 4, 2, 2)).shape[1] == 1 else 4
    assert found_for(after, "TSQAT", channels) is None
    assert found_for(after, "ONNXRuntime", channels) is None

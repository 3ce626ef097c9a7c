"""A small model for LiteRT, converted once: what the tests of its export and of .tflite files share."""

from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fxqat import prepare_by_platform
from fxqat.custom_quantizer.backends.litert import LITERT
from fxqat.litert_conversion import run_converter
from fxqat.quantization.graph_module import QuantGraphModule
from fxqat.quantization.lower import lower
from tests.models import calibrate


def needs_litert():
    """Skip the test if a package of the extra ``litert`` is missing."""
    pytest.importorskip("ai_edge_litert", reason="needs the extra litert")
    pytest.importorskip("litert_torch", reason="needs the extra litert")


class Small(nn.Module):
    """Convolutions of every kind, a residual, SiLU, a concat, pools, and softmax at the end."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, stride=2)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.point = nn.Conv2d(8, 8, 1)
        self.fc = nn.Linear(16, 6)

    def forward(self, x):
        x = F.relu6(self.stem(x))
        y = F.silu(self.depthwise(x))
        x = x + self.point(y)
        x = F.max_pool2d(torch.cat([x, y], 1), 2)
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1)).softmax(-1)


@cache
def small(backend: str = "LiteRT") -> tuple[QuantGraphModule, torch.Tensor]:
    """The prepared and calibrated model and its input."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 16, 16)
    gm = prepare_by_platform(Small().eval(), backend, example_inputs=(x,), check="off")
    return calibrate(gm, (x,)), x


@cache
def converted() -> bytes:
    """Its file, with int8 inputs and outputs."""
    gm, x = small()
    return run_converter(lower(gm, "float"), (x,), [False], LITERT.rules)

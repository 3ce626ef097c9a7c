"""Split ops: what a backend computes by several ops computes the same, and has quantizers between them."""

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from fxqat import prepare_by_platform
from fxqat.quantization.split_ops import SPLITS, split_ops
from fxqat.quantization.standardize import standardize

CALLS = {
    "silu": (nn.SiLU(inplace=True), lambda x: F.silu(x), lambda x: F.silu(x, inplace=True)),
    "adaptive_avg_pool2d": (
        *(nn.AdaptiveAvgPool2d(1), nn.AdaptiveAvgPool2d((1, 1)), lambda x: F.adaptive_avg_pool2d(x, 1)),
        lambda x: F.adaptive_avg_pool2d(x, output_size=[1, 1]),
    ),
}


class Wrapped(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, x):
        return self.call(x * 2)


def split(call):
    return split_ops(standardize(fx.symbolic_trace(Wrapped(call))), SPLITS)


def targets(gm):
    return [node.target for node in gm.graph.nodes if node.op == "call_function"][1:]


@pytest.mark.parametrize("name", CALLS)
def test_the_split_op_computes_the_same(name):
    x = torch.randn(2, 4, 6, 6)
    for call in CALLS[name]:
        gm = split(call)
        gm.recompile()
        torch.testing.assert_close(gm(x), call(x * 2))
        assert targets(gm) == ([torch.sigmoid, torch.mul] if name == "silu" else [torch.mean])
    assert set(CALLS) == set(SPLITS)


def test_what_cannot_be_split_stays():
    hooked = nn.SiLU()
    hooked.register_forward_hook(lambda *_: None)
    for module in (nn.AdaptiveAvgPool2d(2), nn.AdaptiveAvgPool2d((1, 2)), hooked):
        assert [node.op for node in split(module).graph.nodes] == [
            "placeholder",
            "call_function",
            "call_module",
            "output",
        ]


def test_only_the_backend_that_asks_for_it_splits():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Conv2d(4, 2, 1)).eval()
    reports = {name: prepare_by_platform(model, name, check="off").quant_report for name in ("LiteRT", "TSQAT")}
    assert [row.op for row in reports["LiteRT"]][2:5] == ["sigmoid", "mul", "mean"]
    assert [row.op for row in reports["TSQAT"]][2:4] == ["silu", "adaptive_avg_pool2d"]
    sigmoid = reports["LiteRT"].row(next(row.node for row in reports["LiteRT"] if row.op == "sigmoid"))
    assert "fixed[0,0.996094]" in sigmoid.output

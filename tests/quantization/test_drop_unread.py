"""Drop unread: calls whose results are not read are erased; writes stay."""

import operator

import pytest
import torch
from torch import nn

from fxqat import prepare_by_platform
from fxqat.checkpoint import float_state_dict
from fxqat.quantization.drop_unread import drop_unread
from fxqat.quantization.standardize import standardize
from fxqat.tracing.trace import trace


class Unread(nn.Module):
    """Results that nothing reads, and writes whose results nothing reads."""

    def __init__(self):
        super().__init__()
        self.side = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.side(x).softmax(-1).mean(0)
        self.steps.add_(1)
        x = x * 2
        x.relu_()
        x[:, 0] = 0
        first, _ = x.chunk(2, 1)
        return first


def test_results_that_nothing_reads_leave_the_graph_and_writes_stay():
    model, x = Unread(), torch.randn(3, 4)
    expected = model(x)
    gm = trace(model, example_inputs=(x,)).gm
    drop_unread(gm.graph)
    standardize(gm).recompile()
    targets = {str(getattr(node.target, "__name__", node.target)) for node in gm.graph.nodes}
    assert not {"softmax", "mean"} & targets
    assert {"side", "add_", "chunk"} <= targets
    assert sum(node.target is operator.getitem for node in gm.graph.nodes) == 1
    before = gm.steps.clone()
    torch.testing.assert_close(gm(x), expected, rtol=0, atol=0)
    assert gm.steps == before + 1


class Checked(nn.Module):
    """Assertions on sizes and types, and one on values."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))

    def forward(self, x):
        y = self.features[0](x)
        torch._assert(y.ndim == 4, f"expected 4 dimensions, got {y.ndim}")
        torch._assert(y.shape[1] * 2 == y.size(1) + 4, f"wrong sizes: {y.shape} of {x.dtype}")
        y = self.features[1](y)
        torch._assert((y > -100).all(), "too small")
        return y


def test_assertions_on_sizes_leave_the_graph_and_those_on_values_stay():
    model, x = Checked().eval(), torch.randn(2, 3, 5, 5)
    gm = prepare_by_platform(model, "TSQAT")
    called = [str(getattr(node.target, "__name__", node.target)) for node in gm.graph.nodes]
    assert called.count("_assert") == 1
    assert not {"getattr", "size", "eq"} & set(called)
    assert not any(isinstance(gm.get_submodule(name), nn.BatchNorm2d) for name in called if name.startswith("features"))
    torch.testing.assert_close(gm(x), model(x), rtol=1e-4, atol=1e-4)
    with pytest.raises(AssertionError, match="too small"):
        gm(1e6 * x)


class UnreadAttention(nn.Module):
    """Attention to another input whose result nothing reads."""

    def __init__(self):
        super().__init__()
        self.first, self.attention = nn.Linear(4, 4), nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        y = self.first(x)
        self.attention(y, y.flip(1), y.flip(1))
        return y


def test_parameters_of_what_is_dropped_are_unread_and_whole():
    model, x = UnreadAttention(), torch.randn(2, 3, 4)
    gm = prepare_by_platform(model, "TSQAT", example_inputs=(x,))
    assert set(gm.quant_report.unread) == {name for name, _ in model.named_parameters() if "attention" in name}
    assert gm.provenance.split_tensors == {}
    state = float_state_dict(gm)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())

"""Drop unread: calls whose results are not read are erased; writes stay."""

import operator

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

"""Values that are always zero are found in the graph, and calibration does not warn of them."""

import pytest
import torch
from torch import fx, nn

from fxqat import calibrate, prepare_by_platform
from fxqat.fake_quantize.state import named_fake_quants
from fxqat.quantization.zero_values import zero_values

UNROLLED = {"overrides": [{"match": {"module": "rnn"}, "recurrent": "unrolled"}]}


class Zeros(nn.Module):
    def __init__(self):
        super().__init__()
        self.without, self.biased = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)

    def forward(self, x):
        zeros = x.new_zeros((2, 4))
        return (
            self.without(zeros),
            self.biased(zeros),
            x * zeros,
            x + zeros,
            torch.tanh(zeros),
            torch.sigmoid(zeros),
            zeros + 1,
            torch.cat([zeros, torch.zeros_like(x)]).reshape(-1),
            torch.ones_like(x) * 2,
        )


def test_what_is_computed_from_zeros():
    gm = fx.symbolic_trace(Zeros())
    found = {node.name for node in zero_values(gm.graph)}
    assert found == {"new_zeros", "without", "mul", "tanh", "zeros_like", "cat", "reshape"}
    outputs = gm(torch.randn(2, 4))
    for value, node in zip(outputs, next(iter(reversed(gm.graph.nodes))).args[0], strict=True):
        assert (node.name in found) == (not value.any())


class Last(nn.Module):
    def __init__(self, kind, bias):
        super().__init__()
        self.rnn, self.head = kind(5, 6, 2, bias=bias), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.rnn(x)[0][-1])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("bias", [True, False])
def test_states_that_start_at_zero_are_not_told(kind, bias, caplog):
    x = torch.randn(3, 2, 5)
    gm = prepare_by_platform(Last(kind, bias), "TSQAT", UNROLLED, example_inputs=(x,))
    always = [name for name, quant in named_fake_quants(gm) if quant.always_zero]
    assert always
    caplog.clear()
    calibrate(gm, [x], progress=False, compare=False)
    assert not [message for message in caplog.messages if "only zeros" in message]
    assert all(float(gm.get_submodule(name).observer.max_val) == 0 for name in always)
    calibrate(gm, [x * 0], progress=False, compare=False)
    (message,) = [message for message in caplog.messages if "only zeros" in message]
    assert "x_act_fake_quant" in message
    assert not any(f"{name}," in message for name in always)

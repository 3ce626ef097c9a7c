"""Multiply-accumulates of recurrent layers, which torch's counter leaves out where one kernel computes them."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from fxqat.utils.count_macs import count_macs

STEPS, SAMPLES = 7, 3


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_each_step_multiplies_with_all_weights(kind, bidirectional):
    layer = kind(4, 5, 2, bidirectional=bidirectional).eval()
    x = torch.randn(STEPS, SAMPLES, 4)
    weights = sum(weight.numel() for weight in layer.parameters() if weight.dim() == 2)
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            (y, _), macs = count_macs(lambda: layer(x))
        assert macs == STEPS * SAMPLES * weights
        torch.testing.assert_close(y, layer(x)[0])


def test_padding_of_packed_sequences_does_not_count():
    layer, lengths = nn.LSTM(4, 5).eval(), torch.tensor([7, 5, 2])
    packed = pack_padded_sequence(torch.randn(STEPS, SAMPLES, 4), lengths)
    (y, _), macs = count_macs(lambda: layer(packed))
    assert macs == lengths.sum() * (20 * 4 + 20 * 5)
    assert len(y.data) == lengths.sum()


def test_other_layers():
    _, macs = count_macs(lambda: nn.Linear(4, 5)(torch.randn(3, 4)))
    assert macs == 60
    assert count_macs(lambda: torch.randn(3) + 1)[1] == 0

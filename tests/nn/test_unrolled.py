"""A recurrent layer as plain operations computes what the operator does, also for samples of several lengths."""

import pytest
import torch
from torch import nn

from fxqat.nn.recurrent import RecurrentLayer, step_mask
from fxqat.nn.unrolled import unrolled_layer

STEPS, BATCH, FEATURES, HIDDEN = 5, 3, 4, 6
KINDS = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
}


@pytest.mark.parametrize("lengths", [None, torch.tensor([2, 5, 1])], ids=["whole", "lengths"])
@pytest.mark.parametrize(("directions", "bias", "has_states"), [(1, True, False), (2, False, True), (2, True, True)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_operations_compute_what_the_operator_does(kind, directions, bias, has_states, lengths):
    layer = RecurrentLayer(KINDS[kind](FEATURES, HIDDEN, bidirectional=directions == 2, bias=bias))
    states = [torch.randn(directions, BATCH, HIDDEN) for _ in range(layer.cell.num_states if has_states else 0)]
    h, c = (*states, None, None)[:2]
    with torch.no_grad():
        arguments = (torch.randn(STEPS, BATCH, FEATURES), *layer.stacked(), lengths, h, c, layer.mode, directions)
        found, expected = unrolled_layer(*arguments), torch.ops.fxqat.recurrent(*arguments)
    assert [each.shape for each in found] == [each.shape for each in expected]
    for ours, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, exact, atol=1e-6, rtol=1e-5)
    assert not found[0].transpose(1, 2)[~step_mask(arguments[0], lengths)].any()

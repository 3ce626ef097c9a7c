"""The dampening loss against equation 5 of the paper, in float64."""

import numpy as np
import pytest
import torch
from torch import nn

from fxqat import calibrate, enable_quantization, prepare_by_platform
from fxqat.errors import CalibrationError
from fxqat.scheme import QuantizeScheme
from fxqat.tools.training.dampening import dampening_loss
from tests.builders import LAYERS, make_qat_layer, switch_on
from tests.reference import as_float64, fake_quantize_reference, on_axis

CASES = [case for case in LAYERS if case.name in ("conv2d_groups", "conv_transpose2d_groups", "linear")]
INT3 = QuantizeScheme(3, per_channel=True, narrow_range=True)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_the_loss_is_that_of_the_paper(case) -> None:
    layer = switch_on(make_qat_layer(case, scheme=INT3))
    quant = layer.weight_fake_quant
    with torch.no_grad():
        quant.relative_scale.mul_(0.7)  # some weights are outside the range
    loss = dampening_loss(nn.Sequential(layer, nn.Identity()))
    loss.backward()
    folded, axis = as_float64(layer.folded()[0]), quant.axis
    scale = as_float64(quant.qparams()[0])
    rounded = fake_quantize_reference(folded, scale, np.zeros_like(scale), (-3, 3), axis)
    ends = on_axis(3 * scale, folded.ndim, axis)
    error = np.clip(folded, -ends, ends) - rounded
    assert loss.item() == pytest.approx((error**2).sum(), rel=1e-4)
    factor = folded / as_float64(layer.weight)
    expected = 2 * error * factor * (np.abs(folded) < ends)
    np.testing.assert_allclose(as_float64(layer.weight.grad), expected, rtol=1e-3, atol=1e-6)
    assert quant.relative_scale.grad is None
    assert layer.bn.weight.grad is None


def test_weights_move_to_their_rounded_values() -> None:
    layer = switch_on(make_qat_layer(CASES[-1], with_bn=False, scheme=INT3))
    before = dampening_loss(layer).item()
    optimizer = torch.optim.SGD([layer.weight], lr=0.1)
    for _ in range(30):
        optimizer.zero_grad()
        dampening_loss(layer).backward()
        optimizer.step()
    assert dampening_loss(layer).item() < 1e-3 * before


def test_a_model_without_weight_fake_quant_is_an_error() -> None:
    layer = make_qat_layer(CASES[-1])
    with pytest.raises(CalibrationError, match="none of 1 quantized layers has its weight fake-quant on"):
        dampening_loss(layer)
    assert dampening_loss(switch_on(layer)).item() > 0


class Tagger(nn.Module):
    """A table, whose weight a linear layer shares, and a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.lstm, self.head = nn.Embedding(20, 8), nn.LSTM(8, 8, bidirectional=True), nn.Linear(8, 20)
        self.down = nn.Linear(16, 8)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(self.lstm(self.table(tokens))[0]))


def test_every_quantized_weight_counts_once() -> None:
    tokens = torch.randint(0, 20, (5, 3))
    gm = prepare_by_platform(Tagger().eval(), "Experimental", example_inputs=(tokens,))
    calibrate(gm, [(tokens,)], progress=False, compare=False)
    enable_quantization(gm)
    loss = dampening_loss(gm)
    loss.backward()
    expected = 0.0
    for layer in (gm.down, gm.table, gm.get_submodule("lstm")):
        for tensors, (_, quant, values) in zip(layer.weight_tensors(), layer.quantized_weights(), strict=True):
            squares = (as_float64(values) - as_float64(quant.quantize(values))) ** 2
            gradients = sum((as_float64(tensor.grad) ** 2).sum() for tensor in tensors)
            assert gradients == pytest.approx(4 * squares.sum(), rel=0.05)  # a few are outside of the range
            expected += squares.sum()
    assert loss.item() == pytest.approx(expected, rel=0.05)

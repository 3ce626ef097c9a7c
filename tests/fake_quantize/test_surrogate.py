"""The range of fake-quants with a surrogate gradient, in steps."""

import pytest
import torch

from fxqat.fake_quantize.ewgs import EWGSFakeQuantize
from fxqat.scheme import QuantizeScheme
from tests.builders import make_fake_quant


@pytest.mark.parametrize("learned", [True, False])
def test_the_ends_of_the_range_move_with_the_zero_point(learned: bool) -> None:
    scheme = QuantizeScheme(4, signed=False, symmetric=False)
    quant, x = make_fake_quant(scheme, fake_quantize=EWGSFakeQuantize), torch.zeros(2, 3)
    with torch.no_grad():
        quant.scale.fill_(0.5)
        quant.zero_point.fill_(4.0)
    quant.zero_point.requires_grad_(learned)
    grid, low, high = quant.learned_steps(x, quant.used_scale())
    assert [grid.item(), low.item(), high.item()] == [0.5, -4.0, 11.0]
    (3.0 * grid + 2.0 * low + 5.0 * high).backward()
    assert quant.scale.grad.item() == pytest.approx(3.0 * quant.grad_scale(x))
    assert (quant.zero_point.grad is not None) is learned
    if learned:
        assert quant.zero_point.grad.item() == pytest.approx(-7.0 * quant.grad_scale(x))

"""The range of fake-quants with a surrogate gradient, in steps."""

import pytest
import torch

from fxqat.fake_quantize.ewgs import EWGSFakeQuantize
from fxqat.fake_quantize.learnable import START
from fxqat.scheme import QuantizeScheme
from tests.builders import make_fake_quant


@pytest.mark.parametrize("learned", [True, False])
def test_the_ends_of_the_range_move_with_the_zero_point(learned: bool) -> None:
    scheme = QuantizeScheme(4, signed=False, symmetric=False)
    quant, x = make_fake_quant(scheme, fake_quantize=EWGSFakeQuantize), torch.zeros(2, 3)
    quant.store(torch.tensor(0.5), torch.tensor(4.0))
    quant.shift.requires_grad_(learned)
    grid, low, high = quant.learned_steps(x, quant.used_scale())
    assert [grid.item(), low.item(), high.item()] == [0.5, -4.0, 11.0]
    (3.0 * grid + 2.0 * low + 5.0 * high).backward()
    assert quant.relative_scale.grad.item() == pytest.approx(3.0 * 0.5 / START * quant.grad_scale(x))
    assert (quant.shift.grad is not None) is learned
    if learned:
        assert quant.shift.grad.item() == pytest.approx(-7.0 / START * quant.grad_scale(x))

"""Fixed: learns nothing, and the gradient passes straight through."""

import pytest
import torch

from fxqat.fake_quantize.fixed import FixedFakeQuantize
from fxqat.numerics import SCALE_MIN
from fxqat.scheme import QuantizeScheme
from tests.builders import INT8, UINT8, calibrate, make_fake_quant


@pytest.mark.parametrize("scheme", [INT8, UINT8], ids=str)
def test_parameters_are_buffers(scheme: QuantizeScheme) -> None:
    quant = make_fake_quant(scheme, fake_quantize=FixedFakeQuantize)
    assert not list(quant.parameters())
    assert {"scale", "zero_point"} <= {name for name, _ in quant.named_buffers()}


@pytest.mark.parametrize("scheme", [INT8, UINT8], ids=str)
def test_gradient_is_one_inside_and_zero_outside(scheme: QuantizeScheme) -> None:
    quant = calibrate(make_fake_quant(scheme, fake_quantize=FixedFakeQuantize), torch.tensor([-1.0, 1.0]))
    x = torch.tensor([-3.0, -0.9, 0.0, 0.31, 0.9, 3.0], requires_grad=True)
    quant(x).sum().backward()
    assert x.grad.tolist() == [0.0, 1.0, 1.0, 1.0, 1.0, 0.0]
    assert quant.scale.grad is None


def test_power_of_two_scales_are_kept() -> None:
    scheme = QuantizeScheme(per_channel=True, scale_bits=1)
    quant = make_fake_quant(scheme, axis=0, channels=3, fake_quantize=FixedFakeQuantize)
    calibrate(quant, torch.tensor([[-1.0, 0.9], [0.3, 0.2], [0.0, 0.0]]))
    assert quant.scale.tolist() == [2.0**-6, 2.0**-8, SCALE_MIN]
    assert quant(torch.full((3, 1), 0.1)).flatten().tolist() == [6 / 64, 26 / 256, pytest.approx(0.0, abs=1e-9)]

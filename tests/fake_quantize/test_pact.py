"""PACT against equations 1 to 3 of the paper, in float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fxqat.fake_quantize.base import ACTIVATION, WEIGHT
from fxqat.fake_quantize.pact import PACTFakeQuantize
from fxqat.numerics import valid_scale
from fxqat.observer.min_max import MinMaxObserver
from fxqat.scheme import QuantizeScheme
from tests.builders import UINT8, calibrate, make_fake_quant, make_problem
from tests.reference import as_float64, fake_quantize_reference, on_axis

SCHEMES = [
    QuantizeScheme(2),
    QuantizeScheme(4, per_channel=True, narrow_range=True),
    QuantizeScheme(8, signed=False),
    QuantizeScheme(3, signed=False, symmetric=False),
    QuantizeScheme(8, symmetric=False, per_channel=True),
    QuantizeScheme(16, per_channel=True, scale_bits=4),
]


def others(scheme: QuantizeScheme, axis: int) -> tuple[int, ...]:
    return tuple(d for d in range(3) if not scheme.per_channel or d != axis)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_values_and_gradients_are_the_papers(scheme: QuantizeScheme, axis: int) -> None:
    if axis == 0:
        scheme = QuantizeScheme(scheme.bit_width, scheme.signed, scheme.symmetric)
    quant, x, grad = make_problem(PACTFakeQuantize, scheme, axis)
    y = quant.quantize(x.requires_grad_())
    y.backward(grad)
    limits = (scheme.quant_min, scheme.quant_max)
    v, g, (scale, zero_point) = as_float64(x), as_float64(grad), map(as_float64, quant.qparams())
    np.testing.assert_allclose(as_float64(y), fake_quantize_reference(v, scale, zero_point, limits, axis), rtol=1e-6)
    low, high = (on_axis((limit - zero_point) * scale, 3, axis) for limit in limits)
    above, below = v >= high, v < low
    np.testing.assert_array_equal(as_float64(x.grad), np.where(above | below, 0.0, g))
    to_high, to_low = ((g * outside).sum(others(scheme, axis)) for outside in (above, below))
    if scheme.symmetric:
        np.testing.assert_allclose(as_float64(quant.alpha.grad), to_high - to_low, rtol=1e-5, atol=1e-5)
    else:
        np.testing.assert_allclose(as_float64(quant.alpha.grad), to_high, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(as_float64(quant.beta.grad), -to_low, rtol=1e-5, atol=1e-5)
    assert np.abs(to_high).max() > 0 < np.abs(to_low).max()


def test_behind_a_relu_it_is_the_papers_quantizer() -> None:
    """Equation 1: ``0.5 * (|x| - |x - alpha| + alpha)``; equation 2: ``round(y * (2**k - 1) / alpha) * alpha / ..``."""
    x = torch.relu(torch.randn(500, generator=torch.Generator().manual_seed(0))).requires_grad_()
    quant = calibrate(
        make_fake_quant(QuantizeScheme(4, signed=False, symmetric=False), fake_quantize=PACTFakeQuantize), x
    )
    with torch.no_grad():
        quant.alpha.fill_(1.3)
    y = quant(x)
    y.sum().backward()
    v, alpha = as_float64(x), float(np.float32(1.3))
    clipped = 0.5 * (np.abs(v) - np.abs(v - alpha) + alpha)
    np.testing.assert_allclose(as_float64(y), np.rint(clipped * 15 / alpha) * alpha / 15, rtol=1e-5, atol=1e-7)
    assert quant.qparams()[1] == 0.0
    assert quant.alpha.grad.item() == np.count_nonzero(v >= alpha) > 20
    assert quant.beta.item() == quant.beta.grad.item() == 0.0


def test_of_values_that_are_never_negative_one_clipping_value_is_learned() -> None:
    scheme = replace(UINT8, nonnegative=True)
    quant = PACTFakeQuantize(scheme, MinMaxObserver(scheme), ACTIVATION)
    quant.observe(torch.tensor([0.0, 2.55]))
    quant.fake_quant_enabled = True
    assert quant.beta is None
    assert quant.qparams()[1] == quant.zero_point == 0
    x = torch.tensor([0.0, 1.0, 9.0], requires_grad=True)
    quant(x).sum().backward()
    assert (x.grad.tolist(), quant.alpha.grad) == ([1.0, 1.0, 0.0], 1.0)


def test_a_value_that_is_the_clipping_value_counts_for_it() -> None:
    quant = calibrate(make_fake_quant(UINT8, fake_quantize=PACTFakeQuantize), torch.tensor([0.0, 6.0]))
    high = (255 * quant.qparams()[0]).item()
    x = torch.tensor([high, high - 0.01, 0.0], requires_grad=True)
    quant(x).sum().backward()
    assert quant.alpha.grad.item() == 1.0
    assert x.grad.tolist() == [0.0, 1.0, 1.0]


def test_training_finds_the_clipping_value_of_least_error() -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    x[0] = 12.0
    quant = calibrate(make_fake_quant(QuantizeScheme(4), ACTIVATION, fake_quantize=PACTFakeQuantize), x)
    assert quant.alpha.item() == pytest.approx(12.0)
    optimizer = torch.optim.SGD(quant.parameters(), lr=0.05, weight_decay=1.0)
    for _ in range(40):
        optimizer.zero_grad()
        (quant(x) - x).square().mean().backward()
        optimizer.step()
    assert 0.5 < quant.alpha.item() < 6.0
    assert quant.qparams()[0].item() == pytest.approx(quant.alpha.item() / 7)


@pytest.mark.parametrize("symmetric", [True, False])
def test_every_scale_and_zero_point_that_is_set_is_kept(symmetric: bool) -> None:
    random = np.random.default_rng(0)
    scheme = QuantizeScheme(16, symmetric=symmetric, per_channel=True)
    quant = make_fake_quant(scheme, WEIGHT, 0, 20000, PACTFakeQuantize)
    scale = valid_scale(torch.from_numpy(np.exp2(random.uniform(-20, 10, 20000))), quant.scale_bits)
    zero_point = torch.from_numpy(random.integers(scheme.quant_min, scheme.quant_max + 1, 20000)).float()
    zero_point *= not symmetric
    quant.set_qparams(scale, zero_point)
    assert torch.equal(quant.qparams()[0], scale)
    assert torch.equal(quant.qparams()[1], zero_point)


def test_clipping_values_count_by_their_size() -> None:
    quant = make_fake_quant(UINT8, fake_quantize=PACTFakeQuantize)
    with torch.no_grad():
        quant.alpha.fill_(-2.0)
        quant.beta.fill_(-0.55)
    scale, zero_point = quant.qparams()
    assert scale.item() == pytest.approx(0.01)
    assert zero_point.item() == 55.0

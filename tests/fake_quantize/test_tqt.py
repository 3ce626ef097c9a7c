"""TQT against equations 6 to 8 of the paper, in float64."""

import math

import numpy as np
import pytest
import torch

from fxqat.errors import ConfigError
from fxqat.fake_quantize.base import WEIGHT
from fxqat.fake_quantize.tqt import TQTFakeQuantize
from fxqat.numerics import SCALE_MAX, SCALE_MIN
from fxqat.scheme import QuantizeScheme
from tests.builders import INT8, calibrate, make_fake_quant, make_problem
from tests.reference import as_float64, fake_quantize_reference, on_axis

SCHEMES = [
    QuantizeScheme(2, scale_bits=1),
    QuantizeScheme(4, per_channel=True, narrow_range=True, scale_bits=1),
    QuantizeScheme(8, signed=False, scale_bits=1),
    QuantizeScheme(3, signed=False, symmetric=False, scale_bits=1),
    QuantizeScheme(8, symmetric=False, per_channel=True, scale_bits=1),
    QuantizeScheme(16, per_channel=True, scale_bits=1),
]
POT8 = QuantizeScheme(scale_bits=1)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_values_and_gradients_are_the_papers(scheme: QuantizeScheme) -> None:
    quant, x, grad = make_problem(TQTFakeQuantize, scheme)
    y = quant.quantize(x.requires_grad_())
    y.backward(grad)
    limits = (scheme.quant_min, scheme.quant_max)
    v, g, (scale, zero_point) = as_float64(x), as_float64(grad), map(as_float64, quant.qparams())
    np.testing.assert_allclose(as_float64(y), fake_quantize_reference(v, scale, zero_point, limits, 1), rtol=1e-7)
    s, z = on_axis(scale, 3, 1), on_axis(zero_point, 3, 1)
    n, p = (limit - z for limit in limits)
    r = np.rint(v / s)
    inside = (r >= n) & (r <= p)
    to_scale = np.where(inside, r - v / s, np.clip(r, n, p))  # equation 6
    others = (0, 2) if scheme.per_channel else (0, 1, 2)
    expected = (g * s * np.log(2.0) * to_scale).sum(others)  # equations 7 and 8
    found = as_float64(quant.log2_threshold.grad)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())
    np.testing.assert_array_equal(as_float64(x.grad), np.where(inside, g, 0.0))


@pytest.mark.parametrize(
    ("scheme", "log2_threshold", "scale"),
    [
        (POT8, 0.0, 2.0**-7),
        (POT8, 0.01, 2.0**-6),
        (POT8, -0.99, 2.0**-7),
        (QuantizeScheme(4, signed=False, symmetric=False, scale_bits=1), 1.5, 2.0**-2),
        (QuantizeScheme(4, scale_bits=1), 1.5, 2.0**-1),
        (POT8, 1e4, SCALE_MAX),
        (POT8, -1e4, SCALE_MIN),
    ],
)
def test_the_scale_is_the_power_of_two_above_the_threshold(
    scheme: QuantizeScheme, log2_threshold: float, scale: float
) -> None:
    quant = make_fake_quant(scheme, fake_quantize=TQTFakeQuantize)
    with torch.no_grad():
        quant.log2_threshold.fill_(log2_threshold)
    assert quant.qparams()[0].item() == scale
    assert math.frexp(quant.used_scale().item())[0] == 0.5


def test_every_power_of_two_that_is_set_is_kept() -> None:
    quant = make_fake_quant(POT8, fake_quantize=TQTFakeQuantize)
    kept = []
    for exponent in range(-40, 41):
        quant.set_qparams(torch.tensor(2.0**exponent), torch.tensor(0.0))
        kept.append(quant.qparams()[0].item())
    assert kept == [2.0**exponent for exponent in range(-40, 41)]


def test_training_finds_a_better_power_of_two() -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    x[0] = 12.0
    quant = calibrate(make_fake_quant(QuantizeScheme(4, scale_bits=1), fake_quantize=TQTFakeQuantize), x)
    assert quant.qparams()[0].item() == 2.0
    optimizer = torch.optim.Adam(quant.parameters(), lr=0.1)
    for _ in range(60):
        optimizer.zero_grad()
        (quant(x) - x).square().mean().backward()
        optimizer.step()
    errors = {}
    for exponent in range(-4, 2):
        steps = np.clip(np.rint(as_float64(x) / 2.0**exponent), -8, 7)
        errors[2.0**exponent] = ((steps * 2.0**exponent - as_float64(x)) ** 2).mean()
    assert quant.qparams()[0].item() == min(errors, key=errors.get) == 0.5


def test_other_scales_are_refused() -> None:
    with pytest.raises(ConfigError, match="TQT trains power-of-two scales.*scale_bits=24. Set pot_scale: true"):
        make_fake_quant(INT8, WEIGHT, fake_quantize=TQTFakeQuantize)
    assert make_fake_quant(POT8, WEIGHT, fake_quantize=TQTFakeQuantize).log2_threshold.requires_grad

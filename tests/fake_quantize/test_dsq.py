"""DSQ against the soft staircase of the paper, differentiated by differences in float64."""

import math

import numpy as np
import pytest
import torch

from fxqat.errors import ConfigError
from fxqat.fake_quantize.base import WEIGHT
from fxqat.fake_quantize.dsq import ALPHA_MAX, ALPHA_MIN, DSQFakeQuantize
from fxqat.fake_quantize.learnable import START
from fxqat.scheme import QuantizeScheme
from tests.builders import INT8, make_fake_quant, make_problem
from tests.reference import as_float64, fake_quantize_reference, on_axis

SCHEMES = [
    QuantizeScheme(2),
    QuantizeScheme(4, per_channel=True, narrow_range=True),
    QuantizeScheme(8, signed=False),
    QuantizeScheme(3, signed=False, symmetric=False),
    QuantizeScheme(8, symmetric=False, per_channel=True),
]
STEP = 1e-6


def staircase(
    x: np.ndarray, scale: np.ndarray, zero_point: np.ndarray, alpha: float, limits: tuple[int, int], axis: int
) -> np.ndarray:
    """Q_S of the paper, in its own terms: lower and upper clipping value, interval width and middle."""
    scale, zero_point = on_axis(scale, x.ndim, axis), on_axis(zero_point, x.ndim, axis)
    lower, upper = ((limit - zero_point) * scale for limit in limits)
    delta = (upper - lower) / (limits[1] - limits[0])
    i = np.clip(np.floor((x - lower) / delta), 0, limits[1] - limits[0] - 1)
    middle = lower + (i + 0.5) * delta
    k = np.log(2 / alpha - 1) / delta
    s = 1 / (1 - alpha)
    assert np.allclose(s * np.tanh(0.5 * k * delta), 1.0)  # the intervals join
    phi = s * np.tanh(k * (x - middle))
    soft = lower + delta * (i + (phi + 1) / 2)
    return np.where(x < lower, lower, np.where(x > upper, upper, soft))


@pytest.mark.parametrize("alpha", [0.05, 0.4])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_values_are_hard_and_gradients_those_of_the_soft_staircase(scheme: QuantizeScheme, alpha: float) -> None:
    quant, x, grad = make_problem(DSQFakeQuantize, scheme, alpha=alpha)
    y = quant.quantize(x.requires_grad_())
    y.backward(grad)
    limits = (scheme.quant_min, scheme.quant_max)
    v, g, (scale, zero_point) = as_float64(x), as_float64(grad), map(as_float64, quant.qparams())
    np.testing.assert_allclose(as_float64(y), fake_quantize_reference(v, scale, zero_point, limits, 1), rtol=1e-6)
    exact = (v, scale, zero_point, float(np.float32(alpha)))

    def slope(argument: int) -> np.ndarray:
        step = STEP * np.maximum(1e-3, np.abs(exact[argument]))
        ends = ([*exact[:argument], exact[argument] + sign * step, *exact[argument + 1 :]] for sign in (1, -1))
        high, low = (staircase(*end, limits, 1) for end in ends)
        return g * (high - low) / on_axis(np.asarray(2 * step), 3, 1 if argument in (1, 2) else None)

    np.testing.assert_allclose(as_float64(x.grad), slope(0), rtol=2e-3, atol=2e-4)
    others = (0, 2) if scheme.per_channel else (0, 1, 2)
    factor = quant.grad_scale(x) / START
    for parameter, argument, unit in ((quant.relative_scale, 1, scale), (quant.shift, 2, 1.0)):
        if parameter is not None:
            expected = slope(argument).sum(others) * unit * factor
            np.testing.assert_allclose(
                as_float64(parameter.grad), expected, rtol=2e-3, atol=2e-3 * np.abs(expected).max()
            )
    expected = slope(3).sum()
    np.testing.assert_allclose(quant.alpha.grad.item(), expected, rtol=2e-3, atol=1e-3 * np.abs(slope(3)).sum())


def test_a_step_of_the_hardest_staircase_has_all_its_gradient_in_the_middle() -> None:
    quant = make_fake_quant(QuantizeScheme(4), WEIGHT, fake_quantize=DSQFakeQuantize, alpha=ALPHA_MIN)
    x = torch.tensor([0.5001, 0.9], requires_grad=True)
    quant.quantize(x).sum().backward()
    assert x.grad[0] > 3.5  # k / 2, k = log(2047)
    assert x.grad[1] < 0.05


@pytest.mark.parametrize(("trained", "used"), [(-3.0, ALPHA_MIN), (7.0, ALPHA_MAX), (math.nan, ALPHA_MAX)])
def test_alpha_is_used_within_its_limits_and_can_come_back(trained: float, used: float) -> None:
    quant = make_fake_quant(QuantizeScheme(4), WEIGHT, fake_quantize=DSQFakeQuantize)
    same = make_fake_quant(QuantizeScheme(4), WEIGHT, fake_quantize=DSQFakeQuantize, alpha=used)
    with torch.no_grad():
        quant.alpha.fill_(trained)
    gradients = []
    for one in (quant, same):
        x = torch.linspace(-3.3, 3.1, 30).requires_grad_()
        one.quantize(x).mul(torch.linspace(0, 1, 30)).sum().backward()
        gradients.append((x.grad, one.alpha.grad))
    assert torch.equal(gradients[0][0], gradients[1][0])
    assert gradients[0][1] == gradients[1][1] != 0


@pytest.mark.parametrize("alpha", [0.0, -0.1, 0.6, math.nan])
def test_a_softness_out_of_range_is_refused(alpha: float) -> None:
    with pytest.raises(ConfigError, match=r"DSQ: alpha must be within \[0.000976562, 0.5\], got"):
        make_fake_quant(INT8, WEIGHT, fake_quantize=DSQFakeQuantize, alpha=alpha)
    assert make_fake_quant(INT8, WEIGHT, fake_quantize=DSQFakeQuantize, alpha=0.5).alpha.item() == 0.5

"""EWGS against equations 5 and 6 of the paper, in float64."""

import math

import numpy as np
import pytest
import torch

from fxqat.errors import ConfigError
from fxqat.fake_quantize.base import WEIGHT
from fxqat.fake_quantize.ewgs import EWGSFakeQuantize
from fxqat.fake_quantize.learnable import START
from fxqat.scheme import QuantizeScheme
from tests.builders import INT8, make_fake_quant, make_problem
from tests.reference import as_float64, fake_quantize_reference, lsq_reference, on_axis

SCHEMES = [
    QuantizeScheme(2),
    QuantizeScheme(4, per_channel=True, narrow_range=True),
    QuantizeScheme(8, signed=False),
    QuantizeScheme(3, signed=False, symmetric=False),
    QuantizeScheme(8, symmetric=False, per_channel=True),
]


@pytest.mark.parametrize("delta", [0.0, 20.0])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_gradients_are_scaled_by_sign_and_rounding_error(scheme: QuantizeScheme, delta: float) -> None:
    quant, x, grad = make_problem(EWGSFakeQuantize, scheme, delta=delta)
    y = quant.quantize(x.requires_grad_())
    y.backward(grad)
    limits = (scheme.quant_min, scheme.quant_max)
    v, g, (scale, zero_point) = as_float64(x), as_float64(grad), map(as_float64, quant.qparams())
    np.testing.assert_allclose(as_float64(y), fake_quantize_reference(v, scale, zero_point, limits, 1), rtol=1e-6)
    # the paper's terms: lower and upper bound l and u, x_n and x_q in [0, 1], and x_hat = l + (u - l) * x_q
    s, z = on_axis(scale, 3, 1), on_axis(zero_point, 3, 1)
    lower, upper = ((limit - z) * s for limit in limits)
    x_n = np.clip((v - lower) / (upper - lower), 0, 1)
    x_q = np.rint(x_n * (limits[1] - limits[0])) / (limits[1] - limits[0])
    g_q = g * (upper - lower)
    g_n = g_q * (1 + delta * np.sign(g_q) * (x_n - x_q))
    inside = (v > lower) & (v < upper)
    np.testing.assert_allclose(as_float64(x.grad), np.where(inside, g_n / (upper - lower), 0.0), rtol=1e-4, atol=1e-6)
    # v = x / s within the range, its limit outside: x_hat = round(v) * s has the slope round(v) and that by way of v
    steps = np.where(inside, v / s, np.clip(v / s, lower / s, upper / s))
    to_scale = g * np.rint(steps) - np.where(inside, g_n / (upper - lower) * v / s, 0.0)
    others = (0, 2) if scheme.per_channel else (0, 1, 2)
    factor = quant.grad_scale(x) / START
    expected = to_scale.sum(others) * scale * factor
    size = np.abs(expected).max()
    np.testing.assert_allclose(as_float64(quant.relative_scale.grad), expected, rtol=1e-3, atol=1e-4 * size)
    if delta == 0.0:  # LSQ
        plain = lsq_reference(v, scale, zero_point, limits, g, 1 if scheme.per_channel else None)
        found = as_float64(quant.relative_scale.grad)
        np.testing.assert_allclose(found, plain.scale * scale * factor, rtol=1e-3, atol=1e-4 * size)
        if not scheme.symmetric:
            found = as_float64(quant.shift.grad)
            np.testing.assert_allclose(found, plain.zero_point * factor, rtol=1e-3, atol=1e-5 / START)
    else:
        assert not np.allclose(as_float64(x.grad)[inside], g[inside], rtol=1e-3)


def test_the_gradient_shrinks_where_the_step_goes_to_the_near_boundary() -> None:
    """A step is ``-grad``: from 0.4 a negative gradient leads to the boundary 0.5, a positive one to -0.5."""
    quant = make_fake_quant(QuantizeScheme(2, narrow_range=True), WEIGHT, fake_quantize=EWGSFakeQuantize, delta=1.0)
    x = torch.tensor([0.4, 0.4, -0.4, 0.0], requires_grad=True)
    quant.quantize(x).backward(torch.tensor([1.0, -1.0, 1.0, 1.0]))
    # two steps of range: x_n - x_q = 0.2
    torch.testing.assert_close(x.grad, torch.tensor([1.2, -0.8, 0.8, 1.0]))


@pytest.mark.parametrize("delta", [-0.1, math.inf, math.nan])
def test_a_bad_delta_is_refused(delta: float) -> None:
    with pytest.raises(ConfigError, match="EWGS: delta must be a finite number >= 0, got"):
        make_fake_quant(INT8, WEIGHT, fake_quantize=EWGSFakeQuantize, delta=delta)
    assert make_fake_quant(INT8, WEIGHT, fake_quantize=EWGSFakeQuantize).delta == 0.001

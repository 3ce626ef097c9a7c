"""DoReFa against equations 9 and 10 of the paper, in float64."""

import numpy as np
import pytest
import torch

from fxqat.errors import ConfigError
from fxqat.fake_quantize.base import ACTIVATION, WEIGHT
from fxqat.fake_quantize.dorefa import DoReFaFakeQuantize
from fxqat.numerics import EDGE
from fxqat.scheme import QuantizeScheme
from tests.builders import calibrate, make_fake_quant
from tests.reference import as_float64, on_axis

SCHEMES = [
    QuantizeScheme(2, narrow_range=True),
    QuantizeScheme(4, per_channel=True, narrow_range=True),
    QuantizeScheme(8, signed=False),
    QuantizeScheme(4, symmetric=False, per_channel=True),
]


def transformed(weight: np.ndarray, scheme: QuantizeScheme, axis: int) -> np.ndarray:
    """``tanh(w) / max|tanh(w)|`` (the inner part of equation 9), times ``max|w|``."""
    others = tuple(d for d in range(weight.ndim) if not (scheme.per_channel and d == axis))
    soft = np.tanh(weight)
    return np.abs(weight).max(others, keepdims=True) * soft / np.abs(soft).max(others, keepdims=True)


def make(scheme: QuantizeScheme, axis: int, size: float = 2.0) -> tuple[DoReFaFakeQuantize, torch.Tensor]:
    weight = torch.randn((5, 3, 8), generator=torch.Generator().manual_seed(0)) * size
    quant = make_fake_quant(scheme, WEIGHT, axis, weight.shape[axis], DoReFaFakeQuantize)
    return calibrate(quant, weight), weight


@pytest.mark.parametrize("axis", [0, 1, -2])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_what_is_rounded_is_the_transformed_weight(scheme: QuantizeScheme, axis: int) -> None:
    quant, weight = make(scheme, axis)
    expected = transformed(as_float64(weight), scheme, axis % 3)
    np.testing.assert_allclose(as_float64(quant.target(weight)), expected, rtol=1e-5, atol=1e-6)
    scale, zero_point = (on_axis(as_float64(values), 3, axis) for values in quant.qparams())
    q = np.clip(np.rint(expected / scale) + zero_point, scheme.quant_min, scheme.quant_max)
    np.testing.assert_allclose(as_float64(quant.quantize(weight)), (q - zero_point) * scale, rtol=1e-5, atol=1e-6)
    assert np.abs(expected - as_float64(weight)).max() > 0.1


def test_integers_are_those_of_the_normalized_tanh() -> None:
    """With the calibrated range ``max|w|``: ``round(n * tanh(w) / max|tanh(w)|)``."""
    quant, weight = make(QuantizeScheme(4, narrow_range=True), 0)
    scale = as_float64(quant.qparams()[0])
    soft = np.tanh(as_float64(weight))
    integers = np.rint(7 * soft / np.abs(soft).max())
    np.testing.assert_allclose(as_float64(quant.quantize(weight)) / scale, integers, rtol=1e-5)
    assert scale == pytest.approx(np.abs(as_float64(weight)).max() / 7)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_gradient_goes_straight_through_the_rounding_and_then_through_the_tanh(scheme: QuantizeScheme) -> None:
    quant, weight = make(scheme, 1, 1.0)
    scale, zero_point = quant.qparams()
    quant.set_qparams(0.9 * scale, zero_point)  # some weights are outside
    grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    quant.quantize(weight.requires_grad_()).backward(grad)
    v = as_float64(weight)
    scale, zero_point = (on_axis(as_float64(values), 3, 1) for values in quant.qparams())
    steps = transformed(v, scheme, 1) / scale + zero_point
    g = np.where((steps > scheme.quant_min - EDGE) & (steps < scheme.quant_max + EDGE), as_float64(grad), 0.0)
    assert 0 < np.count_nonzero(g == 0) < 60
    expected = np.empty_like(v)
    for index in np.ndindex(v.shape):
        ends = []
        for step in (1e-6, -1e-6):
            moved = v.copy()
            moved[index] += step
            ends.append(transformed(moved, scheme, 1))
        expected[index] = (g * (ends[0] - ends[1])).sum() / 2e-6
    np.testing.assert_allclose(as_float64(weight.grad), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-12, 1e4])
def test_any_weight_has_a_finite_transform_and_gradient(size: float) -> None:
    quant, weight = make(QuantizeScheme(4, per_channel=True), 0, size)
    x = weight.requires_grad_()
    target = quant.target(x)
    target.sum().backward()
    assert torch.isfinite(target).all()
    assert torch.isfinite(x.grad).all()
    if size <= 1e-12:  # tanh(x) is x there
        torch.testing.assert_close(target.detach(), weight.detach(), rtol=1e-5, atol=0.0)


def test_activations_are_refused() -> None:
    with pytest.raises(ConfigError, match="DoReFaFakeQuantize is for weights.*Choose another"):
        make_fake_quant(QuantizeScheme(), ACTIVATION, fake_quantize=DoReFaFakeQuantize)
    assert not list(make_fake_quant(QuantizeScheme(), WEIGHT, fake_quantize=DoReFaFakeQuantize).parameters())

"""HistogramL2 against a brute-force search in float64."""

import numpy as np
import pytest
import torch

from fxqat.numerics import choose_qparams
from fxqat.observer.histogram_l2 import HistogramL2Observer
from fxqat.scheme import QuantizeScheme
from tests.reference import fake_quantize_reference

SYMMETRIC = [QuantizeScheme(bit_width=bits) for bits in (2, 4, 8)]
ASYMMETRIC = [QuantizeScheme(bit_width=bits, signed=False, symmetric=False) for bits in (2, 4, 8)]


def squared_error(x: np.ndarray, low: float, high: float, scheme: QuantizeScheme) -> float:
    """Mean squared error of a range, by the formula in float64."""
    scale, zero_point = choose_qparams(torch.tensor(low), torch.tensor(high), scheme)
    limits = scheme.quant_min, scheme.quant_max
    x_hat = fake_quantize_reference(x, scale.double().numpy(), zero_point.double().numpy(), limits)
    return float(((x_hat - x) ** 2).mean())


def least_error(x: np.ndarray, scheme: QuantizeScheme, steps: int) -> float:
    """The least error of all ranges that end in one of ``steps`` places on each side, spaced by a constant factor."""
    ratios = np.geomspace(0.01, 1.0, steps)
    if scheme.symmetric:
        return min(squared_error(x, x.min() * a, x.max() * a, scheme) for a in ratios)
    low, high = min(x.min(), 0.0), x.max()
    lows = ratios if low < 0 else [1.0]
    return min(squared_error(x, low * a, high * b, scheme) for a in lows for b in ratios)


def heavy_tails(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_t(3, count)


def observed(data: list[np.ndarray], scheme: QuantizeScheme, **arguments: int) -> HistogramL2Observer:
    observer = HistogramL2Observer(scheme, **arguments)
    for x in data:
        observer(torch.from_numpy(x.astype(np.float32)))
    return observer


@pytest.mark.parametrize("scheme", SYMMETRIC, ids=str)
def test_symmetric_ranges_are_as_good_as_an_exhaustive_search(scheme: QuantizeScheme) -> None:
    data = [heavy_tails(1500), heavy_tails(1500, 1) * 3.0]
    everything = np.concatenate(data)
    observer = observed(data, scheme)
    found = squared_error(everything, float(observer.min_val), float(observer.max_val), scheme)
    best = least_error(everything, scheme, 400)
    assert found <= best * 1.03
    assert found >= best * 0.97
    assert found <= squared_error(everything, everything.min(), everything.max(), scheme)


@pytest.mark.parametrize("scheme", ASYMMETRIC, ids=str)
@pytest.mark.parametrize("one_sided", [False, True])
def test_asymmetric_ranges_have_two_ends(scheme: QuantizeScheme, one_sided: bool) -> None:
    """A long tail on the right, and on the left a few outliers, or nothing."""
    x = np.random.default_rng(0).gumbel(1.0, 2.0, 2000)
    x[:2] = (-60.0, 45.0)
    x = x.clip(0.0) if one_sided else x
    observer = observed([x], scheme)
    found = squared_error(x, float(observer.min_val), float(observer.max_val), scheme)
    best = least_error(x, scheme, 200 if one_sided else 28)
    whole = squared_error(x, x.min(), x.max(), scheme)
    assert found <= best * 1.03
    assert found <= whole * (0.7 if scheme.bit_width < 8 else 1.0)


def test_the_expected_error_is_the_error_of_values_spread_over_the_cells() -> None:
    """The closed form against many evenly spaced values in each cell, also outside the range."""
    scheme = QuantizeScheme(bit_width=3, signed=False, symmetric=False)
    observer = observed([heavy_tails(300)], scheme, bins=8)
    low, high = torch.tensor([[-1.0, -0.1, -5.0]]), torch.tensor([[1.3, 4.0, 0.2]])
    got = observer._expected_error(observer.histogram, observer.cell_width(), low, high)[0]
    width = float(observer.cell_width())
    fine = (np.arange(-8 * 1000, 8 * 1000) + 0.5) * width / 1000
    weights = observer.histogram[0].double().numpy().repeat(1000) / 1000
    for error, a, b in zip(got.tolist(), low[0].tolist(), high[0].tolist(), strict=True):
        scale, zero_point = choose_qparams(torch.tensor(a), torch.tensor(b), scheme)
        x_hat = fake_quantize_reference(fine, scale.double().numpy(), zero_point.double().numpy(), (0, 7))
        assert error * width**3 == pytest.approx((weights * (x_hat - fine) ** 2).sum() * width, rel=1e-4)


def test_channels_are_searched_apart() -> None:
    scheme = QuantizeScheme(bit_width=4, per_channel=True)
    x = np.stack([heavy_tails(500, seed) * 10.0**seed for seed in range(3)], 1).astype(np.float32)
    observer = HistogramL2Observer(scheme, 1, 3)
    observer(torch.from_numpy(x))
    for channel in range(3):
        alone = observed([x[:, channel]], QuantizeScheme(bit_width=4))
        assert observer.min_val[channel] == alone.min_val
        assert observer.max_val[channel] == alone.max_val


def test_scales_of_few_bits_are_searched_as_they_are_used() -> None:
    scheme = QuantizeScheme(bit_width=4, scale_bits=1)
    x = heavy_tails(3000)
    observer = observed([x], scheme)
    found = squared_error(x, float(observer.min_val), float(observer.max_val), scheme)
    best = min(squared_error(x, -7 * 2.0**e, 7 * 2.0**e, scheme) for e in range(-8, 3))
    assert found == pytest.approx(best, rel=1e-9)
    assert found < squared_error(x, x.min(), x.max(), scheme)

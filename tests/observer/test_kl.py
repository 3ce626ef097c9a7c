"""KL against the pseudocode of the talk, in plain float64 numpy."""

import math

import numpy as np
import pytest
import torch

from fxqat.errors import ConfigError
from fxqat.observer.kl import KLObserver
from fxqat.scheme import QuantizeScheme


def cells_of(x: np.ndarray, bins: int) -> tuple[np.ndarray, float]:
    """Counts on ``bins`` cells on either side of 0 and their width; cells do not contain their inner edge."""
    limit = 2.0 ** math.ceil(math.log2(np.abs(x).max()))
    width = limit / bins
    counts = np.zeros(2 * bins)
    for value in x.astype(np.float64):
        cell = max(math.ceil(abs(value) / width) - 1, 0)
        counts[bins + cell if value >= 0 else bins - 1 - cell] += 1
    return counts, width


def divergence(counts: np.ndarray, start: int, end: int, levels: int) -> float:
    """``KL(P || Q)`` of the window ``[start, end)``: P gets the outliers, Q is grouped and spread over P's cells."""
    inside, size = counts[start:end], end - start
    p = inside.copy()
    p[0] += counts[:start].sum()
    p[-1] += counts[end:].sum()
    q = np.zeros(size)
    for level in range(levels):
        group = slice(-(-level * size // levels), -(-(level + 1) * size // levels))
        nonzero = p[group] > 0
        if nonzero.any():
            q[group] = np.where(nonzero, inside[group].sum() / nonzero.sum(), 0.0)
    if q.sum() == 0 or (q[p > 0] == 0).any():
        return math.inf
    p, q = p / p.sum(), q / q.sum()
    return float((p[p > 0] * np.log(p[p > 0] / q[p > 0])).sum())


def symmetric_threshold(x: np.ndarray, bins: int, levels: int) -> float:
    """The talk's pseudocode, with the threshold never beyond the data."""
    counts, width = cells_of(np.abs(x), bins)
    sizes = range(levels, bins + 1)
    found = {size: divergence(counts[bins:], 0, size, levels) for size in sizes}
    best = min(found.values())
    size = max(size for size, value in found.items() if value <= max(best, 1e-9) * (1 + 1e-9))
    return min((size + 0.5) * width, float(np.abs(x).max()))


def samples(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).laplace(0.0, 1.0, count).astype(np.float32)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("bits", "bins"), [(2, 16), (3, 64), (4, 128), (5, 64)])
def test_symmetric_ranges_are_those_of_the_pseudocode(bits: int, bins: int, seed: int) -> None:
    scheme = QuantizeScheme(bit_width=bits)
    data = [samples(700, seed), samples(300, seed + 10) * 2]
    observer = KLObserver(scheme, bins=bins)
    for x in data:
        observer(torch.from_numpy(x))
    expected = symmetric_threshold(np.concatenate(data), bins, 2 ** (bits - 1))
    assert max(-observer.min_val, observer.max_val) == pytest.approx(expected, rel=1e-6)
    assert observer.min_val >= min(x.min() for x in data)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("one_sided", [False, True])
def test_asymmetric_windows_keep_the_proportion_of_the_ends(one_sided: bool, seed: int) -> None:
    scheme, bins, levels = QuantizeScheme(bit_width=3, signed=False, symmetric=False), 64, 8
    x = np.random.default_rng(seed).gumbel(0.5, 1.0, 2000).astype(np.float32)
    x = x.clip(0.0) if one_sided else x
    observer = KLObserver(scheme, bins=bins)
    observer(torch.from_numpy(x))
    counts, width = cells_of(x, bins)
    low, high = min(float(x.min()), 0.0), float(x.max())
    windows = []
    for size in range(1, bins + 1):
        below, above = (math.ceil(size * end / (width * bins)) for end in (-low, high))
        if below + above >= levels:
            windows.append((divergence(counts, bins - below, bins + above, levels), below, above))
    _, below, above = min(windows, key=lambda window: (window[0], -window[1] - window[2]))
    assert float(observer.min_val) == pytest.approx(max(low, -(below + 0.5) * width), rel=1e-6)
    assert float(observer.max_val) == pytest.approx(min(high, (above + 0.5) * width), rel=1e-6)
    assert float(observer.max_val) < high


def test_eight_bits_and_the_default_bins() -> None:
    """A normal distribution and a far outlier: only the outlier is clipped."""
    x = np.random.default_rng(0).normal(0.0, 1.0, 20_000).astype(np.float32)
    x[0] = 20.0
    observer = KLObserver(QuantizeScheme())
    observer(torch.from_numpy(x))
    assert observer.max_val == pytest.approx(symmetric_threshold(x, 2048, 128), rel=1e-6)
    assert 2.0 < observer.max_val < 5.0


def test_channels_are_chosen_apart() -> None:
    x = np.stack([samples(800, seed) * 10.0**seed for seed in range(5)])
    observer = KLObserver(QuantizeScheme(bit_width=4, per_channel=True), 0, 5, bins=256)
    observer(torch.from_numpy(x))
    for channel in range(5):
        assert max(-observer.min_val[channel], observer.max_val[channel]) == pytest.approx(
            symmetric_threshold(x[channel], 256, 8), rel=1e-6
        )
    assert len(set(observer.max_val.tolist())) == 5


@pytest.mark.parametrize(("bits", "symmetric", "enough"), [(8, True, 256), (8, False, 512), (11, True, 2048)])
def test_bins_that_are_too_few_are_named(bits: int, symmetric: bool, enough: int) -> None:
    scheme = QuantizeScheme(bit_width=bits, symmetric=symmetric)
    with pytest.raises(ConfigError, match=f"at least {enough} bins, got bins={enough // 2}"):
        KLObserver(scheme, bins=enough // 2)
    assert KLObserver(scheme, bins=enough).levels == enough // 2

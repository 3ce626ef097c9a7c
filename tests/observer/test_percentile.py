"""Percentile against numpy's in float64."""

import numpy as np
import pytest
import torch

from fxqat.errors import ConfigError
from fxqat.observer.percentile import PercentileObserver
from fxqat.scheme import QuantizeScheme

UINT8 = QuantizeScheme(signed=False, symmetric=False)


def skewed(seed: int, *shape: int) -> np.ndarray:
    """A short tail on the left, a long one on the right."""
    return np.random.default_rng(seed).gumbel(0.5, 2.0, shape).astype(np.float32)


@pytest.mark.parametrize("p", [50.5, 75.0, 99.0, 99.9, 99.99, 100.0])
@pytest.mark.parametrize("count", [1, 2, 5, 101, 12345])
def test_one_batch_per_tensor(p: float, count: int) -> None:
    x = skewed(count, count)
    observer = PercentileObserver(UINT8, percentile=p)
    observer(torch.from_numpy(x))
    low, high = np.percentile(x.astype(np.float64), [100 - p, p])
    assert float(observer.min_val) == pytest.approx(low, rel=1e-5, abs=1e-6)
    assert float(observer.max_val) == pytest.approx(high, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_channels_have_percentiles_of_their_own(axis: int) -> None:
    x = skewed(0, 4, 40, 30)
    observer = PercentileObserver(QuantizeScheme(per_channel=True), axis, x.shape[axis], percentile=90.0)
    observer(torch.from_numpy(x))
    rows = np.moveaxis(x.astype(np.float64), axis, 0).reshape(x.shape[axis], -1)
    low, high = np.percentile(rows, [10, 90], axis=1)
    np.testing.assert_allclose(observer.min_val.numpy(), low, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(observer.max_val.numpy(), high, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ratio", [None, 0.9, 0.5])
def test_batches_are_averaged_or_united(ratio: float | None) -> None:
    data = [skewed(seed, 1000) * (seed + 1) for seed in range(4)]
    observer = PercentileObserver(UINT8, percentile=99.0, ema_ratio=ratio)
    for x in data:
        observer(torch.from_numpy(x))
    ends = np.array([np.percentile(x.astype(np.float64), [1, 99]) for x in data])
    low, high = ends[0] if ratio is not None else (ends[:, 0].min(), ends[:, 1].max())
    for batch_low, batch_high in ends[1:] if ratio is not None else ():
        low, high = ratio * low + (1 - ratio) * batch_low, ratio * high + (1 - ratio) * batch_high
    assert float(observer.min_val) == pytest.approx(low, rel=1e-5)
    assert float(observer.max_val) == pytest.approx(high, rel=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("axis", [None, 0])
def test_a_value_that_is_not_finite_is_seen_in_the_tail(bad: float, axis: int | None) -> None:
    x = torch.from_numpy(skewed(0, 2, 5000))
    x[1, 77] = bad
    observer = PercentileObserver(QuantizeScheme(per_channel=axis is not None), axis, 2, percentile=90.0)
    observer(x)
    observer(torch.ones(2, 3))
    assert observer.has_seen_data()
    assert not observer.is_finite()


def test_a_large_tensor_is_sampled() -> None:
    x = torch.randn(300_000, generator=torch.Generator().manual_seed(0))
    sampled, exact = (PercentileObserver(UINT8, percentile=99.0, max_samples=count) for count in (20_000, 10**6))
    sampled(x)
    exact(x)
    assert sampled.max_val == pytest.approx(2.3263, abs=0.06)
    assert exact.max_val == pytest.approx(2.3263, abs=0.02)
    assert sampled.max_val != exact.max_val


def test_more_values_than_torch_quantile_takes() -> None:
    # rolled, so that both tails come first: a search for the largest values is slowest in ascending data
    x = torch.arange(2**24 + 5, dtype=torch.float32).roll(20_000) / 2**24
    observer = PercentileObserver(UINT8, percentile=99.9, max_samples=2**25)
    observer(x)
    assert observer.max_val == pytest.approx(0.999, abs=1e-6)
    assert observer.min_val == pytest.approx(0.001, abs=1e-6)


@pytest.mark.parametrize(
    "arguments", [{"percentile": 50.0}, {"percentile": 101}, {"max_samples": 0}, {"ema_ratio": 1.5}], ids=str
)
def test_bad_arguments_are_named(arguments: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="Percentile") as caught:
        PercentileObserver(UINT8, **arguments)
    name, value = next(iter(arguments.items()))
    assert name in str(caught.value)
    assert str(value) in str(caught.value)

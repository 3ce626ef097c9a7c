"""ClipStd against its formula in float64."""

import numpy as np
import pytest
import torch

from fxqat.errors import ConfigError
from fxqat.observer.clip_std import ClipStdObserver
from fxqat.scheme import QuantizeScheme


@pytest.mark.parametrize("k", [0.5, 2.6, 1000.0])
@pytest.mark.parametrize("axis", [None, 0, -1])
def test_range_is_the_mean_and_k_deviations_within_the_data(k: float, axis: int | None) -> None:
    x = np.random.default_rng(0).gamma(2.0, 3.0, (3, 200, 3)).astype(np.float32) + 1.0
    observer = ClipStdObserver(QuantizeScheme(per_channel=axis is not None), axis, 3, std_scale=k)
    observer(torch.from_numpy(x))
    rows = x.astype(np.float64).reshape(1, -1) if axis is None else np.moveaxis(x.astype(np.float64), axis, 0)
    rows = rows.reshape(len(rows), -1)
    mean, std = rows.mean(1), rows.std(1)
    low, high = np.maximum(rows.min(1), mean - k * std), np.minimum(rows.max(1), mean + k * std)
    np.testing.assert_allclose(observer.min_val.reshape(-1), low, rtol=1e-5)
    np.testing.assert_allclose(observer.max_val.reshape(-1), high, rtol=1e-5)


def test_batches_are_averaged_unless_united() -> None:
    average, union = (
        ClipStdObserver(QuantizeScheme(), ema_ratio=0.75),
        ClipStdObserver(QuantizeScheme(), ema_ratio=None),
    )
    for observer in (average, union):
        observer(torch.tensor([-1.0, 1.0]))
        observer(torch.tensor([-5.0, 5.0]))
    assert (average.min_val, average.max_val) == (-2.0, 2.0)
    assert (union.min_val, union.max_val) == (-5.0, 5.0)


@pytest.mark.parametrize("value", [0.1, -1234.5678, 1e-20])
def test_a_constant_is_its_own_range(value: float) -> None:
    observer = ClipStdObserver(QuantizeScheme(), std_scale=0.001)
    observer(torch.full((1001,), value))
    assert observer.min_val == observer.max_val == torch.tensor(value)
    assert observer.has_seen_data()


@pytest.mark.parametrize("k", [0.0, -1.0, float("nan")])
def test_bad_k_is_named(k: float) -> None:
    with pytest.raises(ConfigError, match="ClipStd: std_scale") as caught:
        ClipStdObserver(QuantizeScheme(), std_scale=k)
    assert str(k) in str(caught.value)

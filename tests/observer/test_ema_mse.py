"""EMAMSE: MSE's range of each batch, averaged."""

import numpy as np
import pytest
import torch

from fxqat.errors import ConfigError
from fxqat.observer.ema_mse import EMAMSEObserver
from fxqat.observer.mse import MSEObserver
from fxqat.scheme import QuantizeScheme

INT4 = QuantizeScheme(bit_width=4)


def heavy_tails(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_t(3, shape).astype(np.float32)) * (seed + 1)


@pytest.mark.parametrize("ratio", [0.5, 0.9])
@pytest.mark.parametrize("axis", [None, 1])
def test_range_is_the_moving_average_of_the_best_ranges(ratio: float, axis: int | None) -> None:
    scheme = QuantizeScheme(bit_width=4, per_channel=axis is not None)
    observer = EMAMSEObserver(scheme, axis, 2, ema_ratio=ratio)
    low = high = None
    for batch in (heavy_tails(seed, 500, 2) for seed in range(4)):
        observer(batch)
        alone = MSEObserver(scheme, axis, 2)
        alone(batch)
        best = alone.min_val.double(), alone.max_val.double()
        low = best[0] if low is None else ratio * low + (1 - ratio) * best[0]
        high = best[1] if high is None else ratio * high + (1 - ratio) * best[1]
    torch.testing.assert_close(observer.min_val.double(), low, rtol=1e-6, atol=0)
    torch.testing.assert_close(observer.max_val.double(), high, rtol=1e-6, atol=0)


def test_arguments_of_the_search_are_passed_on() -> None:
    observer = EMAMSEObserver(INT4, p=1.0, num_candidates=10, max_samples=100)
    assert (observer.p, observer.num_candidates, observer.max_samples) == (1.0, 10, 100)
    assert observer.ema_ratio == 0.9
    with pytest.raises(ConfigError, match="EMAMSE.*p=-1"):
        EMAMSEObserver(INT4, p=-1.0)
    with pytest.raises(ConfigError, match="EMAMSE: ema_ratio"):
        EMAMSEObserver(INT4, ema_ratio=1.0)


def test_without_a_ratio_it_is_mse() -> None:
    average, union = EMAMSEObserver(INT4, ema_ratio=None), MSEObserver(INT4)
    for seed in range(3):
        average(heavy_tails(seed, 1000))
        union(heavy_tails(seed, 1000))
    assert torch.equal(average.min_val, union.min_val)
    assert torch.equal(average.max_val, union.max_val)

"""EMAMinMax against its formula in float64."""

import pytest
import torch

from fxqat.errors import ConfigError
from fxqat.observer.ema_min_max import EMAMinMaxObserver
from fxqat.scheme import QuantizeScheme


@pytest.mark.parametrize("ratio", [0.0, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("axis", [None, 0, -1])
def test_range_is_the_moving_average_of_batch_extremes(ratio: float, axis: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(3, 7, 3, generator=generator) * (i + 1) for i in range(6)]
    scheme = QuantizeScheme(per_channel=axis is not None)
    observer = EMAMinMaxObserver(scheme, axis, 3, ema_ratio=ratio)
    low = high = None
    for batch in batches:
        observer(batch)
        dims = (0, 1, 2) if axis is None else (1, 2) if axis == 0 else (0, 1)
        batch_low, batch_high = batch.double().amin(dims), batch.double().amax(dims)
        low = batch_low if low is None else ratio * low + (1 - ratio) * batch_low
        high = batch_high if high is None else ratio * high + (1 - ratio) * batch_high
    torch.testing.assert_close(observer.min_val.double(), low, rtol=1e-6, atol=0)
    torch.testing.assert_close(observer.max_val.double(), high, rtol=1e-6, atol=0)


def test_first_batch_sets_the_range_whatever_the_ratio() -> None:
    observer = EMAMinMaxObserver(QuantizeScheme(), ema_ratio=0.999)
    observer(torch.tensor([-2.0, 3.0]))
    assert (observer.min_val, observer.max_val) == (-2.0, 3.0)
    observer(torch.tensor([-2.0, 3.0]))
    assert observer.max_val == pytest.approx(3.0)


def test_an_outlier_moves_the_range_by_its_share_only() -> None:
    observer = EMAMinMaxObserver(QuantizeScheme(), ema_ratio=0.9)
    for _ in range(3):
        observer(torch.tensor([-1.0, 1.0]))
    observer(torch.tensor([-1.0, 101.0]))
    assert observer.max_val == pytest.approx(11.0, rel=1e-6)
    assert observer.min_val == pytest.approx(-1.0)


@pytest.mark.parametrize("ratio", [-0.1, 1.0, 2.0, float("nan")])
def test_bad_ratio_is_named(ratio: float) -> None:
    with pytest.raises(ConfigError, match="ema_ratio") as caught:
        EMAMinMaxObserver(QuantizeScheme(), ema_ratio=ratio)
    assert str(ratio) in str(caught.value)

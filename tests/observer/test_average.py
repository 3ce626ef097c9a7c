"""Average against the mean in float64."""

import pytest
import torch

from fxqat.errors import ConfigError
from fxqat.observer.average import AverageObserver
from fxqat.quantization.insert import build_fake_quant
from fxqat.scheme import QuantizeScheme, TensorQConfig


def batches(count: int = 7) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, 5, 3, generator=generator) * (i + 1) for i in range(count)]


@pytest.mark.parametrize("axis", [None, 0, -1])
def test_range_is_the_mean_of_batch_extremes(axis: int | None) -> None:
    observer = AverageObserver(QuantizeScheme(per_channel=axis is not None), axis, 3)
    for batch in batches():
        observer(batch)
    dims = (0, 1, 2) if axis is None else (1, 2) if axis == 0 else (0, 1)
    low = torch.stack([batch.double().amin(dims) for batch in batches()]).mean(0)
    high = torch.stack([batch.double().amax(dims) for batch in batches()]).mean(0)
    torch.testing.assert_close(observer.min_val.double(), low, rtol=1e-6, atol=0)
    torch.testing.assert_close(observer.max_val.double(), high, rtol=1e-6, atol=0)
    assert observer.count == 7


def test_the_order_of_the_batches_does_not_matter() -> None:
    forward, backward = AverageObserver(QuantizeScheme()), AverageObserver(QuantizeScheme())
    for batch, other in zip(batches(), reversed(batches()), strict=True):
        forward(batch)
        backward(other)
    torch.testing.assert_close(forward.min_val, backward.min_val, rtol=1e-6, atol=0)
    torch.testing.assert_close(forward.max_val, backward.max_val, rtol=1e-6, atol=0)


def test_a_batch_counts_once_however_large() -> None:
    observer = AverageObserver(QuantizeScheme())
    observer(torch.tensor([-1.0, 1.0]))
    observer(torch.linspace(-4.0, 3.0, 10_000))
    assert (observer.min_val, observer.max_val) == (-2.5, 2.0)


def test_it_has_no_ratio() -> None:
    with pytest.raises(ConfigError, match="Average.*ema_ratio"):
        build_fake_quant(TensorQConfig(QuantizeScheme(), "Average", observer_args={"ema_ratio": 0.5}), "act_fake_quant")
    assert AverageObserver(QuantizeScheme()).ema_ratio is None

"""The histogram: it counts as numpy does for all data at once, in any order of the batches."""

import math

import numpy as np
import pytest
import torch

from fxqat.errors import ConfigError
from fxqat.observer.histogram import HistogramObserver
from fxqat.observer.histogram_l2 import HistogramL2Observer
from fxqat.observer.kl import KLObserver
from fxqat.scheme import QuantizeScheme

INT4 = QuantizeScheme(bit_width=4)
PER_CHANNEL = QuantizeScheme(bit_width=4, per_channel=True)


def growing(seed: int = 0, count: int = 6) -> list[np.ndarray]:
    """Batches on a grid, so that many values are exactly on the edge of a cell, each wider than the one before."""
    rng = np.random.default_rng(seed)
    return [(rng.integers(-64, 65, (3, 40)) / 64 * 1.7**i * (i % 2 + 0.5)).astype(np.float32) for i in range(count)]


def counted(rows: np.ndarray, bins: int) -> np.ndarray:
    """Counts per row ``(rows, 2 * bins)`` in float64, for a limit known from the start."""
    table = []
    for row in rows.astype(np.float64):
        limit = 2.0 ** math.ceil(math.log2(np.abs(row).max()))
        edges = limit * np.arange(bins + 1) / bins
        # right-closed cells: numpy's are left-closed, so both are mirrored; zeros are on the right
        right = np.histogram(-row[row >= 0], -edges[::-1])[0][::-1]
        left = np.histogram(row[row < 0], -edges[::-1])[0]
        table.append(np.concatenate([left, right]))
    return np.array(table)


def watched(data: list[np.ndarray], axis: int | None = None, bins: int = 32) -> HistogramObserver:
    observer = HistogramL2Observer(INT4 if axis is None else PER_CHANNEL, axis, 3, bins=bins)
    for x in data:
        observer(torch.from_numpy(x))
    return observer


@pytest.mark.parametrize("bins", [2, 32, 1024])
@pytest.mark.parametrize("axis", [None, 0])
def test_counts_are_those_of_all_data_at_once(bins: int, axis: int | None) -> None:
    data = growing()
    everything = np.concatenate(data, 1)
    expected = counted(everything.reshape(1, -1) if axis is None else everything, bins)
    observer = watched(data, axis, bins)
    assert observer.histogram.sum() == everything.size
    np.testing.assert_array_equal(observer.histogram.numpy(), expected)


@pytest.mark.parametrize("axis", [None, 0])
def test_the_order_of_batches_does_not_matter(axis: int | None) -> None:
    data = growing(1)
    forward, backward = watched(data, axis), watched(data[::-1], axis)
    for key, value in forward.state_dict().items():
        assert torch.equal(value, backward.state_dict()[key]), key
    assert forward.highest.max() == max(x.max() for x in data)


def test_sampled_values_stand_for_the_others() -> None:
    observer = HistogramL2Observer(INT4, bins=2, max_samples=100)
    observer(torch.linspace(-1.0, 1.0, 1000))
    observer(torch.linspace(0.1, 0.2, 10))
    assert observer.histogram.sum().item() == pytest.approx(1010)
    assert observer.histogram[0].tolist() == pytest.approx([250, 250, 260, 250], abs=6)


def test_a_rare_large_value_of_a_large_tensor_is_counted_once() -> None:
    """Evenly spaced values would miss it, or count it for all between them."""
    for place in (0, 3333, 77_777):
        x = torch.linspace(-1.0, 1.0, 100_000)
        x[place] = 8.0
        observer = HistogramL2Observer(INT4, bins=8, max_samples=1000)
        observer(x)
        assert observer.histogram[0, -1] == 1.0
        assert observer.histogram.sum().item() == pytest.approx(100_000, rel=1e-4)


def test_more_values_in_a_cell_than_float32_counts_one_by_one() -> None:
    observer = HistogramL2Observer(INT4, bins=2)
    observer(torch.full((1000,), 0.75))
    observer.histogram[0, 3] = 2.0**25  # adding 1 to it changes nothing
    observer(torch.full((1000,), 0.75))
    assert observer.histogram[0].tolist() == [0, 0, 0, 2.0**25 + 1000]
    assert observer.max_val == 0.75


@pytest.mark.parametrize("kind", [HistogramL2Observer, KLObserver])
@pytest.mark.parametrize("arguments", [{"bins": 100}, {"bins": 1}, {"max_samples": 0}, {"max_samples": 2**24}], ids=str)
def test_bad_arguments_are_named(kind: type[HistogramObserver], arguments: dict[str, int]) -> None:
    name, value = next(iter(arguments.items()))
    with pytest.raises(ConfigError, match=f"{name} must be .*{value}") as caught:
        kind(INT4, **arguments)
    assert str(caught.value).startswith(kind(INT4).name)

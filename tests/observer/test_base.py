"""What all observers share: the empty range, per-channel ranges, odd inputs, and a state that can be saved."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fxqat.numerics import SCALE_MAX, SCALE_MIN, choose_qparams, min_max_of
from fxqat.observer.base import ObserverBase, samples_of, weighted_samples
from fxqat.observer.mse import MSEObserver
from fxqat.observer.observers import OBSERVERS
from fxqat.observer.power_of_two import PowerOfTwoObserver
from fxqat.scheme import QuantizeScheme

Build = Callable[..., ObserverBase]
PER_TENSOR = QuantizeScheme()
PER_CHANNEL = QuantizeScheme(per_channel=True)
UINT8 = QuantizeScheme(signed=False, symmetric=False)


def builder(name: str) -> Build:
    """The kind, with a scheme that it takes."""
    kind = OBSERVERS[name]

    def build(scheme: QuantizeScheme, *arguments: int) -> ObserverBase:
        return kind(replace(scheme, scale_bits=1) if issubclass(kind, PowerOfTwoObserver) else scheme, *arguments)

    return build


def kinds(*without: str) -> pytest.MarkDecorator:
    names = [name for name in OBSERVERS if name not in without]
    return pytest.mark.parametrize("kind", [builder(name) for name in names], ids=names)


KINDS = kinds()
COVERING = kinds("LSQ", "LSQPlus", "PoTFloor", "PoTMode")
"""Observers whose range is that of the data if there are no outliers."""


def batches(*shape: int, count: int = 4) -> list[torch.Tensor]:
    """Batches of growing spread."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) * (i + 1) + 0.3 for i in range(count)]


def watch(observer: ObserverBase, data: list[torch.Tensor]) -> ObserverBase:
    for x in data:
        observer(x)
    return observer


@KINDS
@pytest.mark.parametrize(
    "made", [(PER_TENSOR,), (UINT8,), (PER_CHANNEL, 1, 6)], ids=["per tensor", "asymmetric", "per channel"]
)
def test_after_a_reset_an_observer_is_as_new(kind: Build, made: tuple[Any, ...]) -> None:
    first, second = [x * 37.0 + 5.0 for x in batches(3, 6, 5)], batches(2, 6, 4)
    observer, fresh = kind(*made), kind(*made)
    watch(observer, [*first, torch.full((1, 6, 1), math.nan)])
    assert observer.has_seen_data()
    observer.reset()
    assert_same_state(observer, fresh)
    assert not observer.has_seen_data()
    assert_same_state(watch(observer, second), watch(fresh, second))
    assert observer.is_finite()


def assert_same_state(first: ObserverBase, second: ObserverBase) -> None:
    one, two = first.state_dict(), second.state_dict()
    assert list(one) == list(two)
    for key, value in one.items():
        assert torch.equal(value, two[key]), key


@KINDS
def test_a_new_observer_has_seen_nothing(kind: Build) -> None:
    observer = kind(PER_CHANNEL, 0, 3)
    assert observer.min_val.tolist() == [float("inf")] * 3
    assert observer.max_val.tolist() == [float("-inf")] * 3
    assert not observer.has_seen_data()
    assert not observer.is_finite()


@KINDS
def test_input_is_returned_unchanged_and_the_range_is_detached(kind: Build) -> None:
    observer = kind(PER_TENSOR)
    x = torch.randn(4, 5, requires_grad=True)
    assert observer(x) is x
    assert observer.has_seen_data()
    assert observer.is_finite()
    assert not observer.min_val.requires_grad


@KINDS
def test_an_empty_tensor_is_nothing_seen(kind: Build) -> None:
    observer = kind(PER_TENSOR)
    observer(torch.empty(0, 4))
    assert not observer.has_seen_data()
    only = watch(kind(PER_TENSOR), [torch.tensor([-1.0, 2.0]), torch.tensor([-3.0, 0.5])])
    watch(observer, [torch.tensor([-1.0, 2.0]), torch.empty(0, 4), torch.tensor([-3.0, 0.5])])
    assert observer.has_seen_data()
    assert_same_state(observer, only)


@KINDS
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_is_seen_and_never_forgotten(kind: Build, bad: float) -> None:
    observer = kind(PER_TENSOR)
    observer(torch.tensor([1.0, bad, -1.0]))
    observer(torch.tensor([1.0, 0.5, -1.0]))
    assert observer.has_seen_data()
    assert not observer.is_finite()


@KINDS
@pytest.mark.parametrize("axis", [1, -3])
def test_channels_are_watched_apart_on_any_spelling_of_the_axis(kind: Build, axis: int) -> None:
    x = (
        torch.randn(5, 3, 4, 2, generator=torch.Generator().manual_seed(0))
        * torch.tensor([1.0, 10.0, 0.1])[:, None, None]
    )
    observer = kind(PER_CHANNEL, axis, 3)
    observer(x)
    for channel in range(3):
        alone = kind(PER_TENSOR)
        alone(x[:, channel])
        torch.testing.assert_close(observer.min_val[channel], alone.min_val, rtol=1e-5, atol=0)
        torch.testing.assert_close(observer.max_val[channel], alone.max_val, rtol=1e-5, atol=0)


@KINDS
def test_an_all_zero_channel_gets_the_smallest_scale(kind: Build) -> None:
    observer = kind(PER_CHANNEL, 0, 2)
    observer(torch.stack([torch.zeros(8), torch.linspace(-1.0, 1.0, 8)]))
    scale, zero_point = choose_qparams(observer.min_val, observer.max_val, observer.scheme)
    assert observer.has_seen_data()
    assert -128 * SCALE_MIN <= observer.min_val[0] <= observer.max_val[0] <= 128 * SCALE_MIN
    assert scale[0] == SCALE_MIN
    assert 0.001 < scale[1] < 1.0
    assert zero_point.tolist() == [0.0, 0.0]


@COVERING
def test_few_values_are_covered(kind: Build) -> None:
    observer = kind(PER_CHANNEL, 0, 2)
    observer(torch.stack([torch.zeros(8), torch.linspace(-1.0, 1.0, 8)]))
    scale, _ = choose_qparams(observer.min_val, observer.max_val, PER_CHANNEL)
    assert (observer.min_val[0], observer.max_val[0]) == (0.0, 0.0)
    assert scale[1] == pytest.approx(1 / 127, rel=0.05)


@KINDS
@pytest.mark.parametrize("value", [5.0, -5.0, 0.0, 1e-30, 1e30])
@pytest.mark.parametrize("scheme", [PER_TENSOR, UINT8], ids=str)
def test_a_constant_gives_valid_parameters(kind: Build, value: float, scheme: QuantizeScheme) -> None:
    observer = watch(kind(scheme), [torch.full((3, 3), value)] * 2)
    scale, zero_point = choose_qparams(observer.min_val, observer.max_val, observer.scheme)
    assert observer.has_seen_data()
    assert observer.is_finite()
    assert SCALE_MIN <= scale <= SCALE_MAX
    assert scheme.quant_min <= zero_point <= scheme.quant_max


@COVERING
@pytest.mark.parametrize("value", [5.0, -5.0])
def test_a_single_value_can_be_represented(kind: Build, value: float) -> None:
    observer = kind(UINT8)
    observer(torch.full((3, 3), value))
    scale, zero_point = choose_qparams(observer.min_val, observer.max_val, UINT8)
    assert scale == pytest.approx(5 / 255, rel=1e-6)
    assert zero_point == (0.0 if value > 0 else 255.0)


@KINDS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_types_are_watched_in_float32(kind: Build, dtype: torch.dtype) -> None:
    observer, same = kind(PER_TENSOR), kind(PER_TENSOR)
    x = torch.randn(64, generator=torch.Generator().manual_seed(0)).to(dtype)
    observer(x)
    same(x.float())
    assert observer.min_val.dtype == torch.float32
    assert torch.equal(observer.min_val, same.min_val)
    assert torch.equal(observer.max_val, same.max_val)


@KINDS
def test_calibration_goes_on_from_a_state_dict(kind: Build) -> None:
    data = batches(2, 50)
    first, second, whole = (kind(PER_CHANNEL, 0, 2) for _ in range(3))
    watch(first, data[:2])
    second.load_state_dict(first.state_dict(), strict=True)
    assert_same_state(second, first)
    assert second.has_seen_data()
    assert_same_state(watch(second, data[2:]), watch(whole, data))


@KINDS
def test_a_copy_has_a_state_of_its_own(kind: Build) -> None:
    data = batches(40)
    observer = watch(kind(UINT8), data[:2])
    copied, before = copy.deepcopy(observer), copy.deepcopy(observer.state_dict())
    watch(copied, data[2:])
    assert not torch.equal(copied.max_val, observer.max_val)
    for key, value in observer.state_dict().items():
        assert torch.equal(value, before[key])
    assert_same_state(watch(observer, data[2:]), copied)


@KINDS
@pytest.mark.parametrize(("axis", "scheme"), [(None, PER_TENSOR), (None, UINT8), (0, PER_CHANNEL)], ids=str)
def test_watching_reads_no_number_back(kind: Build, axis: int | None, scheme: QuantizeScheme) -> None:
    """Tensors on the meta device have no data: code that reads it, such as ``item`` or ``bool``, raises."""
    observer = kind(scheme, axis, 3).to("meta")
    if isinstance(observer, MSEObserver):
        observer.num_candidates = 2  # 40 of them run the same operators
    x = torch.randn(3, 20, device="meta")
    assert observer(x) is x
    assert observer.min_val.device.type == "meta"
    with pytest.raises(RuntimeError):
        observer.has_seen_data()


def test_without_a_process_group_ranks_are_not_asked() -> None:
    observer = ObserverBase(PER_TENSOR)
    observer(torch.tensor([-1.0, 2.0]))
    observer.reduce_over_ranks()
    assert (observer.min_val, observer.max_val) == (-1.0, 2.0)
    assert not torch.distributed.is_initialized()


def test_min_max_of_a_scalar_and_of_channels() -> None:
    assert [value.item() for value in min_max_of(torch.tensor(3.0), None)] == [3.0, 3.0]
    low, high = min_max_of(torch.tensor([[1.0, -2.0], [0.5, 7.0]]), -1)
    assert low.tolist() == [0.5, -2.0]
    assert high.tolist() == [1.0, 7.0]


def test_samples_are_spread_evenly_over_a_tensor() -> None:
    x = torch.arange(1000.0).reshape(10, 100)
    assert samples_of(x, None, 250).tolist() == [list(range(0, 1000, 4))]
    assert samples_of(x, None, 2000).shape == (1, 1000)
    assert samples_of(x, 1, 3).shape == (100, 10)


@pytest.mark.parametrize("size", [20_000, 20_999, 1_000_001])
def test_weighted_samples_stand_for_all_values(size: int) -> None:
    x = torch.randn(size, generator=torch.Generator().manual_seed(0)).clamp(max=0.5)
    values, weights = (found[0] for found in weighted_samples(x, None, 5000))
    assert weights.sum().item() == pytest.approx(size)
    for condition in (lambda v: v == 0.5, lambda v: v < 0.0, lambda v: v.abs() < 0.3):
        assert weights[condition(values)].sum().item() == pytest.approx(condition(x).sum().item(), rel=0.05)
    smallest = x.sort().values[:100]
    assert torch.isin(smallest, values[weights == 1.0]).float().mean() > 0.95
    assert smallest[0] == values.min()


def test_few_values_are_all_taken() -> None:
    x = torch.randn(1000)
    for axis in (None, 0):
        values, weights = weighted_samples(x if axis is None else x.reshape(10, 100), axis, 501 if axis is None else 5)
        assert weights is None
        assert values.flatten().tolist() == x.tolist()
    assert weighted_samples(x, None, 1)[0].isfinite().all()


AVERAGING = [name for name in OBSERVERS if watch(builder(name)(UINT8), batches(50, count=1)).this_pass]


def test_the_moving_averages_are_found() -> None:
    assert {"EMAMinMax", "Average", "Percentile", "EMAMSE", "ClipStd", "LSQPlus"} <= {*AVERAGING}
    assert not {"MinMax", "MSE", "KL", "HistogramL2"} & {*AVERAGING}


@pytest.mark.parametrize("name", AVERAGING)
@pytest.mark.parametrize("made", [(UINT8,), (PER_CHANNEL, 1, 6)], ids=["per tensor", "per channel"])
def test_values_of_one_pass_are_united_and_passes_are_averaged(name: str, made: tuple[Any, ...]) -> None:
    passes = [batches(3, 6, 50, count=3) for _ in range(2)]
    passes[1] = [x * 0.5 for x in passes[1]]
    together, united = builder(name)(*made), builder(name)(*made)
    for values in passes:
        for i, x in enumerate(values):
            together(x, same_pass=i > 0)
        ranges = [united.range_of(x) for x in values]
        low, high = (torch.stack(ends) for ends in zip(*ranges, strict=True))
        merged = united.merge(low.amin(0), high.amax(0))
        united.min_val.copy_(merged[0])
        united.max_val.copy_(merged[1])
        torch.testing.assert_close(together.min_val, united.min_val)
        torch.testing.assert_close(together.max_val, united.max_val)
    apart = watch(builder(name)(*made), [x for values in passes for x in values])
    assert (apart.max_val - together.max_val).abs().max() > 0.05


def test_a_pass_whose_first_value_is_empty_starts_with_the_second() -> None:
    observer = builder("EMAMinMax")(UINT8)
    observer(torch.zeros(0))
    observer(torch.tensor([-2.0, 3.0]), same_pass=True)
    assert (observer.min_val, observer.max_val) == (-2.0, 3.0)

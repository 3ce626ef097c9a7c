"""What all observers share: the empty range, per-channel ranges, odd inputs."""

import pytest
import torch

from fxqat.fake_quantize.functional import SCALE_MIN, choose_qparams
from fxqat.observer.base import ObserverBase, min_max_of
from fxqat.observer.table import OBSERVERS
from fxqat.scheme import QuantizeScheme

PER_TENSOR = QuantizeScheme()
PER_CHANNEL = QuantizeScheme(per_channel=True)
KINDS = pytest.mark.parametrize("kind", OBSERVERS.values(), ids=list(OBSERVERS))


@KINDS
def test_a_new_observer_has_seen_nothing(kind: type[ObserverBase]) -> None:
    observer = kind(PER_CHANNEL, 0, 3)
    assert observer.min_val.tolist() == [float("inf")] * 3
    assert observer.max_val.tolist() == [float("-inf")] * 3
    assert not observer.has_seen_data()
    assert not observer.is_finite()


@KINDS
def test_input_is_returned_unchanged_and_the_range_is_detached(kind: type[ObserverBase]) -> None:
    observer = kind(PER_TENSOR)
    x = torch.randn(4, 5, requires_grad=True)
    assert observer(x) is x
    assert observer.has_seen_data()
    assert observer.is_finite()
    assert not observer.min_val.requires_grad


@KINDS
def test_an_empty_tensor_is_nothing_seen(kind: type[ObserverBase]) -> None:
    observer = kind(PER_TENSOR)
    observer(torch.empty(0, 4))
    assert not observer.has_seen_data()
    observer(torch.tensor([-1.0, 2.0]))
    observer(torch.empty(0, 4))
    assert observer.has_seen_data()
    assert observer.max_val == pytest.approx(2.0, abs=0.3)


@KINDS
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_is_seen_and_never_forgotten(kind: type[ObserverBase], bad: float) -> None:
    observer = kind(PER_TENSOR)
    observer(torch.tensor([1.0, bad, -1.0]))
    observer(torch.tensor([1.0, 0.5, -1.0]))
    assert observer.has_seen_data()
    assert not observer.is_finite()


@KINDS
@pytest.mark.parametrize("axis", [1, -3])
def test_channels_are_watched_apart_on_any_spelling_of_the_axis(kind: type[ObserverBase], axis: int) -> None:
    x = (
        torch.randn(5, 3, 4, 2, generator=torch.Generator().manual_seed(0))
        * torch.tensor([1.0, 10.0, 0.1])[:, None, None]
    )
    observer = kind(PER_CHANNEL, axis, 3)
    observer(x)
    for channel in range(3):
        alone = kind(PER_TENSOR)
        alone(x[:, channel])
        assert observer.min_val[channel] == alone.min_val
        assert observer.max_val[channel] == alone.max_val


@KINDS
def test_an_all_zero_channel_gets_the_smallest_scale(kind: type[ObserverBase]) -> None:
    observer = kind(PER_CHANNEL, 0, 2)
    observer(torch.stack([torch.zeros(8), torch.linspace(-1.0, 1.0, 8)]))
    scale, zero_point = choose_qparams(observer.min_val, observer.max_val, PER_CHANNEL)
    assert (observer.min_val[0], observer.max_val[0]) == (0.0, 0.0)
    assert scale[0] == SCALE_MIN
    assert scale[1] == pytest.approx(1 / 127, rel=0.05)
    assert zero_point.tolist() == [0.0, 0.0]


@KINDS
@pytest.mark.parametrize("value", [5.0, -5.0])
def test_a_single_value_can_be_represented(kind: type[ObserverBase], value: float) -> None:
    scheme = QuantizeScheme(signed=False, symmetric=False)
    observer = kind(scheme)
    observer(torch.full((3, 3), value))
    scale, zero_point = choose_qparams(observer.min_val, observer.max_val, scheme)
    assert scale == pytest.approx(5 / 255, rel=1e-6)
    assert zero_point == (0.0 if value > 0 else 255.0)


@KINDS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_types_are_watched_in_float32(kind: type[ObserverBase], dtype: torch.dtype) -> None:
    observer, same = kind(PER_TENSOR), kind(PER_TENSOR)
    x = torch.randn(64, generator=torch.Generator().manual_seed(0)).to(dtype)
    observer(x)
    same(x.float())
    assert observer.min_val.dtype == torch.float32
    assert torch.equal(observer.min_val, same.min_val)
    assert torch.equal(observer.max_val, same.max_val)


@KINDS
def test_the_range_travels_with_the_state_dict(kind: type[ObserverBase]) -> None:
    first, second = kind(PER_CHANNEL, 0, 2), kind(PER_CHANNEL, 0, 2)
    first(torch.tensor([[1.0, -2.0], [3.0, 4.0]]))
    second.load_state_dict(first.state_dict(), strict=True)
    assert torch.equal(second.min_val, first.min_val)
    assert torch.equal(second.max_val, first.max_val)
    assert second.has_seen_data()


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

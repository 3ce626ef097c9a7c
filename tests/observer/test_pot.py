"""PoTFloor and PoTMode: the chosen scale is the scale in use."""

import math
from collections import Counter

import numpy as np
import pytest
import torch

from fxqat.errors import ConfigError
from fxqat.numerics import SCALE_MIN, choose_qparams
from fxqat.observer.base import ObserverBase
from fxqat.observer.pot_floor import PoTFloorObserver
from fxqat.observer.pot_mode import PoTModeObserver
from fxqat.scheme import QuantizeScheme

SCHEMES = pytest.mark.parametrize(
    "scheme",
    [
        QuantizeScheme(scale_bits=1),
        QuantizeScheme(scale_bits=1, bit_width=4, narrow_range=True),
        QuantizeScheme(scale_bits=1, signed=False, symmetric=False),
        QuantizeScheme(scale_bits=1, signed=True, symmetric=False, bit_width=3),
        QuantizeScheme(scale_bits=1, signed=False, symmetric=False, bit_width=16),
    ],
    ids=str,
)


def batches(count: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [(rng.normal(0.3, 1.0, 50) * 4.0 ** rng.normal()).astype(np.float32) for _ in range(count)]


def exact_qparams(low: float, high: float, scheme: QuantizeScheme) -> tuple[float, int]:
    """The scale that covers a range exactly, and its zero point, in float64."""
    low, high = min(low, 0.0), max(high, 0.0)
    if scheme.symmetric:
        return max(-low, high) / scheme.quant_max, 0
    scale = (high - low) / (scheme.quant_max - scheme.quant_min)
    return scale, scheme.quant_min - round(low / scale)


def used(observer: ObserverBase) -> tuple[float, float]:
    scale, zero_point = choose_qparams(observer.min_val, observer.max_val, observer.scheme)
    return scale.item(), zero_point.item()


@SCHEMES
@pytest.mark.parametrize("seed", range(8))
def test_floor_is_the_power_of_two_below_the_scale_of_all_data(scheme: QuantizeScheme, seed: int) -> None:
    observer = PoTFloorObserver(scheme)
    data = batches(3, seed)
    for x in data:
        observer(torch.from_numpy(x))
    everything = np.concatenate(data).astype(np.float64)
    scale, zero_point = exact_qparams(everything.min(), everything.max(), scheme)
    assert used(observer) == (2.0 ** math.floor(math.log2(scale)), zero_point)
    assert observer.min_val <= 0.0 <= observer.max_val


@pytest.mark.parametrize("exponent", [-30, -7, 0, 5, 30])
def test_floor_keeps_a_scale_that_is_a_power_of_two(exponent: int) -> None:
    observer = PoTFloorObserver(QuantizeScheme(scale_bits=1))
    observer(torch.tensor([0.0, 127.0]) * 2.0**exponent)
    assert used(observer) == (2.0**exponent, 0.0)
    assert observer.max_val == 127.0 * 2.0**exponent


@SCHEMES
@pytest.mark.parametrize("seed", range(4))
def test_mode_is_the_most_frequent_power_of_two_above(scheme: QuantizeScheme, seed: int) -> None:
    observer = PoTModeObserver(scheme)
    data = batches(20, seed)
    for x in data:
        observer(torch.from_numpy(x))
    scales = [exact_qparams(float(x.min()), float(x.max()), scheme)[0] for x in data]
    votes = Counter(math.ceil(math.log2(scale)) for scale in scales)
    most = max(votes.values())
    winner = max(exponent for exponent, count in votes.items() if count == most)
    everything = np.concatenate(data).astype(np.float64)
    assert used(observer) == (2.0**winner, exact_qparams(everything.min(), everything.max(), scheme)[1])
    assert observer.votes.sum() == 20


def test_an_outlier_has_one_vote() -> None:
    observer = PoTModeObserver(QuantizeScheme(scale_bits=1))
    for high in (0.9, 1000.0, 0.85, 0.8):
        observer(torch.tensor([-0.5, high]))
    assert used(observer) == (2.0**-7, 0.0)
    observer(torch.tensor([1000.0]))
    assert used(observer) == (2.0**-7, 0.0)
    observer(torch.tensor([1000.0]))
    assert used(observer) == (2.0**3, 0.0), "of equally frequent scales the largest"


@pytest.mark.parametrize("kind", [PoTFloorObserver, PoTModeObserver])
def test_channels_have_exponents_of_their_own(kind: type[ObserverBase]) -> None:
    observer = kind(QuantizeScheme(scale_bits=1, per_channel=True), 1, 4)
    for factor in (1.0, 1.01):
        observer(torch.tensor([[0.0, 100.0, 1.0, 60.0], [0.0, -1.0, -3.0, 70.0]]) * factor)
    scale, zero_point = choose_qparams(observer.min_val, observer.max_val, observer.scheme)
    assert not zero_point.any()
    above = 1 if kind is PoTModeObserver else 0
    assert scale.tolist() == [SCALE_MIN, 2.0 ** (-1 + above), 2.0 ** (-6 + above), 2.0 ** (-1 + above)]


@pytest.mark.parametrize("kind", [PoTFloorObserver, PoTModeObserver])
@pytest.mark.parametrize("bits", [2, 24])
def test_other_scales_are_refused(kind: type[ObserverBase], bits: int) -> None:
    with pytest.raises(ConfigError, match=f"PoT.*scale_bits={bits}.*pot_scale"):
        kind(QuantizeScheme(scale_bits=bits))
    assert kind(QuantizeScheme(scale_bits=1)).scheme.scale_bits == 1

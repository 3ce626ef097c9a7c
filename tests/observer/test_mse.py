"""MSE: it finds the range of least error."""

import numpy as np
import pytest
import torch

from fxqat.errors import ConfigError
from fxqat.numerics import choose_qparams, fake_quantize
from fxqat.observer.base import ObserverBase
from fxqat.observer.min_max import MinMaxObserver
from fxqat.observer.mse import MSEObserver
from fxqat.scheme import QuantizeScheme


def heavy_tails(count: int = 20000, seed: int = 0) -> torch.Tensor:
    """Values of Student's distribution with 3 degrees of freedom."""
    return torch.from_numpy(np.random.default_rng(seed).standard_t(3, count).astype(np.float32))


def error(x: torch.Tensor, low: torch.Tensor, high: torch.Tensor, scheme: QuantizeScheme, p: float = 2.0) -> float:
    """Mean quantization error of a range, in float64."""
    scale, zero_point = choose_qparams(low, high, scheme)
    x_hat = fake_quantize(x, scale, zero_point, scheme.quant_min, scheme.quant_max)
    return float((x_hat.double() - x.double()).abs().pow(p).mean())


def observed_error(observer: ObserverBase, x: torch.Tensor, p: float = 2.0) -> float:
    """Mean quantization error of the range that an observer chooses for ``x``."""
    observer(x)
    return error(x, observer.min_val, observer.max_val, observer.scheme, p)


@pytest.mark.parametrize(("bits", "gain"), [(2, 2.5), (4, 4.0), (6, 1.5), (8, 1.03)])
@pytest.mark.parametrize("signed", [True, False])
def test_heavy_tails_are_cut_where_it_pays(bits: int, gain: float, signed: bool) -> None:
    scheme = QuantizeScheme(bit_width=bits, signed=signed, symmetric=signed)
    x = heavy_tails()
    mse, min_max = MSEObserver(scheme, p=2.0), MinMaxObserver(scheme)
    assert observed_error(mse, x) * gain < observed_error(min_max, x)
    assert mse.max_val < min_max.max_val


@pytest.mark.parametrize("candidates", [40, 10])
@pytest.mark.parametrize("p", [1.0, 2.0, 3.5])
def test_range_is_as_good_as_an_exhaustive_search(p: float, candidates: int) -> None:
    scheme = QuantizeScheme(bit_width=4)
    x = heavy_tails(4000)
    observer = MSEObserver(scheme, p=p, num_candidates=candidates)
    found = observed_error(observer, x, p)
    low, high = x.min(), x.max()
    best = min(error(x, low * ratio, high * ratio, scheme, p) for ratio in np.linspace(0.002, 1.0, 500).tolist())
    assert found <= best * 1.02
    assert found >= best * 0.98


def test_the_exponent_says_how_much_a_cut_outlier_costs() -> None:
    scheme = QuantizeScheme(bit_width=4)
    highs = []
    for p in (1.0, 2.0, 4.0):
        observer = MSEObserver(scheme, p=p)
        observer(heavy_tails())
        highs.append(float(observer.max_val - observer.min_val))
    assert highs[0] < highs[1]
    assert highs[1] < highs[2]


def test_values_already_on_a_grid_keep_their_whole_range() -> None:
    scheme = QuantizeScheme(bit_width=4, narrow_range=True)
    x = torch.arange(-7, 8).float().repeat(10) * 0.25
    observer = MSEObserver(scheme)
    assert observed_error(observer, x) == 0.0
    assert (observer.min_val, observer.max_val) == (-1.75, 1.75)


def test_channels_are_searched_apart() -> None:
    scheme = QuantizeScheme(bit_width=4, per_channel=True)
    x = torch.stack([heavy_tails(2000, seed) * 10.0**seed for seed in range(4)], dim=1)
    observer = MSEObserver(scheme, 1, 4)
    observer(x)
    for channel in range(4):
        alone = MSEObserver(QuantizeScheme(bit_width=4))
        alone(x[:, channel])
        assert observer.min_val[channel] == alone.min_val
        assert observer.max_val[channel] == alone.max_val


def test_batches_are_united() -> None:
    scheme = QuantizeScheme(bit_width=4)
    first, second = heavy_tails(5000, 1), heavy_tails(5000, 2) * 0.5 + 3.0
    observer, one, two = MSEObserver(scheme), MSEObserver(scheme), MSEObserver(scheme)
    for x in (first, second):
        observer(x)
    one(first)
    two(second)
    assert observer.min_val == torch.minimum(one.min_val, two.min_val)
    assert observer.max_val == torch.maximum(one.max_val, two.max_val)


@pytest.mark.parametrize("ordered", [False, True])
def test_sampling_a_large_tensor_finds_nearly_the_same_range(ordered: bool) -> None:
    scheme = QuantizeScheme(bit_width=4)
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    x = x[x.abs().argsort()] if ordered else x
    exact, sampled = MSEObserver(scheme, max_samples=10**9), MSEObserver(scheme, max_samples=20_000)
    assert observed_error(sampled, x) <= 1.05 * observed_error(exact, x)
    assert sampled.max_val == pytest.approx(exact.max_val.item(), rel=0.3)


@pytest.mark.parametrize("place", [0, 1234])
def test_sixteen_bits_keep_what_the_evenly_spaced_values_miss(place: int) -> None:
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    x[place] = 30.0
    observer = MSEObserver(QuantizeScheme(bit_width=16), max_samples=20_000)
    observer(x)
    assert observer.max_val == 30.0
    assert observer.min_val == x.min()


@pytest.mark.parametrize(
    "arguments", [{"num_candidates": 1}, {"p": 0.0}, {"p": -1.0}, {"max_samples": 0}], ids=lambda a: next(iter(a))
)
def test_bad_arguments_are_named(arguments: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="MSE") as caught:
        MSEObserver(QuantizeScheme(), **arguments)
    assert next(f"{name}={value}" for name, value in arguments.items()) in str(caught.value)


@pytest.mark.parametrize("seed", range(8))
def test_the_search_refines_the_best_of_equal_steps(seed: int) -> None:
    observer = MSEObserver(QuantizeScheme(bit_width=3), p=2.0, num_candidates=4)
    x = heavy_tails(40, seed)
    found = observed_error(observer, x)

    def of(ratio: float) -> float:
        return error(x, x.min() * ratio, x.max() * ratio, observer.scheme)

    best = min((0.25, 0.5, 0.75, 1.0), key=of)
    refined = [min(best + 0.25 * offset, 1.0) for offset in (-0.6, -0.4, -0.2, 0.0, 0.2, 0.4, 0.6)]
    assert found == pytest.approx(min(map(of, refined)), rel=1e-5)
    assert float(observer.max_val / x.max()) == pytest.approx(min(refined, key=of), rel=1e-5)


def test_two_candidates_are_enough() -> None:
    observer = MSEObserver(QuantizeScheme(bit_width=4), num_candidates=2)
    x = heavy_tails(1000)
    assert observed_error(observer, x) < observed_error(MinMaxObserver(observer.scheme), x)
    assert observer.num_candidates == 2

"""LSQ and LSQPlus: the first scales of the papers, in float64."""

import numpy as np
import pytest
import torch

from fxqat.numerics import choose_qparams
from fxqat.observer.base import ObserverBase
from fxqat.observer.lsq import LSQObserver
from fxqat.observer.lsq_plus import LSQPlusObserver
from fxqat.observer.mse import MSEObserver
from fxqat.scheme import QuantizeScheme
from tests.builders import calibrate, make_fake_quant


def values(*shape: int, low: float = -1.0, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).laplace(0.2, 1.0, shape).clip(low).astype(np.float32)


def qparams(observer: ObserverBase, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    observer(torch.from_numpy(x))
    scale, zero_point = choose_qparams(observer.min_val, observer.max_val, observer.scheme)
    return scale.numpy(), zero_point.numpy()


@pytest.mark.parametrize(
    ("scheme", "largest"),
    [
        (QuantizeScheme(), 127),
        (QuantizeScheme(bit_width=2), 1),
        (QuantizeScheme(bit_width=4, narrow_range=True), 7),
        (QuantizeScheme(bit_width=4, signed=False), 7),
    ],
    ids=str,
)
def test_lsq_symmetric(scheme: QuantizeScheme, largest: int) -> None:
    x = values(1000)
    scale, zero_point = qparams(LSQObserver(scheme), x)
    assert float(scale) == pytest.approx(2 * np.abs(x.astype(np.float64)).mean() / largest**0.5, rel=1e-6)
    assert zero_point == scheme.symmetric_zero_point


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("signed", [False, True])
def test_lsq_unsigned_activations_as_in_the_paper(bits: int, signed: bool) -> None:
    """Values without a sign use all integers of the type, also of a signed one."""
    x = values(1000, low=0.0)
    scheme = QuantizeScheme(bit_width=bits, signed=signed, symmetric=False)
    scale, zero_point = qparams(LSQObserver(scheme), x)
    assert float(scale) == pytest.approx(2 * x.astype(np.float64).mean() / (2**bits - 1) ** 0.5, rel=1e-5)
    assert zero_point == scheme.quant_min


def test_lsq_channels_and_batches() -> None:
    scheme = QuantizeScheme(bit_width=4, per_channel=True)
    first, second = values(3, 100), values(3, 100, seed=1) * 4
    observer = LSQObserver(scheme, 0, 3, ema_ratio=0.75)
    qparams(observer, first)
    scale, _ = qparams(observer, second)
    mean = 0.75 * np.abs(first.astype(np.float64)).mean(1) + 0.25 * np.abs(second.astype(np.float64)).mean(1)
    np.testing.assert_allclose(scale, 2 * mean / 7**0.5, rtol=1e-5)
    assert len(set(scale.tolist())) == 3


def test_a_learnable_fake_quant_starts_from_it() -> None:
    x = values(500)
    quant = calibrate(make_fake_quant(QuantizeScheme(bit_width=3), observer=LSQObserver), torch.from_numpy(x))
    assert quant.relative_scale.requires_grad
    assert quant.scale.item() == pytest.approx(2 * np.abs(x.astype(np.float64)).mean() / 3**0.5, rel=1e-6)


@pytest.mark.parametrize("axis", [None, 1])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_lsq_plus_weights(bits: int, axis: int | None) -> None:
    x = values(200, 3) - np.array([0.0, 2.0, -1.0], np.float32)
    scheme = QuantizeScheme(bit_width=bits, per_channel=axis is not None, narrow_range=True)
    scale, zero_point = qparams(LSQPlusObserver(scheme, axis, 3), x)
    rows = x.astype(np.float64).T if axis else x.astype(np.float64).reshape(1, -1)
    mean, std = rows.mean(1), rows.std(1)
    expected = np.maximum(np.abs(mean - 3 * std), np.abs(mean + 3 * std)) / 2 ** (bits - 1)
    np.testing.assert_allclose(scale.reshape(-1), expected, rtol=1e-5)
    assert not zero_point.any()


def test_lsq_plus_activations_start_at_the_least_squared_error() -> None:
    scheme = QuantizeScheme(bit_width=3, signed=False, symmetric=False)
    x = values(5000)
    plus, squares, other = LSQPlusObserver(scheme), MSEObserver(scheme, p=2.0), MSEObserver(scheme, p=4.0)
    found = qparams(plus, x)
    assert found == qparams(squares, x)
    assert found[0] < qparams(other, x)[0]

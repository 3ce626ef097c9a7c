"""The comparison of outputs: scale, direction, and values that must be at equal places."""

import json
import math
from dataclasses import asdict

import numpy as np
import pytest

from fxqat.onnx.output_parity import MAX_ERROR, OutputParity, compare

Y = np.random.default_rng(0).standard_normal((20, 30)).astype(np.float32)


def parity(found: np.ndarray, expected: np.ndarray) -> OutputParity:
    d = compare(found, expected)
    return OutputParity("y", d.error, d.mismatches, d.cosine, d.cosine, d.max_abs, None, None)


@pytest.mark.parametrize(("factor", "passed"), [(1.0, True), (1.013, True), (1.02, False), (3.0, False), (-1.0, False)])
def test_a_factor_is_seen(factor: float, passed: bool) -> None:
    found = parity(Y * np.float32(factor), Y)
    assert found.step_error == pytest.approx(abs(factor - 1), abs=1e-6)
    assert found.step_cosine == pytest.approx(math.copysign(1, factor))
    assert found.passed is passed


def test_the_limit_is_as_strict_as_a_cosine_of_9999() -> None:
    """The smallest cosine that an error of r allows is sqrt(1 - r^2), for a difference orthogonal to what was found."""
    assert math.sqrt(1 - MAX_ERROR**2) > 0.9999
    noise = np.random.default_rng(1).standard_normal(Y.shape)
    noise -= Y * (noise * Y).sum() / (Y * Y).sum()
    noise *= 0.0142 * np.linalg.norm(Y) / np.linalg.norm(noise)
    d = compare(Y + noise, Y)
    assert d.cosine > 0.9998
    assert not parity(Y + noise, Y).passed


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, np.finfo(np.float32).min])
def test_infinities_nan_and_masks_count_by_their_places(value: float) -> None:
    expected = Y.copy()
    expected[:, ::3] = value
    d = compare(expected.copy(), expected)
    assert (d.error, d.mismatches, d.max_abs) == (0.0, 0, 0.0)
    assert d.cosine == pytest.approx(1.0)
    moved = expected.copy()
    moved[0, :2] = moved[0, 1::-1]
    assert compare(moved, expected).mismatches == 2
    assert not parity(moved, expected).passed
    threefold = expected.copy()
    threefold[:, 1::3] *= 3
    assert not parity(threefold, expected).passed  # the other values count


def test_a_sign_of_infinity_is_a_mismatch() -> None:
    a, b = np.array([math.inf, 1.0]), np.array([-math.inf, 1.0])
    assert compare(a, b).mismatches == 1
    assert json.loads(json.dumps(asdict(parity(a, b))))["step_mismatches"] == 1


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, bool])
def test_integers_and_booleans_are_exact(dtype: type) -> None:
    expected = (np.arange(1000).reshape(10, 100) % 2).astype(dtype)
    assert parity(expected.copy(), expected).passed
    wrong = expected.copy()
    wrong[3, 3] = 1 - wrong[3, 3]
    found = parity(wrong, expected)
    assert found.step_mismatches == 1
    assert not found.passed


def test_integers_that_float64_does_not_tell_apart() -> None:
    assert compare(np.array([2**53 + 1]), np.array([2**53])).mismatches == 1


@pytest.mark.parametrize(("found", "expected", "result"), [(0, 0, (0, 1)), (1, 0, (1, 0)), (0, 1, (1, 0))])
def test_zeros_equal_zeros_only(found: float, expected: float, result: tuple[float, float]) -> None:
    d = compare(np.full(3, found, np.float32), np.full(3, expected, np.float32))
    assert (d.error, d.cosine) == result


def test_an_empty_output_agrees() -> None:
    assert parity(np.zeros((0, 3), np.float32), np.zeros((0, 3), np.float32)).passed

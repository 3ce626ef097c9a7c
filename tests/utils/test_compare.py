"""Comparisons of tensors against numpy in double precision."""

import math
from dataclasses import astuple

import numpy as np
import pytest
import torch

from fxqat.utils import compare
from fxqat.utils.compare import Comparison, decibels


def test_measures_follow_the_formulas():
    random = np.random.default_rng(0)
    pairs = [(random.normal(size=(2, 3, 5)), random.normal(size=(2, 3, 5))) for _ in range(3)]
    comparison = Comparison()
    for x, y in pairs:
        comparison.add(torch.tensor(x), torch.tensor(y))
    found = comparison.difference()
    x, y = (np.concatenate([pair[i].ravel() for pair in pairs]) for i in (0, 1))
    assert found.cosine == pytest.approx(x @ y / np.linalg.norm(x) / np.linalg.norm(y), abs=1e-12)
    assert found.sqnr == pytest.approx(10 * np.log10((x**2).sum() / ((x - y) ** 2).sum()), abs=1e-9)
    assert found.max_error == pytest.approx(np.abs(x - y).max())


@pytest.mark.parametrize(
    ("x", "y", "cosine", "sqnr"),
    [
        ([1.0, 2.0], [1.0, 2.0], 1.0, 120.0),
        ([1.0, 2.0], [0.0, 0.0], 0.0, 0.0),
        ([0.0, 0.0], [0.0, 0.0], 1.0, 120.0),
        ([0.0, 0.0], [1.0, 0.0], 0.0, -120.0),
        ([1.0, 0.0], [-1.0, 0.0], -1.0, 10 * math.log10(1 / 4)),
    ],
    ids=["exact", "gone", "zeros", "from nothing", "turned round"],
)
def test_extreme_values(x, y, cosine, sqnr):
    comparison = Comparison()
    comparison.add(torch.tensor(x), torch.tensor(y))
    found = comparison.difference()
    assert found.cosine == pytest.approx(cosine, abs=1e-7)
    assert found.sqnr == pytest.approx(sqnr, abs=1e-6)


def test_values_that_are_not_finite():
    comparison = Comparison()
    comparison.add(torch.tensor([3.0, 4.0, math.nan, -math.inf]), torch.tensor([3.0, 4.5, 1.0, math.nan]))
    found = comparison.difference()
    assert found.sqnr == pytest.approx(20.0)
    assert found.max_error == 0.5
    comparison.add(torch.ones(1), torch.tensor([math.inf]))
    assert comparison.difference().sqnr == -120
    assert comparison.difference().cosine < 0.3


def test_channels_that_are_dead_and_lost():
    torch.manual_seed(0)
    x = torch.randn(4, 6, 6) * torch.tensor([1.0, 0.01, 7.0, 300.0, 1.0, 0.0])[:, None]  # (batch, channels, values)
    x[:, 2] = 7.0  # constant, but not dead: the next layer may need it
    found = x.clone()
    found[:, 1] = 0.0  # all of it rounded away
    found[:, 2] += 1.0  # constant before and after
    found[:, 3] += 1.0  # a shift loses no information
    comparison = Comparison(axis=1)
    for part, other in zip(x.split(1), found.split(1), strict=True):
        comparison.add(part, other)
    channels = comparison.channels()
    assert (channels.count, channels.dead, channels.lost) == (6, (5,), (1,))
    assert channels.lost_share == 1 / 5
    assert channels.ranges == pytest.approx([float(x[:, c].abs().max()) for c in range(6)])
    assert channels.widest == int(x.abs().amax((0, 2)).argmax())
    assert channels.outlier == pytest.approx(max(channels.ranges) / sorted(channels.ranges)[3])


@pytest.mark.parametrize(("shape", "axis"), [((3, 4, 5, 5), 1), ((3, 5, 4), -1), ((4, 3, 5), 0), ((300,), None)])
def test_the_size_of_the_blocks_changes_no_result(shape, axis, monkeypatch):
    torch.manual_seed(0)
    x = torch.randn(shape)
    y = x + 0.1 * torch.randn(shape)
    results = []
    for block in (2**16, 7):
        monkeypatch.setattr(compare, "CPU_BLOCK", block)
        comparison = Comparison(axis)
        comparison.add(x, y)
        results.append(comparison)
    whole, parts = (result.difference() for result in results)
    assert astuple(whole) == pytest.approx(astuple(parts))
    assert results[0].channels() == results[1].channels()
    ranges = (x[None] if axis is None else x.movedim(axis, 0).flatten(1)).abs().amax(1)
    assert results[0].channels().ranges == pytest.approx(ranges.tolist())


def test_nothing_compared_is_an_error():
    with pytest.raises(ValueError, match="no tensors"):
        Comparison().difference()
    with pytest.raises(ValueError, match="no tensors"):
        Comparison().channels()


def test_decibels():
    assert decibels(100.0, 1.0) == pytest.approx(20.0)
    assert decibels(1.0, 0.0) == 120.0
    assert decibels(0.0, 1.0) == -120.0

"""The growth of a weight: torch's operators against formulas, the compiled kernels against torch (the same bits)."""

from __future__ import annotations

import math

import pytest
import torch

from fxqat.fake_quantize import kernels
from fxqat.fake_quantize.following import growth
from tests.fake_quantize.test_kernels import (
    PLACES,
    channel_values,
    hard_values,
    needs_kernels,
    same_bits,
    torch_operators,
)

SMALLEST = 1e-3

Found = tuple[torch.Tensor, torch.Tensor]
"""The ratio, and the new magnitude."""


def grown(weight: torch.Tensor, factor: torch.Tensor | None, before: torch.Tensor, axis: int | None) -> Found:
    magnitude = before.clone()
    return growth(weight, factor, magnitude, axis, SMALLEST), magnitude


def by_torch(weight: torch.Tensor, factor: torch.Tensor | None, before: torch.Tensor, axis: int | None) -> Found:
    with torch_operators():
        return grown(weight, factor, before, axis)


def factor_of(channels: int, seed: int = 5) -> torch.Tensor:
    """Of both signs; zeros in every third channel from the second on."""
    factor = channel_values(channels, -2.0, 2.0, seed)
    factor[1::3] = 0.0
    return factor


@pytest.mark.parametrize("compiled", [True, False])
def test_the_ratio_and_the_new_magnitude(compiled: bool) -> None:
    weight = torch.tensor([[1.0, -8.0], [2.0, 1.0], [0.0, 0.0], [math.nan, 1.0], [1.0, -math.inf], [3.0, 1.0]])
    before = torch.tensor([2.0, 1.0, 1.0, 5.0, 6.0, 0.0])
    factor = torch.tensor([0.5, -1.0, 1.0, 1.0, 1.0, 1.0])
    ratio, magnitude = (grown if compiled else by_torch)(weight, factor, before, 0)
    assert magnitude.tolist() == pytest.approx([4.0, 2.0, SMALLEST, 5.0, 6.0, 3.0])
    assert ratio.tolist() == pytest.approx([2.0, 2.0, SMALLEST, 1.0, 1.0, 1.0])


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(("bad", "expected"), [(1.0, 6.0), (math.nan, 4.0), (math.inf, 4.0)])
def test_one_magnitude_of_channels_with_factors(bad: float, expected: float, compiled: bool) -> None:
    weight = torch.tensor([[1.0, -8.0], [2.0, bad], [0.0, 0.0]])
    found = (grown if compiled else by_torch)(weight, torch.tensor([-0.5, 3.0, 1.0]), torch.tensor(4.0), 0)
    assert [value.item() for value in found] == [expected / 4.0, expected]


@needs_kernels
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("with_factor", [True, False])
@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize(("shape", "axis"), [place for place in PLACES if place != ((600,), 0)], ids=str)
def test_the_kernel_has_the_bits_of_torch(
    shape: tuple[int, ...], axis: int | None, finite: bool, with_factor: bool, shared: bool
) -> None:
    weight = hard_values(shape, 0.1)
    weight = weight.nan_to_num(0.0, 0.0, 0.0).clamp(-20.0, 20.0) if finite else weight
    channels = 1 if axis is None else shape[axis]
    factor = factor_of(channels) if with_factor and axis is not None else None
    before = channel_values(channels, 0.1, 3.0, 7)
    before[::4] = 0.0
    before = before[-1] if shared or axis is None else before
    assert kernels.growth(weight, factor, before.clone(), axis, SMALLEST) is not None
    for a, b in zip(grown(weight, factor, before, axis), by_torch(weight, factor, before, axis), strict=True):
        assert same_bits(a, b)


@needs_kernels
@pytest.mark.parametrize("arranged", ["channels_last", "transposed", "strided", "expanded"])
@pytest.mark.parametrize("axis", [0, 1, 3])
def test_any_arrangement_in_memory(arranged: str, axis: int) -> None:
    weight = torch.randn(6, 8, 4, 10, generator=torch.Generator().manual_seed(axis))
    if arranged == "channels_last":
        weight = weight.contiguous(memory_format=torch.channels_last)
    elif arranged == "expanded":
        weight = weight[:, :, :1].expand(6, 8, 4, 10)
    else:
        weight = weight.transpose(0, 3) if arranged == "transposed" else weight[::2, :, :, 1::3]
    channels = weight.shape[axis]
    before, factor = channel_values(channels, 0.1, 3.0, 7), factor_of(channels)
    found, expected = grown(weight, factor, before, axis), by_torch(weight, factor, before, axis)
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(expected[1], (weight.movedim(axis, 0).flatten(1).abs().amax(1) * factor.abs()).clamp(SMALLEST))


@needs_kernels
def test_the_number_of_threads_makes_no_difference() -> None:
    threads = torch.get_num_threads()
    weight = torch.randn(5, 50_000, generator=torch.Generator().manual_seed(0))
    found = []
    try:
        for number in (1, 2, 7):
            torch.set_num_threads(number)
            found.append([grown(weight, None, torch.ones(5), 0), grown(weight.T, None, torch.ones(5), 1)])
    finally:
        torch.set_num_threads(threads)
    assert all(same_bits(pair[1], weight.abs().amax(1)) for each in found for pair in each)
    assert all(same_bits(pair[0], weight.abs().amax(1)) for each in found for pair in each)


@needs_kernels
def test_what_the_kernel_does_not_take() -> None:
    weight, three = torch.ones(3, 4), torch.ones(3)
    assert kernels.growth(weight, three, three.clone(), 0, SMALLEST) is not None
    for factor, magnitude in (
        (torch.ones(2), three),
        (three.double(), three),
        (None, torch.ones(4)),
        (None, torch.ones(6)[::2]),
        (None, three.double()),
    ):
        assert kernels.growth(weight, factor, magnitude, 0, SMALLEST) is None
    assert kernels.growth(weight.double(), None, three, 0, SMALLEST) is None
    assert kernels.growth(weight, three, torch.tensor(1.0), None, SMALLEST) is None
    ratio, magnitude = grown(2 * weight.half(), None, three, 0)
    assert (ratio.tolist(), magnitude.tolist()) == ([2.0] * 3, [2.0] * 3)

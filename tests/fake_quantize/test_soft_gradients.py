"""The building blocks of gradients."""

import math

import pytest
import torch

from fxqat.fake_quantize.soft_gradients import finite_gradient, learned_grid, magnitude, straight_through


def test_the_value_is_kept_bit_by_bit_and_the_gradient_is_the_surrogates() -> None:
    x = torch.randn(10000, generator=torch.Generator().manual_seed(0), requires_grad=True)
    value = torch.randn(10000, generator=torch.Generator().manual_seed(1))
    y = straight_through(3.0 * x, value)
    y.sum().backward()
    assert torch.equal(y, value)
    assert not torch.equal((x + (value - x)).detach(), value)  # why the sum will not do
    assert x.grad.eq(3.0).all()


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_in_a_gradient_becomes_zero(poison: float) -> None:
    p = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    y = finite_gradient(p, 0.5)
    y.backward(torch.tensor([4.0, poison, -1.0]))
    assert torch.equal(y, p)
    assert p.grad.tolist() == [2.0, 0.0, -0.5]


def test_a_magnitude_has_a_gradient_at_zero() -> None:
    p = torch.tensor([-2.0, 0.0, 3.0], requires_grad=True)
    size = magnitude(p)
    size.sum().backward()
    assert size.tolist() == [2.0, 0.0, 3.0]
    assert p.grad.tolist() == [-1.0, 1.0, 1.0]


def test_a_learned_grid_is_the_used_scale_with_the_gradient_of_the_size() -> None:
    scale = torch.tensor([-0.3, 0.3], requires_grad=True)
    used = torch.tensor([0.25, 1.0])
    grid = learned_grid(scale, used, 0.5)
    grid.backward(torch.tensor([2.0, math.nan]))
    assert torch.equal(grid, used)
    assert scale.grad.tolist() == [-1.0, 0.0]

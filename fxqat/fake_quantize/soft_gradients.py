"""Building blocks for the gradients of fake-quants that are written in plain differentiable operations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def straight_through(surrogate: Tensor, value: Tensor) -> Tensor:
    """Exactly ``value`` in the forward pass, with the gradient of ``surrogate`` in the backward pass.

    ``surrogate + (value - surrogate).detach()`` is not exact: the sum is rounded and leaves the grid for some values.

    Args:
        surrogate: differentiable, any shape.
        value: of the same shape, without a gradient.

    Source: Bengio et al. 2013 (arXiv:1308.3432), section 4.

    Example:
        >>> x = torch.tensor([0.2, 1.7], requires_grad=True)
        >>> y = straight_through(x**2, x.detach().round())
        >>> y.sum().backward()
        >>> y.tolist(), [round(g, 1) for g in x.grad.tolist()]
        ([0.0, 2.0], [0.4, 3.4])
    """
    return _StraightThrough.apply(surrogate, value)  # type: ignore[no-any-return]


def finite_gradient(parameter: Tensor, multiplier: float = 1.0) -> Tensor:
    """The parameter unchanged; its gradient is multiplied by a number, and NaN and infinity in it become 0.

    So one bad batch cannot destroy a learned parameter.

    Args:
        parameter: any shape.
        multiplier: multiplier of the gradient.
    """
    return _FiniteGradient.apply(parameter, multiplier)  # type: ignore[no-any-return]


def magnitude(parameter: Tensor) -> Tensor:
    """``|parameter|`` with the gradient of a positive number at 0, where that of ``abs`` is 0."""
    return torch.where(parameter.detach() < 0, -parameter, parameter)


def learned_grid(scale: Tensor, used_scale: Tensor, multiplier: float) -> Tensor:
    """The scale in use, with a gradient to the learned scale.

    Args:
        scale: the learned parameter; its sign is ignored.
        used_scale: ``scale`` after it was rounded, clamped or raised, of the same shape.
        multiplier: multiplier of the gradient; NaN and infinity in it become 0.
    """
    return straight_through(magnitude(finite_gradient(scale, multiplier)), used_scale)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, surrogate: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _FiniteGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, multiplier: float) -> Tensor:
        ctx.multiplier = multiplier
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return (grad * ctx.multiplier).nan_to_num(0.0, 0.0, 0.0), None

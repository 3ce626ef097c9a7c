"""Gradients of a value, without a trace in ``.grad``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def gradients_of(value: Tensor, leaves: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients of a value, dense; None for a leaf that it does not depend on.

    ``torch.autograd.grad`` does not return what the backward of a custom ``torch.autograd.Function`` adds to ``.grad``
    by itself, as reversible layers do for their parameters. It is part of the result here; ``.grad`` stays as it was.

    Args:
        value: a scalar that requires gradients.
        leaves: parameters and other leaves that require gradients.
    """
    before = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    try:
        found = torch.autograd.grad(value, list(leaves), allow_unused=True)
        added = [leaf.grad for leaf in leaves]
    finally:
        for leaf, gradient in zip(leaves, before, strict=True):
            leaf.grad = gradient
    return [_sum_of(gradient, other) for gradient, other in zip(found, added, strict=True)]


def _sum_of(*gradients: Tensor | None) -> Tensor | None:
    """The sum of those that there are."""
    dense = [gradient.to_dense() if gradient.is_sparse else gradient for gradient in gradients if gradient is not None]
    return torch.stack(dense).sum(0) if len(dense) > 1 else dense[0] if dense else None

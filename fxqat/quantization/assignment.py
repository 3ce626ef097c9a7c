"""Assigning to items of a tensor without overwriting it."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def assign_item(x: Tensor, key: Any, value: Any) -> Tensor:
    """A copy of ``x`` after ``x[key] = value``.

    Example:
        >>> import torch
        >>> assign_item(torch.zeros(3), slice(0, 2), 1.0).tolist()
        [1.0, 1.0, 0.0]
    """
    result = x.clone()
    result[key] = value
    return result

"""Writes to a tensor without overwriting it."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor


def assign_item(x: Any, key: Any, value: Any) -> Any:
    """A copy of a tensor, or of a list or dict of tensors, after ``x[key] = value``.

    Example:
        >>> import torch
        >>> assign_item(torch.zeros(3), slice(0, 2), 1.0).tolist()
        [1.0, 1.0, 0.0]
    """
    result = x.clone() if isinstance(x, Tensor) else copy.copy(x)
    result[key] = value
    return result


def after_method(x: Tensor, method: str, *args: Any, **kwargs: Any) -> Tensor:
    """A copy of a tensor after a method that overwrites it.

    Example:
        >>> import torch
        >>> after_method(torch.zeros(3), "fill_", 2.0).tolist()
        [2.0, 2.0, 2.0]
    """
    result = x.clone()
    getattr(result, method)(*args, **kwargs)
    return result

"""Item assignment without overwriting."""

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

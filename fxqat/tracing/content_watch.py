"""Sees whether what a function returns, or its size, depends on the values of tensors."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from fxqat.utils.torch_compat import TorchDispatchMode


class ContentWatch(TorchDispatchMode):
    """Records whether an operator's result, or its size, depends on the values of a tensor.

    Args:
        constants: the ``id`` of each tensor whose values are those of every run.

    Attributes:
        read_content: whether there was such an operator.
        read_constants: whether there was one of ``constants`` only.
    """

    def __init__(self, constants: Collection[int] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.constants = constants
        self.read_content = self.read_constants = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Check one operator and run it."""
        reads, varies = _by_content(func)
        given = args
        if func.name() == "aten::index.Tensor":  # only masks determine a size
            given = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
            varies = bool(given)
        if reads or varies:
            is_constant = all(id(value) in self.constants for value in given if isinstance(value, Tensor))
            self.read_constants |= is_constant
            self.read_content |= not is_constant
        return func(*args, **(kwargs or {}))


@functools.cache
def _by_content(func: Any) -> tuple[bool, bool]:
    """Whether an operator's result depends on the values of a tensor, and whether its size may."""
    reads = torch.Tag.data_dependent_output in func.tags or "::nms" in func.name()
    return reads, torch.Tag.dynamic_output_shape in func.tags

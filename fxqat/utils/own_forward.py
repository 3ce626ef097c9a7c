"""A forward that one module has, and not its class, as in ``model.forward = model.forward_export``."""

from __future__ import annotations

from types import MethodType

from torch import nn
from torch.nn.utils import parametrize


def has_own_forward(module: nn.Module | None) -> bool:
    """Whether somebody gave this module a forward that is not the one of its class."""
    if module is None or "forward" not in vars(module):
        return False
    own = vars(module)["forward"]
    is_of_class = isinstance(own, MethodType) and own.__self__ is module and own.__func__ is type(module).forward
    return not is_of_class


def type_of(module: nn.Module | None) -> type[object]:
    """The type that says what a module computes: that of None if it has a forward of its own.

    A module whose tensors ``torch.nn.utils.parametrize`` computes is of the type that it was before.
    """
    if module is None or has_own_forward(module):
        return type(None)
    return parametrize.type_before_parametrizations(module)

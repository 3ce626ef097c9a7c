"""A forward that one module has, and not its class, as in ``model.forward = model.forward_export``."""

from __future__ import annotations

from torch import nn


def has_own_forward(module: nn.Module | None) -> bool:
    """Whether somebody gave this module a forward."""
    return module is not None and "forward" in vars(module)


def type_of(module: nn.Module | None) -> type[object]:
    """The type that says what a module computes: that of None if it has a forward of its own."""
    return type(None) if module is None or has_own_forward(module) else type(module)

"""Arguments of the float model's forward that the prepared model does not have: they were fixed while tracing.

A program that gives them as before goes on working, as long as they have the values that the graph holds.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

import torch
from torch import nn

from fxqat.utils.batches import described

PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, NoneType)
"""The types of values that are compared; any other value is a different one, unless it is the same object."""


@dataclass(frozen=True)
class LeftOut:
    """The arguments that a prepared model does not have.

    Args:
        names: of the arguments of the float model's forward that can be given in order.
        values: of the arguments that the prepared model does not have, by name; only plain ones.
    """

    names: tuple[str, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, fixed: Mapping[str, Any]) -> LeftOut:
        """Those of a float model, from all arguments of its forward that are fixed, by name."""
        parameters = inspect.signature(model.forward).parameters.values()
        in_order = tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
        is_open = any(p.kind is p.VAR_POSITIONAL for p in parameters)
        return cls(() if is_open else in_order, {n: value for n, value in fixed.items() if isinstance(value, PLAIN)})

    def without(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call that the prepared model has.

        Args:
            args: in the order of the prepared model's forward, or, if there are more, of the float model's.
            kwargs: by name.

        Raises:
            TypeError: an argument has another value than in the graph.
        """
        own = [name for name in self.names if name not in self.values]
        if len(own) < len(args) <= len(self.names):
            given = dict(zip(self.names, args, strict=False))
            args = tuple(value for name, value in given.items() if self._is_own(name, value))
        return args, {name: value for name, value in kwargs.items() if self._is_own(name, value)}

    def _is_own(self, name: str, value: Any) -> bool:
        """Whether the prepared model has an argument; if not, the value must be that of the graph."""
        if name not in self.values:
            return True
        fixed = self.values[name]
        is_plain = isinstance(value, PLAIN)
        if value is not fixed and not (is_plain and value == fixed):
            given = repr(value) if is_plain else described(value)
            raise TypeError(
                f"forward got {name}={given}, but the model was prepared with {name}={fixed!r}, and its graph holds "
                f"what follows from that. Prepare it with example_inputs or concrete_args that give {name}."
            )
        return False


def take_left_out(
    gm: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A forward pre-hook of a prepared model, see :meth:`LeftOut.without`."""
    provenance: Any = gm.provenance
    found: LeftOut = provenance.left_out
    return found.without(args, kwargs)


take_left_out.fxqat_internal = True  # type: ignore[attr-defined]

"""Functions that a model holds and that hold the model, as in ``self.head = lambda y: y @ self.embed.weight.t()``.

``copy.deepcopy`` does not copy functions. In the copy of a model such a function would go on with the weights, the
buffers and the mode of the original.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import CellType, FunctionType, MethodType
from typing import Any, TypeVar

from torch import nn

M = TypeVar("M", bound=nn.Module)


def copy_with_closures(model: M, memo: dict[int, Any] | None = None) -> M:
    """A deep copy of a model whose functions hold the copy.

    Functions are found among the attributes of modules, their hooks, and the items of their lists and dicts; what they
    hold are their closures and defaults, also those of other functions in there.

    Args:
        model: the model.
        memo: as for ``copy.deepcopy``.
    """
    memo = {} if memo is None else memo
    result = copy.deepcopy(model, memo)
    functions = _Functions(memo)
    for module in result.modules():
        attributes = vars(module)
        for container in (attributes, *(held for held in attributes.values() if isinstance(held, (dict, list)))):
            for place, value in list(container.items() if isinstance(container, dict) else enumerate(container)):
                if isinstance(value, FunctionType) and functions.hold_copied(value):
                    container[place] = functions.rebound(value)
    return result


class _Functions:
    """Functions as they are for a copy, made once each, as are the cells that several of them share.

    Args:
        memo: the copies by the id of what was copied.
    """

    def __init__(self, memo: dict[int, Any]) -> None:
        self.memo = memo
        self.made: dict[int, FunctionType] = {}
        self.cells: dict[int, CellType] = {}

    def hold_copied(self, function: FunctionType, seen: frozenset[int] = frozenset()) -> bool:
        """Whether a function, or one that it holds, holds something of which there is a copy."""
        seen |= {id(function)}
        return any(
            self.hold_copied(value, seen) if isinstance(value, FunctionType) else self._counterpart(value) is not value
            for value in _held_by(function)
            if id(value) not in seen
        )

    def rebound(self, function: FunctionType) -> FunctionType:
        """The function that holds copies."""
        if id(function) in self.made:
            return self.made[id(function)]
        cells = tuple(self.cells.setdefault(id(cell), CellType()) for cell in function.__closure__ or ())
        made = FunctionType(function.__code__, function.__globals__, function.__name__, None, cells or None)
        self.made[id(function)] = made
        made.__dict__.update(function.__dict__)
        made.__qualname__, made.__module__, made.__doc__ = function.__qualname__, function.__module__, function.__doc__
        made.__annotations__ = function.__annotations__
        if function.__defaults__ is not None:
            made.__defaults__ = tuple(map(self._counterpart, function.__defaults__))
        if function.__kwdefaults__ is not None:
            made.__kwdefaults__ = {name: self._counterpart(value) for name, value in function.__kwdefaults__.items()}
        for cell, new in zip(function.__closure__ or (), cells, strict=True):
            for value in _content(cell):
                new.cell_contents = self._counterpart(value)
        return made

    def _counterpart(self, value: Any) -> Any:
        if isinstance(value, FunctionType):
            return self.rebound(value) if self.hold_copied(value) else value
        if isinstance(value, MethodType):
            owner = self._counterpart(value.__self__)
            return value if owner is value.__self__ else MethodType(value.__func__, owner)
        return self.memo.get(id(value), value)


def _content(cell: CellType) -> Iterator[Any]:
    """What a cell holds: nothing before the variable is assigned."""
    try:
        yield cell.cell_contents
    except ValueError:
        return


def _held_by(function: FunctionType) -> list[Any]:
    """What the closure and the defaults of a function hold."""
    cells = [value for cell in function.__closure__ or () for value in _content(cell)]
    return [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]

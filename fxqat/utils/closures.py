"""Functions that a model holds and that hold the model, as in ``self.head = lambda y: y @ self.embed.weight.t()``.

``copy.deepcopy`` does not copy functions. In the copy of a model such a function would go on with the weights, the
buffers and the mode of the original.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, TypeVar

from torch import nn

M = TypeVar("M", bound=nn.Module)

FUNCTIONS = (FunctionType, MethodType, partial)


def copy_with_closures(model: M, memo: dict[int, Any] | None = None) -> M:
    """A deep copy of a model whose functions hold the copy.

    Functions are found among the attributes of modules, their hooks, and the items of their lists and dicts; what they
    hold are their closures and defaults, also those of other functions in there. Methods and ``functools.partial`` hold
    their function and what it is bound to.

    Args:
        model: the model.
        memo: as for ``copy.deepcopy``.
    """
    memo = {} if memo is None else memo
    result = copy.deepcopy(model, memo)
    rebind_functions(result, memo)
    return result


def rebind_functions(result: nn.Module, memo: dict[int, Any]) -> None:
    """Let the functions of a deep copy of a model hold the copy.

    Args:
        result: the copy.
        memo: that of ``copy.deepcopy``, which made it.
    """
    functions = _Functions(memo)
    for module in result.modules():
        attributes = vars(module)
        for container in (attributes, *(held for held in attributes.values() if isinstance(held, (dict, list)))):
            for place, value in list(container.items() if isinstance(container, dict) else enumerate(container)):
                if isinstance(value, FUNCTIONS):
                    container[place] = functions.counterpart(value)


class _Functions:
    """Functions as they are for a copy, made once each, as are the cells that several of them share.

    Args:
        memo: the copies by the id of what was copied.
    """

    def __init__(self, memo: dict[int, Any]) -> None:
        self.memo = memo
        self.made: dict[int, FunctionType] = {}
        self.cells: dict[int, CellType] = {}

    def counterpart(self, value: Any) -> Any:
        """What the copy has instead of a value that the original has: the value itself if nothing of it was copied."""
        if not isinstance(value, FUNCTIONS):
            return self.memo.get(id(value), value)
        if not self._holds_copied(value):
            return value
        if isinstance(value, FunctionType):
            return self._rebound(value)
        if isinstance(value, MethodType):
            return MethodType(self.counterpart(value.__func__), self.counterpart(value.__self__))
        keywords = {name: self.counterpart(each) for name, each in value.keywords.items()}
        made = partial(self.counterpart(value.func), *map(self.counterpart, value.args), **keywords)
        made.__dict__.update({name: self.counterpart(each) for name, each in vars(value).items()})
        return made

    def _holds_copied(self, value: Any, seen: frozenset[int] = frozenset()) -> bool:
        """Whether there is a copy of a value or, if it is a function, of something that it holds."""
        if not isinstance(value, FUNCTIONS):
            return self.memo.get(id(value), value) is not value
        seen |= {id(value)}
        return any(self._holds_copied(each, seen) for each in _held_by(value) if id(each) not in seen)

    def _rebound(self, function: FunctionType) -> FunctionType:
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
            made.__defaults__ = tuple(map(self.counterpart, function.__defaults__))
        if function.__kwdefaults__ is not None:
            made.__kwdefaults__ = {name: self.counterpart(value) for name, value in function.__kwdefaults__.items()}
        for cell, new in zip(function.__closure__ or (), cells, strict=True):
            for value in _content(cell):
                new.cell_contents = self.counterpart(value)
        return made


def _content(cell: CellType) -> Iterator[Any]:
    """What a cell holds: nothing before the variable is assigned."""
    try:
        yield cell.cell_contents
    except ValueError:
        return


def _held_by(function: FunctionType | MethodType | partial[Any]) -> list[Any]:
    """What the closure and the defaults of a function hold, and what it is bound to."""
    if isinstance(function, MethodType):
        return [function.__func__, function.__self__]
    if isinstance(function, partial):
        return [function.func, *function.args, *function.keywords.values()]
    cells = [value for cell in function.__closure__ or () for value in _content(cell)]
    return [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]

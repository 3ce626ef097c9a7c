"""User functions that cannot be traced, and are called as a whole instead."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from types import FrameType, FunctionType, TracebackType
from typing import Any

from torch import fx, nn

from fxqat.utils.tensors import versions_in

NOT_USER_PACKAGES = ("torch", "numpy", "fxqat", *sys.stdlib_module_names)
"""Packages whose functions never become leaves: an error in them is the fault of the code that called them."""


class FunctionLeaf(nn.Module):
    """Calls a function. Keeps the arguments that a graph cannot hold, such as configuration objects.

    Args:
        function: a function that can be imported, so that it can be pickled.
        constants: those arguments, by position or name.
    """

    def __init__(self, function: Callable[..., Any], constants: dict[int | str, Any]) -> None:
        super().__init__()
        self.function = function
        self.constants = constants

    def has_constants(self, constants: dict[int | str, Any]) -> bool:
        """Whether its constants are these very objects."""
        return self.constants.keys() == constants.keys() and all(self.constants[k] is c for k, c in constants.items())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        positional = [self.constants.get(i, argument) for i, argument in enumerate(args)]
        named = {name: value for name, value in self.constants.items() if isinstance(name, str)}
        return self.function(*positional, **(kwargs | named))

    def __deepcopy__(self, memo: dict[int, Any]) -> FunctionLeaf:
        """A copy; constants that cannot be copied, such as those that hold a Python module, are shared."""
        constants = {place: _copied_if_possible(value, memo) for place, value in self.constants.items()}
        memo[id(self)] = result = FunctionLeaf(self.function, constants).train(self.training)
        return result


def _copied_if_possible(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # noqa: BLE001  an object of a user's is copied by its own code
        return value


class ModuleArgument(fx.proxy.TraceError):
    """A function that is called as a whole gets a module, whose tensors the graph would lose."""


def holds_module(value: Any) -> bool:
    """Whether an argument is a module, a method of one, or a list or dict with one."""
    if isinstance(value, (list, tuple, set)):
        return any(map(holds_module, value))
    if isinstance(value, dict):
        return any(map(holds_module, value.values()))
    return isinstance(value, nn.Module) or isinstance(getattr(value, "__self__", None), nn.Module)


def is_user_function(function: Any) -> bool:
    """Whether a function is written in Python and does not belong to the standard library, torch, numpy or fxqat."""
    return isinstance(function, FunctionType) and function.__module__.partition(".")[0] not in NOT_USER_PACKAGES


def overwrites_arguments(function: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Whether a function works in place on tensors in its arguments."""
    given = copy.deepcopy((args, kwargs))
    before = versions_in(given)
    function(*given[0], **given[1])
    return before != versions_in(given)


def failing_functions(trace: TracebackType | None) -> Iterator[tuple[FunctionType, list[Any]]]:
    """User functions that raised or passed on an exception, innermost first, and where their callers find them.

    A module-level function is found in the namespaces (dicts) of its module and of its caller. A method of an object
    other than an ``nn.Module`` is found in its class.
    """
    frames: list[FrameType] = []
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    for position in range(len(frames) - 1, 0, -1):
        frame, caller = frames[position], frames[position - 1]
        code = frame.f_code
        namespaces: list[Any] = [frame.f_globals, caller.f_globals]
        function: Any = frame.f_globals.get(code.co_name)
        if code.co_varnames[:1] == ("self",) and not isinstance(frame.f_locals["self"], nn.Module):
            owner = type(frame.f_locals["self"])
            function, namespaces = vars(owner).get(code.co_name), [owner]
        if not isinstance(function, FunctionType) or function.__code__ is not code:
            continue
        if is_user_function(function) and _is_importable(function):
            yield function, namespaces


def _is_importable(function: FunctionType) -> bool:
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function

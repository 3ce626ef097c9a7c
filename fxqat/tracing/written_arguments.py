"""What forward writes to the lists, dicts and objects among its arguments: it is undone where forward is traced again.

A cache of keys and values, or a list of features that each block extends, is written while a module is traced. A module
is traced again where tracing it failed, and in training after eval mode: each time it must find what it found first.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

from torch import Tensor, fx, nn

from fxqat.tracing.python_state import NOT_USERS
from fxqat.utils.containers import CONTAINERS, content_of, restore_content

NOT_WRITTEN = (nn.Module, Tensor, type, FunctionType, MethodType)


@dataclass(frozen=True)
class WrittenArguments:
    """What arguments hold at one moment.

    Args:
        arguments: the arguments of a call.
        contents: the lists, dicts and sets, the attributes of objects included, and what they hold.
        structure: the same, nested, for :meth:`is_as`.
    """

    arguments: Any
    contents: list[tuple[Any, list[Any]]]
    structure: Any

    @classmethod
    def of(cls, arguments: Any) -> WrittenArguments:
        """What the arguments hold now."""
        contents: list[tuple[Any, list[Any]]] = []
        return cls(arguments, contents, _structure(arguments, contents, {}))

    def is_as(self, other: WrittenArguments) -> bool:
        """Whether both hold the same values of the graph and equal others."""
        return _same(self.structure, other.structure)

    def restore(self) -> bool:
        """Let the arguments hold this again; whether they held something else."""
        was_written = not self.is_as(WrittenArguments.of(self.arguments))
        for container, content in self.contents:
            restore_content(container, content)
        return was_written


def _structure(value: Any, contents: list[tuple[Any, list[Any]]], seen: dict[int, int]) -> Any:
    """The nested values; appends what can be written to ``contents``."""
    kind = type(value)  # isinstance would look at the value of a proxy
    if issubclass(kind, fx.Proxy):
        return value.node
    if issubclass(kind, tuple):
        return kind, [_structure(item, contents, seen) for item in value]
    container = value if issubclass(kind, CONTAINERS) else _attributes(value)
    if container is None:
        return value
    if id(container) in seen:
        return kind, seen[id(container)]
    seen[id(container)] = len(seen)
    content = content_of(container)
    contents.append((container, content))
    return kind, [_structure(item, contents, seen) for item in content]


def _attributes(value: Any) -> dict[str, Any] | None:
    """The attributes of an object of a user's class; None for any other value."""
    package = type(value).__module__.partition(".")[0]
    is_library = package in NOT_USERS or package in sys.stdlib_module_names
    if isinstance(value, NOT_WRITTEN) or (is_library and type(value) is not SimpleNamespace):
        return None
    return getattr(value, "__dict__", None)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(_same, a, b))
    if a is b:
        return True
    try:
        return type(a) is type(b) and bool(a == b)
    except Exception:  # noqa: BLE001  an array has no truth value, and a class of a user may raise anything
        return False

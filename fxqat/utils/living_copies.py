"""The deep copies of an object that are still in use."""

from __future__ import annotations

import copy
from typing import Any, TypeVar
from weakref import WeakSet

T = TypeVar("T")


class LivingCopies:
    """An attribute of an object that knows the object's deep copies; it is neither copied nor pickled with it.

    Attributes:
        found: the copies that still exist; those in reference cycles vanish when the garbage collector runs.
        switched: whether somebody has switched the object itself, which then is on its own.
    """

    def __init__(self) -> None:
        self.found: WeakSet[Any] = WeakSet()
        self.switched = False

    def __deepcopy__(self, memo: dict[int, Any]) -> LivingCopies:
        return LivingCopies()

    def __reduce__(self) -> tuple[Any, ...]:
        return LivingCopies, ()


def own_copy(value: T, memo: dict[int, Any] | None = None) -> T:
    """A deep copy that fxqat makes for itself and drops: it counts as switched, so that nobody is told of it."""
    result = copy.deepcopy(value, memo)
    record = getattr(result, "living_copies", None)
    if isinstance(record, LivingCopies):
        record.switched = True
    return result

"""The deep copies of an object that are still in use."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet


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

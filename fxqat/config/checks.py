"""Checks of configuration values, and errors that name the nearest valid choice."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fxqat.errors import ConfigError


def nearest(name: object, known: Collection[str]) -> str:
    """The words that name the nearest valid choice, and all of them."""
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.0)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}Known: {', '.join(known) or 'none'}"


def mapping(value: Any, where: str, keys: Collection[str] | None = None) -> Mapping[str, Any]:
    """A mapping whose keys are all known; None is an empty one.

    Raises:
        ConfigError: it is no mapping, or a key is unknown.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: expected a mapping, got {type(value).__name__} {value!r}")
    for key in value:
        if keys is not None and key not in keys:
            raise ConfigError(f"{where}: unknown key {key!r}; {nearest(key, keys)}")
    return value


def sequence(value: Any, where: str, *kinds: Any, words: str = "") -> Sequence[Any]:
    """A list whose entries have one of the types; None is an empty one.

    Raises:
        ConfigError: it is no list, or an entry is not what ``words`` say.
    """
    if value is None:
        return ()
    if isinstance(value, (str, Mapping)) or not isinstance(value, (Sequence, set, frozenset)):
        raise ConfigError(f"{where}: expected a list, got {value!r}")
    for entry in value:
        if kinds and not isinstance(entry, kinds):
            raise ConfigError(f"{where}: expected {words}, got {entry!r}")
    return list(value)

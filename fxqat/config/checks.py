"""Checks of configuration values that name the nearest valid choice."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fxqat.errors import ConfigError
from fxqat.utils.nearest_name import nearest


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
        ConfigError: it is no list, or an entry has another type.
    """
    if value is None:
        return ()
    if isinstance(value, (str, Mapping)) or not isinstance(value, (Sequence, set, frozenset)):
        raise ConfigError(f"{where}: expected a list, got {value!r}")
    for entry in value:
        if kinds and not isinstance(entry, kinds):
            raise ConfigError(f"{where}: expected {words}, got {entry!r}")
    return list(value)

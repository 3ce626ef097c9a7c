"""Lists, dicts and sets of the user: save what they hold, and put it back.

A class of the user that is derived from one of these types may forbid or watch changes, as a frozen configuration does,
or need arguments to be copied. So the content is read and written with the methods of the builtin type.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

CONTAINERS = (dict, list, set, OrderedDict, defaultdict)
"""The types whose content is restored; they are also looked for among the bases of a class."""


def content_of(container: Any) -> list[Any]:
    """The items of a list or set, or the keys and values of a dict.

    Example:
        >>> content_of({"a": 1}), content_of([2])
        ([('a', 1)], [2])
    """
    base = _base(container)
    return list(base.items(container) if isinstance(container, dict) else base.__iter__(container))


def restore_content(container: Any, content: list[Any]) -> None:
    """Put back what :func:`content_of` gave. A container that still holds it is not touched.

    Args:
        container: a list, dict or set, or an object of a class derived from one of them.
        content: what it held.
    """
    if _same(content_of(container), content):
        return
    base = _base(container)
    base.clear(container)
    for item in content:
        if isinstance(container, dict):
            base.__setitem__(container, *item)
        else:
            (base.append if isinstance(container, list) else base.add)(container, item)


def _base(container: Any) -> Any:
    return next(base for base in type(container).__mro__ if base in CONTAINERS)


def _same(now: list[Any], before: list[Any]) -> bool:
    """Whether two contents are the same objects in the same order."""
    return len(now) == len(before) and all(
        a is b or (isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b) and all(map(_is, a, b)))
        for a, b in zip(now, before, strict=True)
    )


def _is(a: Any, b: Any) -> bool:
    return a is b

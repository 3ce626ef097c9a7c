"""The nearest valid name, for messages about a wrong one."""

from __future__ import annotations

import difflib
from collections.abc import Collection


def nearest(name: object, known: Collection[str]) -> str:
    """Words that name the nearest valid choice, and all of them.

    Example:
        >>> nearest("observr", ["observer", "scheme"])
        "did you mean 'observer'? Known: observer, scheme"
    """
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.0)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}Known: {', '.join(known) or 'none'}"

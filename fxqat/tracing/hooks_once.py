"""What hooks collect inside a module whose forward is traced twice, in eval mode and in training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any


@contextmanager
def collected_kept() -> Iterator[None]:
    """Restore the lists and dicts of context variables, in which transformers collects attentions, after the block.

    Those that the block itself sets are its own.
    """
    held = [value for value in copy_context().values() if isinstance(value, (dict, list))]
    held += [item for value in held if isinstance(value, dict) for item in value.values() if isinstance(item, list)]
    contents: list[tuple[Any, Any]] = [(each, each.copy()) for each in held]
    try:
        yield
    finally:
        for each, content in contents:
            each.clear()
            each.update(content) if isinstance(each, dict) else each.extend(content)

"""Count names up until they are unique. Without torch, because the passes on the ONNX model use it."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator


def numbered(name: str) -> Iterator[str]:
    """``name``, ``name_1``, ``name_2``, ... without end."""
    yield name
    yield from (f"{name}_{count}" for count in itertools.count(1))


def unused_name(name: str, taken: Container[str | None]) -> str:
    """``name``, or the first of ``name_1``, ``name_2``, ... that is not taken.

    Example:
        >>> unused_name("conv", {"conv", "conv_1", "relu"})
        'conv_2'
    """
    return next(candidate for candidate in numbered(name) if candidate not in taken)

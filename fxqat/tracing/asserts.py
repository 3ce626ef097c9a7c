"""Whether Python code asks for a truth value in an ``assert``, by the instructions of that code."""

from __future__ import annotations

import dis
import functools
from types import CodeType, FrameType

RAISES = ("LOAD_ASSERTION_ERROR", "LOAD_COMMON_CONSTANT")
"""The instruction that begins the failure of an ``assert``, by the version of Python."""


def is_asserted(frame: FrameType | None) -> bool:
    """Whether the instruction that runs in a frame asks for the truth value of a condition of an ``assert``."""
    return frame is not None and frame.f_lasti in _asserted(frame.f_code)


@functools.cache
def _asserted(code: CodeType) -> frozenset[int]:
    """The offsets of the jumps of a code of which one way raises AssertionError."""
    found = [one for one in dis.get_instructions(code) if one.opname not in ("CACHE", "NOT_TAKEN")]
    fails = {one.offset for one in found if one.opname in RAISES and one.argval in (None, AssertionError)}
    offsets: set[int] = set()
    for before, jump, following in zip([found[0], *found], found, found[1:], strict=False):
        if jump.opname.endswith(("_IF_FALSE", "_IF_TRUE")) and fails & {jump.argval, following.offset}:
            offsets |= {jump.offset, *([before.offset] if before.opname == "TO_BOOL" else [])}  # of Python 3.13
    return frozenset(offsets)

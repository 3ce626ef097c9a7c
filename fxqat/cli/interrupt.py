"""Ctrl-C in the ``fxqat`` command: exit code 130 and no traceback, wherever it comes. Only the standard library.

Python makes an interrupt an exception that can come anywhere, and what runs under the command may swallow it: a
destructor, an import, a callback of C code. So it is also recorded, and checked before anything is put in place.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

EXIT_INTERRUPT = 130


def is_command() -> bool:
    """Whether this process is ``fxqat`` or ``python -m fxqat``; true already while the package is imported."""
    following = sys.orig_argv[sys.orig_argv.index("-m") + 1 :] if "-m" in sys.orig_argv else []
    return sys.argv[:1] == ["-m"] and following[:1] == ["fxqat"] or Path((sys.argv or [""])[0]).stem == "fxqat"


def _leave_on_interrupt() -> None:
    """End the process at Ctrl-C: while the packages are imported nothing is written, and nothing needs cleaning."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else the caller has it ignored
        signal.signal(signal.SIGINT, _leave)


def ignore_interrupts() -> None:
    """Ignore Ctrl-C once the command has ended: Python only shuts down, and a traceback would look like a failure."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class Interrupts:
    """The interrupts of a block, in the main thread."""

    def __init__(self) -> None:
        self.received = False
        self.held = False

    def stop(self, *_: Any) -> None:
        """Handler: record the interrupt; raise the first one, as the next ones would disturb the cleaning up."""
        first, self.received = not self.received, True
        if first and not self.held:
            raise KeyboardInterrupt

    def check(self) -> None:
        """Raise an interrupt that was swallowed."""
        if self.received:
            raise KeyboardInterrupt

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Put files in place: not begun after an interrupt, and not interrupted."""
        self.check()
        self.held = True
        try:
            yield
        finally:
            self.held = False


INTERRUPTS = Interrupts()
"""Those of the command; a process has only one."""


@contextmanager
def interrupts_raised() -> Iterator[None]:
    """In the block, an interrupt is a ``KeyboardInterrupt``, at the latest at its end.

    Python's messages of those that destructors swallow are left out.
    """
    before, hook = signal.getsignal(signal.SIGINT), sys.unraisablehook

    def quiet(found: Any) -> None:
        if not issubclass(found.exc_type, KeyboardInterrupt):
            hook(found)

    INTERRUPTS.received = False
    if before in (_leave, signal.default_int_handler):
        signal.signal(signal.SIGINT, INTERRUPTS.stop)
    sys.unraisablehook = quiet
    try:
        yield
        INTERRUPTS.check()
    finally:
        sys.unraisablehook = hook
        signal.signal(signal.SIGINT, before)


def _leave(_number: int, _frame: FrameType | None) -> None:
    os.write(2, b"fxqat: interrupted\n")
    os._exit(EXIT_INTERRUPT)


if is_command():
    _leave_on_interrupt()

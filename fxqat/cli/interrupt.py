"""Ctrl-C in the ``fxqat`` command: exit code 130, one line, and no temporary file. Only the standard library.

Python makes an interrupt an exception that can come anywhere. A destructor or an import swallows it, and in a callback
of C++ code it aborts the process. So the command is left from the handler of the signal.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType

from fxqat.utils.temporary import delete_pending

EXIT_INTERRUPT = 130


def is_command() -> bool:
    """Whether this process is ``fxqat`` or ``python -m fxqat``; true already while the package is imported."""
    following = sys.orig_argv[sys.orig_argv.index("-m") + 1 :] if "-m" in sys.orig_argv else []
    return sys.argv[:1] == ["-m"] and following[:1] == ["fxqat"] or Path((sys.argv or [""])[0]).stem == "fxqat"


def leave_at_interrupt() -> None:
    """Let Ctrl-C end this process at once, unless its caller has it ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        process = os.getpid()

        def leave(_number: int, _frame: FrameType | None) -> None:
            if os.getpid() == process:  # else a worker of a data loader: a fork, whose files are not its own
                delete_pending()
                with suppress(Exception):  # interrupted while it prints
                    sys.stdout.flush()
                os.write(2, b"fxqat: interrupted\n")
            os._exit(EXIT_INTERRUPT)

        signal.signal(signal.SIGINT, leave)


def ignore_interrupts() -> None:
    """Ignore Ctrl-C from now on: the files are in place, or the command has ended and Python only shuts down."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


if is_command():
    leave_at_interrupt()

"""How a run ends early: an error that the user can fix is one line, without a traceback."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from fxqat.errors import FxqatError


class UserError(Exception):
    """An error that the user can fix."""


class Interrupted(Exception):  # noqa: N818  it is not an error
    """A signal ended a training; the checkpoint is written.

    Args:
        number: number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextmanager
def leaving(rank: int = 0) -> Iterator[None]:
    """Turn a user error or a signal in the block into an exit with a one-line message.

    Every process prints its own error, since others may have none; only the first one reports a signal.
    """
    try:
        yield
    except (UserError, FxqatError) as error:
        sys.exit(f"error{f' in process {rank}' if rank else ''}: {one_line(error)}")
    except Interrupted as interrupted:
        if not rank:
            print(f"{interrupted}: the checkpoint is saved; continue with --resume", file=sys.stderr)
        sys.exit(128 + interrupted.number)
    except KeyboardInterrupt:  # outside of training there is nothing to save
        sys.exit(128 + signal.SIGINT)


def one_line(error: BaseException) -> str:
    """An error's message in one line; if it comes from a DataLoader worker, the worker's message."""
    text = str(error).strip()
    last = text.splitlines()[-1] if text else type(error).__name__
    return last.partition("UserError: ")[2] if "UserError: " in last else " ".join(text.split())

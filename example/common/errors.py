"""How a run ends early: what the user can put right is told in one line, without a traceback."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from fxqat.errors import FxqatError


class UserError(Exception):
    """Something that the user can put right."""


class Interrupted(Exception):  # noqa: N818  it is not an error
    """A training was asked to end; its checkpoint is written.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextmanager
def leaving(rank: int = 0) -> Iterator[None]:
    """End the process of a rank where an error of the user's, or a signal, comes out of the block, in a line.

    Each process tells its own error, since others may have none; a signal is told by the first.
    """
    try:
        yield
    except (UserError, FxqatError) as error:
        sys.exit(f"error{f' in process {rank}' if rank else ''}: {one_line(error)}")
    except Interrupted as interrupted:
        if not rank:
            print(f"{interrupted}: a checkpoint is written; go on with --resume", file=sys.stderr)
        sys.exit(128 + interrupted.number)
    except KeyboardInterrupt:  # outside of a training there is nothing to save
        sys.exit(128 + signal.SIGINT)


def one_line(error: BaseException) -> str:
    """An error's message; of one that came out of a process that loads images, what that process said."""
    text = str(error).strip()
    last = text.splitlines()[-1] if text else type(error).__name__
    return last.partition("UserError: ")[2] if "UserError: " in last else " ".join(text.split())

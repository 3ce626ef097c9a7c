"""What is deleted when a block ends, also where the process is left in between. Only the standard library."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

_PENDING: list[Callable[[], object]] = []
"""Calls that delete what exists at this moment, in the order it was made."""


@contextmanager
def deleted_after(delete: Callable[[], object]) -> Iterator[None]:
    """Call ``delete`` when the block ends, in any way; begin the block before that which it deletes is made.

    Args:
        delete: deletes a file or folder. An ``OSError`` of it is ignored: there is none, or it has become the result.
    """
    _PENDING.append(delete)
    try:
        yield
    finally:
        with suppress(OSError):
            delete()
        _PENDING.remove(delete)


@contextmanager
def temporary_folder(parent: Path | None = None, prefix: str = "fxqat") -> Iterator[Path]:
    """A new folder, deleted after the block.

    Args:
        parent: the folder to make it in; None is the system's folder of temporary files.
        prefix: how its name begins.

    Yields:
        Its path.

    Raises:
        OSError: it cannot be made.
    """
    folder = unused_path(Path(tempfile.gettempdir()) if parent is None else parent, prefix)
    with deleted_after(partial(shutil.rmtree, folder, ignore_errors=True)):
        folder.mkdir(mode=0o700)
        yield folder


def unused_path(folder: Path, prefix: str, suffix: str = "") -> Path:
    """A path in ``folder`` with a random name that no other file has."""
    return folder / f"{prefix}.{secrets.token_hex(8)}{suffix}"


def delete_pending() -> None:
    """Delete what the blocks of this process would delete at their end, the last one first."""
    for delete in reversed(_PENDING):
        with suppress(OSError):
            delete()

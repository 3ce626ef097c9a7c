"""Write files atomically: a crash leaves the old file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fxqat.errors import FxqatError


def check_writable(target: str | os.PathLike[str], error: type[FxqatError]) -> None:
    """Check that a file can be written, without writing it.

    Args:
        target: the file.
        error: the class of the error to raise.

    Raises:
        FxqatError: the class ``error``, if the folder is missing or cannot be written, or the target is a folder.
    """
    _temporary_beside(Path(target), error).unlink()


@contextmanager
def atomic_path(target: str | os.PathLike[str], error: type[FxqatError]) -> Iterator[Path]:
    """A temporary path that replaces ``target`` when the block ends, and is deleted if the block fails.

    Args:
        target: the file to write; its folder must exist and be writable.
        error: the class of the error to raise.

    Yields:
        A path in the same folder, for the block to write.

    Raises:
        FxqatError: the class ``error``, if the folder is missing or cannot be written, or the target is a folder.
    """
    target = Path(target)
    temporary = _temporary_beside(target, error)
    try:
        yield temporary
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        temporary.replace(target)
    except OSError as cause:
        raise error(f"cannot write {target}: {cause}. Check free space and permissions.") from cause
    finally:
        temporary.unlink(missing_ok=True)


def _temporary_beside(target: Path, error: type[FxqatError]) -> Path:
    try:
        if target.is_dir():
            raise IsADirectoryError(f"{target} is a folder")
        descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
        os.close(descriptor)
    except OSError as cause:
        raise error(f"cannot write {target}: {cause}. Give a file path in an existing, writable folder.") from cause
    return Path(name)

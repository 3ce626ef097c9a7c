"""Write files atomically: a crash leaves the old file. A symbolic link stays, and the file it points to is replaced."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from fxqat.errors import FxqatError
from fxqat.utils.temporary import deleted_after, unused_path


def check_path(name: str, given: object, error: type[FxqatError]) -> None:
    """Check that a file is given by its path, and not by an open file or its content.

    Args:
        name: the name of the argument.
        given: the argument.
        error: the class of the error to raise.

    Raises:
        FxqatError: the class ``error``, if it is no path.
    """
    if not isinstance(given, (str, os.PathLike)):
        raise error(f"{name} must be the path of a file, got {type(given).__name__}: give a str or a Path")


def check_writable(target: str | os.PathLike[str], error: type[FxqatError]) -> None:
    """Check that a file can be written, without writing it.

    Args:
        target: the file.
        error: the class of the error to raise.

    Raises:
        FxqatError: the class ``error``, if the folder is missing or cannot be written, or the target is a folder.
    """
    with temporary_path(target, error):
        pass


def check_distinct(targets: Mapping[str, str | os.PathLike[str] | None], error: type[FxqatError]) -> None:
    """Check that files to write are given by paths, and are different, also through links and relative paths.

    Args:
        targets: the files by the names of their arguments; None is a file that is not asked for.
        error: the class of the error to raise.

    Raises:
        FxqatError: the class ``error``, if two are the same file, or one is no path.
    """
    names: dict[str, str] = {}
    for name, target in targets.items():
        if target is not None:
            check_path(name, target, error)
            first = names.setdefault(os.path.realpath(target), name)
            if first != name:
                raise error(f"{first} and {name} are the same file, {target}: give each a path of its own")


@contextmanager
def atomic_path(target: str | os.PathLike[str], error: type[FxqatError]) -> Iterator[Path]:
    """A temporary path that replaces ``target`` when the block ends, and is deleted if the block fails.

    Args:
        target: the file to write; its folder must exist and be writable.
        error: the class of the error to raise.

    Yields:
        A path in the folder of the file, for the block to write.

    Raises:
        FxqatError: the class ``error``, if the folder is missing or cannot be written, or the target is a folder.
    """
    with temporary_path(target, error) as temporary:
        yield temporary
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        temporary.replace(os.path.realpath(target))


@contextmanager
def temporary_path(target: str | os.PathLike[str], error: type[FxqatError]) -> Iterator[Path]:
    """A temporary path beside ``target``, which is deleted after the block; see :func:`atomic_path`."""
    target = Path(target)
    temporary = unused_path(Path(os.path.realpath(target)).parent, f".{target.name}", ".tmp")
    with deleted_after(temporary.unlink):
        try:
            if target.is_dir():
                raise IsADirectoryError(f"{target} is a folder")
            temporary.touch(mode=0o600, exist_ok=False)
        except OSError as cause:
            advice = "Give a file path in an existing, writable folder."
            raise error(f"cannot write {target}: {cause}. {advice}") from cause
        try:
            yield temporary
        except OSError as cause:
            raise error(f"cannot write {target}: {cause}. Check free space and permissions.") from cause


def write_all(contents: Mapping[Path, bytes | str | Path], error: type[FxqatError]) -> None:
    """Write all files or none; the last one is in place first.

    Args:
        contents: the contents by path; the path of a file on the same disk is moved.
        error: the class of the error to raise.

    Raises:
        FxqatError: the class ``error``, if a folder is missing or cannot be written, or a path is a folder.
    """
    with ExitStack() as stack:
        for path, content in contents.items():
            temporary = stack.enter_context(atomic_path(path, error))
            if isinstance(content, Path):
                content.replace(temporary)
            elif isinstance(content, str):
                temporary.write_text(content)
            else:
                temporary.write_bytes(content)

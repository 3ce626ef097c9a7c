"""The digest of a whole zip file, stored as the file's comment.

``torch.save`` writes a zip file, and ``torch.load`` does not check the checksums in it. The comment is the end of a zip
file, so readers of zip files ignore it.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import BinaryIO

MARK = b"sha256:"
COMMENT_SIZE = len(MARK) + 64
LENGTH_SIZE = 2
"""Bytes of the length of the comment, which stands before it."""

END = b"PK\x05\x06"
"""How the last record of a zip file begins. Without a comment it has ``END_SIZE`` bytes."""

END_SIZE = 22


def append_digest(path: Path) -> None:
    """Append the digest to a zip file that has no comment."""
    with path.open("r+b") as file:
        digest = _digest(file, os.path.getsize(path) - LENGTH_SIZE)
        file.seek(-LENGTH_SIZE, os.SEEK_END)
        file.write(COMMENT_SIZE.to_bytes(LENGTH_SIZE, "little") + MARK + digest)


def is_intact(path: str | os.PathLike[str]) -> bool | None:
    """Whether a zip file is as :func:`append_digest` left it; None if it has no comment, so no digest either."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        file.seek(max(0, size - LENGTH_SIZE - COMMENT_SIZE))
        tail = file.read()
        length, comment = tail[:LENGTH_SIZE], tail[LENGTH_SIZE:]
        if comment.startswith(MARK):
            expected = COMMENT_SIZE.to_bytes(LENGTH_SIZE, "little"), _digest(file, size - len(tail))
            return (length, comment.removeprefix(MARK)) == expected
    has_no_comment = tail[-END_SIZE:].startswith(END) and tail.endswith(bytes(LENGTH_SIZE))
    return None if has_no_comment else False


def _digest(file: BinaryIO, size: int) -> bytes:
    """The SHA-256 of the first bytes of a file, in hexadecimal digits."""
    file.seek(0)
    found = hashlib.sha256()
    while size > 0:
        block = file.read(min(size, 2**20))
        found.update(block)
        size -= len(block)
    return found.hexdigest().encode()

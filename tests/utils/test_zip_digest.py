"""The digest of a zip file: readers ignore it, and every changed byte shows."""

import zipfile
from pathlib import Path

import pytest
import torch

from fxqat.utils.zip_digest import COMMENT_SIZE, append_digest, is_intact


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of ``torch.save`` without a digest."""
    torch.save({"a": torch.arange(5.0), "b": [1, "x"]}, tmp_path / "a.pth")
    return tmp_path / "a.pth"


def test_readers_ignore_it(path: Path) -> None:
    before = path.stat().st_size
    assert is_intact(path) is None
    append_digest(path)
    assert is_intact(path) is True
    assert path.stat().st_size == before + COMMENT_SIZE
    assert torch.equal(torch.load(path, weights_only=True)["a"], torch.arange(5.0))
    assert torch.load(path, weights_only=True, mmap=True)["b"] == [1, "x"]
    assert zipfile.ZipFile(path).testzip() is None


def test_every_changed_byte_shows(path: Path) -> None:
    append_digest(path)
    whole = path.read_bytes()
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])
        assert is_intact(path) is False, position
    path.write_bytes(whole)
    assert is_intact(path) is True


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"x", lambda data: data[:-80], bytes])
def test_a_file_that_is_cut_or_extended_is_not_intact(change: object, path: Path) -> None:
    append_digest(path)
    path.write_bytes(change(path.read_bytes()) if change is not bytes else b"")
    assert is_intact(path) is False
    assert path.exists()

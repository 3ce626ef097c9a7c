"""Atomic writing: the new file or the old one, never half of one, and no litter."""

import io
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from fxqat.errors import CheckpointError, ExportError, FxqatError
from fxqat.utils.files import atomic_path, check_distinct, check_writable, write_all


def names(folder: Path) -> list[str]:
    """The files of a folder."""
    return sorted(path.name for path in folder.iterdir())


def test_the_file_appears_when_the_block_ends(tmp_path: Path) -> None:
    target = tmp_path / "model.onnx"
    with atomic_path(target, ExportError) as temporary:
        temporary.write_text("new")
        assert temporary.parent == tmp_path
        assert not target.exists()
    assert target.read_text() == "new"
    assert names(tmp_path) == ["model.onnx"]


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt])
def test_a_failing_block_leaves_the_old_file_and_nothing_else(tmp_path: Path, failure: type[BaseException]) -> None:
    target = tmp_path / "model.onnx"
    target.write_text("old")

    def write_half() -> None:
        with atomic_path(target, ExportError) as temporary:
            temporary.write_text("half")
            raise failure

    with pytest.raises(failure):
        write_half()
    assert target.read_text() == "old"
    assert names(tmp_path) == ["model.onnx"]


def test_an_existing_file_is_replaced_and_has_the_usual_permissions(tmp_path: Path) -> None:
    target, plain = tmp_path / "a.json", tmp_path / "b.json"
    target.write_text("old")
    plain.write_text("")
    with atomic_path(str(target), ExportError) as temporary:
        temporary.write_text("new")
    assert target.read_text() == "new"
    assert stat.S_IMODE(target.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


@pytest.mark.parametrize("error", [ExportError, CheckpointError])
def test_a_missing_folder_is_the_error_asked_for(tmp_path: Path, error: type[FxqatError]) -> None:
    target = tmp_path / "missing" / "a.pth"
    with pytest.raises(error, match="cannot write") as caught, atomic_path(target, error):
        pytest.fail("the block must not run")
    assert str(target) in str(caught.value)
    with pytest.raises(error, match="folder"):
        check_writable(target, error)


@pytest.mark.parametrize("function", [check_writable, lambda target, error: atomic_path(target, error).__enter__()])
def test_a_folder_is_no_target(tmp_path: Path, function: object) -> None:
    with pytest.raises(ExportError, match="is a folder") as caught:
        function(tmp_path, ExportError)
    assert isinstance(caught.value.__cause__, OSError)
    assert names(tmp_path) == []


@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(ExportError, match="cannot write"):
            check_writable(tmp_path / "a.onnx", ExportError)
    finally:
        tmp_path.chmod(0o700)
    assert names(tmp_path) == []


def test_checking_writes_nothing_and_keeps_what_is_there(tmp_path: Path) -> None:
    target = tmp_path / "a.onnx"
    check_writable(target, ExportError)
    assert names(tmp_path) == []
    target.write_text("old")
    check_writable(target, ExportError)
    assert target.read_text() == "old"


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_stays_and_the_file_it_points_to_is_replaced(exists: bool, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    real, link = tmp_path / "store" / "1.json", tmp_path / "latest.json"
    link.symlink_to("store/1.json")
    if exists:
        real.write_text("old")
    check_writable(link, ExportError)
    with atomic_path(link, ExportError) as temporary:
        temporary.write_text("new")
        assert temporary.parent == real.parent
    assert link.is_symlink()
    assert real.read_text() == "new"
    assert (names(tmp_path), names(real.parent)) == (["latest.json", "store"], ["1.json"])


def test_a_link_into_a_missing_folder_is_refused(tmp_path: Path) -> None:
    link = tmp_path / "latest.json"
    link.symlink_to("missing/1.json")
    with pytest.raises(ExportError, match="cannot write"):
        check_writable(link, ExportError)
    assert names(tmp_path) == ["latest.json"]


def test_equal_paths_are_found_through_links_and_relative_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("link").symlink_to("folder")
    check_distinct({"a": "x", "b": None, "c": "folder/x", "d": None}, ExportError)
    for one, other in (("x", tmp_path / "x"), ("folder/x", "link/x"), ("x", "folder/../x")):
        with pytest.raises(ExportError, match="first and second are the same file"):
            check_distinct({"first": one, "none": None, "second": other}, ExportError)


@pytest.mark.parametrize("target", [io.BytesIO(), b"model.onnx", 3])
def test_a_file_that_is_no_path_is_refused(target: Any) -> None:
    expected = f"second must be the path of a file, got {type(target).__name__}: give a str or a Path"
    with pytest.raises(ExportError, match=expected):
        check_distinct({"first": "x", "second": target}, ExportError)


def test_of_several_files_all_are_written_or_none(tmp_path: Path) -> None:
    model, document = tmp_path / "model.onnx", tmp_path / "missing" / "model.json"
    with pytest.raises(ExportError, match="cannot write"):
        write_all({model: b"new", document: "{}"}, ExportError)
    assert names(tmp_path) == []
    write_all({model: b"new", tmp_path / "model.json": "{}"}, ExportError)
    assert names(tmp_path) == ["model.json", "model.onnx"]
    assert (tmp_path / "model.json").read_text() == "{}"


@pytest.mark.parametrize("name", ["file/model.onnx", "n" * 300])
def test_a_path_that_cannot_be_is_the_error_asked_for(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ExportError, match=r"cannot write .*Give a file path in an existing, writable folder"):
        check_writable(tmp_path / name, ExportError)
    assert names(tmp_path) == ["file"]

"""What a block made is deleted at its end, and where the process is left in between."""

import os
from pathlib import Path

import pytest

from fxqat.utils.temporary import delete_pending, deleted_after, temporary_folder
from tests.fresh_process import run_fresh

LEFT = """
import os, sys
from functools import partial
from pathlib import Path
from fxqat.utils.temporary import delete_pending, deleted_after, temporary_folder

root = Path(sys.argv[1])
with deleted_after(partial((root / "outer").rmdir)):
    (root / "outer").mkdir()
    with temporary_folder(root / "outer") as folder:
        (folder / "file").touch()
        with deleted_after(partial((root / "missing").unlink)):
            delete_pending()
            os._exit(3)
"""


@pytest.mark.parametrize("failure", [None, ValueError, KeyboardInterrupt])
def test_a_temporary_folder_is_deleted_with_its_content(tmp_path: Path, failure: type[BaseException] | None) -> None:
    def use() -> None:
        with temporary_folder(tmp_path, ".work") as folder:
            (folder / "file").touch()
            assert [path.name for path in tmp_path.iterdir()] == [folder.name]
            assert folder.name.startswith(".work.")
            if failure is not None:
                raise failure

    if failure is None:
        use()
    else:
        with pytest.raises(failure):
            use()
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_is_left_deletes_what_its_blocks_would(tmp_path: Path) -> None:
    assert run_fresh(["-c", LEFT, tmp_path]).returncode == 3
    assert list(tmp_path.iterdir()) == []


def test_after_its_block_nothing_is_pending(tmp_path: Path) -> None:
    file = tmp_path / "file"
    with deleted_after(file.unlink):
        file.touch()
    assert not file.exists()
    file.touch()
    delete_pending()
    assert file.exists()


def test_two_folders_of_one_name_differ(tmp_path: Path) -> None:
    with temporary_folder(tmp_path) as one, temporary_folder(tmp_path) as other:
        assert {one, other} == set(tmp_path.iterdir())
        assert os.stat(one).st_mode & 0o077 == 0

"""``fxqat profile``."""

from pathlib import Path

import pytest

from tests.cli.test_main import call


def test_the_verdict_is_printed_and_the_page_written_without_progress_in_a_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    assert call(f"profile @:net --calib @:batches -o {page} --rows 2", monkeypatch) == 0
    out, err = capfd.readouterr()
    assert out.startswith("Close to the float model: ")
    assert sum(line.startswith("| ") for line in out.splitlines()) == 1 + 2  # the head, and two tensors
    assert "profile:" not in err
    assert "<h1>@:net on TSQAT</h1>".replace("@", str(Path(__file__).parent / "programs.py")) in page.read_text()

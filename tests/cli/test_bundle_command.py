"""``fxqat bundle``: what fails here fails there."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.cli.test_main import call


def test_the_bundle_reproduces_the_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bundle.zip"
    assert call(f"bundle @:Cube --input 2x3 -o {path}", monkeypatch) == 0
    outcome = capsys.readouterr().out.strip().rpartition("bundle.zip: ")[2]
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "there")
    assert names == {
        "reproduce.py", "setup.json", "versions.json", "structure.txt", "inputs.txt", "report.txt", "outcome.txt",
        "programs.py", "inputs.pth",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "reproduce.py"], cwd=tmp_path / "there", capture_output=True, text=True, check=True
    )
    assert done.stdout.strip().splitlines()[-1] == outcome
    assert outcome.startswith("TraceError: ")


def test_weights_are_in_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bundle.zip"
    assert call(f"bundle @:net --input 1x3x8x8 --with-weights -o {path}", monkeypatch) == 0
    with zipfile.ZipFile(path) as archive:
        assert "weights.pth" in archive.namelist()
        assert archive.read("outcome.txt").strip() == b"prepared, calibrated and exported"

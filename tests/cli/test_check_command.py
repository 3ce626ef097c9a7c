"""``fxqat check``."""

import json

import pytest

from tests.cli.test_main import call

NET = "check @:net --input 1x3x8x8"


def test_what_is_integer_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(f"{NET} --json", monkeypatch) == 0
    found = json.loads(capsys.readouterr().out)["TSQAT"]
    assert found["macs"] == found["integer_macs"] == 8 * 27 * 64 + 32
    assert found["float_groups"] == []
    assert found["weight_bytes"] == 4 * (8 * 27 + 8 + 4 * 8 + 32 + 4) + 8
    assert found["stored_bytes"] == found["weight_bytes"] - 3 * (8 * 27 + 32)


def test_all_backends_stand_side_by_side(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(f"{NET} --all-backends", monkeypatch) == 0
    rows = capsys.readouterr().out.splitlines()
    assert sum(row.startswith(("| TSQAT ", "| ONNXRuntime ", "| TensorRT ")) for row in rows) == 3


def test_sizes_that_can_be_left_open_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(f"{NET} --dynamic-shapes x=0:batch,2:height", monkeypatch) == 0
    assert capsys.readouterr().out.endswith("TSQAT: --dynamic-shapes: verified at two sizes\n")
    assert call(f"{NET} --dynamic-shapes 2:height --json", monkeypatch) == 0
    assert json.loads(capsys.readouterr().out)["TSQAT"]["open_sizes"] is True


def test_a_size_that_the_code_fixes_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "check @:fixed --input 1x3x8x8 --dynamic-shapes 2:height"
    assert call(words, monkeypatch) == 1
    told = capsys.readouterr().out.splitlines()[-1]
    assert told.startswith("TSQAT: --dynamic-shapes: NOT possible: ")
    assert "programs.py" in told
    assert call(f"{words} --json", monkeypatch) == 1
    found = json.loads(capsys.readouterr().out)["TSQAT"]
    assert found["open_sizes"] is False
    assert "programs.py" in found["why_fixed"]


@pytest.mark.parametrize(("share", "code"), [("100", 0), ("100.5", 2)])
def test_the_exit_code_is_for_scripts(share: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert call(f"{NET} --min-integer {share}", monkeypatch) == code


def test_too_little_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("check @:light --input 1x3x8x8 -b ONNXRuntime --min-integer 100", monkeypatch) == 1
    assert "least_work" in capsys.readouterr().out

"""Every option of every subcommand changes something, or the call is refused."""

import hashlib
import logging
import re
import zipfile
from pathlib import Path

import click
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from fxqat.cli.main import fxqat as command_line
from tests.cli.programs import Net
from tests.cli.test_main import call

NET = "@:net --input 1x3x8x8"
QUANTIZE = "quantize @:net --calib {d}/x.npy --mean .4,.4,.4 -o out"
IMAGES = "quantize @:net --calib {d}/images --resize 10 --crop 8 -o out"
EVAL = "quantize @:net --calib @:batches --eval @:closeness -o out"
HITS = "quantize @:net --calib {d}/x.npz --eval {d}/x.npz --mean .4,.4,.4 --max-drop 90 -o out"
PROFILE = "profile @:net --calib {d}/x.npy --mean .4,.4,.4"
VERIFY = "verify {d}/out/model.onnx"
MODEL = f"{VERIFY} --model @:net"
CHECKPOINT = f"{MODEL} --weights {{d}}/out/model.pth"
CONFIG = "--config {d}/config.yaml"
WEIGHTS = "--weights {d}/weights.safetensors"
CASES = {
    "check": {
        "--weights": (f"check {NET}", "--weights {d}/wrong.safetensors"),
        "--config": (f"check {NET} --json", CONFIG),
        "--input": ("check @:net", "--input 1x3x8x8"),
        "--backend": (f"check {NET}", "-b ONNXRuntime"),
        "--dynamic-shapes": (f"check {NET}", "--dynamic-shapes 2:height"),
        "--all-backends": (f"check {NET}", "--all-backends"),
        "--json": (f"check {NET}", "--json"),
        "--min-integer": ("check @:light --input 1x3x8x8 -b ONNXRuntime", "--min-integer 100"),
    },
    "quantize": {
        "--weights": (QUANTIZE, WEIGHTS),
        "--config": (QUANTIZE, CONFIG),
        "--backend": (QUANTIZE, "-b QNN"),
        "--calib": (EVAL, "--calib {d}/x.npy --mean .1"),
        "--samples": (QUANTIZE, "--samples 1"),
        "--batch-size": (QUANTIZE, "--batch-size 3"),
        "--resize": (IMAGES, "--resize 9"),
        "--crop": (IMAGES, "--crop 7"),
        "--mean": (QUANTIZE, "--mean .9,.9,.9"),
        "--std": (QUANTIZE, "--std .2,.3,.4"),
        "--output": (QUANTIZE, "-o other"),
        "--eval": ("quantize @:net --calib @:batches -o out", "--eval @:closeness"),
        "--eval-samples": (HITS, "--eval-samples 9"),
        "--max-drop": (EVAL, "--max-drop 50"),
        "--confidence": (HITS, "--confidence 0.5"),
        "--dynamic-batch": (QUANTIZE, "--dynamic-batch"),
        "--dynamic-shapes": (QUANTIZE, "--dynamic-shapes 2:height"),
        "--input-names": (QUANTIZE, "--input-names image"),
        "--output-names": (QUANTIZE, "--output-names scores"),
        "--opset": (QUANTIZE, "--opset 21"),
        "--runtime": (QUANTIZE, "--runtime onnxruntime_avx2"),
    },
    "verify": {
        "--model": (VERIFY, "--model @:net"),
        "--weights": (MODEL, "--weights {d}/out/model.pth"),
        "--config": (CHECKPOINT, CONFIG),
        "--json": (VERIFY, "--json {d}/out/model.json"),
        "--engine": (VERIFY, "--engine onnxruntime"),
        "--threads": (VERIFY, "--threads 2"),
        "--input": (VERIFY, "--input x=1x3x9x9"),
        "--data": (VERIFY, "--data {d}/x.npy --mean 0.4"),
        "--resize": (f"{MODEL} --data {{d}}/images --crop 8", "--resize 9"),
        "--crop": (f"{MODEL} --data {{d}}/images --resize 10", "--crop 8"),
        "--mean": (f"{MODEL} --data {{d}}/x.npy --std 0.5", "--mean 0.9"),
        "--std": (f"{MODEL} --data {{d}}/x.npy --mean 0.5", "--std 0.1"),
    },
    "profile": {
        "--weights": (PROFILE, WEIGHTS),
        "--config": (PROFILE, CONFIG),
        "--backend": (PROFILE, "-b QNN"),
        "--calib": (PROFILE, "--calib {d}/images --resize 10 --crop 8"),
        "--samples": (PROFILE, "--samples 1"),
        "--batch-size": (PROFILE, "--batch-size 3"),
        "--resize": ("profile @:net --calib {d}/images --resize 10 --crop 8", "--resize 9"),
        "--crop": ("profile @:net --calib {d}/images --resize 10 --crop 8", "--crop 7"),
        "--mean": (PROFILE, "--mean .9"),
        "--std": (PROFILE, "--std .1"),
        "--output": (PROFILE, "-o page.html"),
        "--rows": (PROFILE, "--rows 1"),
    },
    "bundle": {
        "--weights": (f"bundle {NET} -o b.zip", WEIGHTS),
        "--config": (f"bundle {NET} -o b.zip", CONFIG),
        "--input": (f"bundle {NET} -o b.zip", "--input 1x3x9x9"),
        "--backend": (f"bundle {NET} -o b.zip", "-b QNN"),
        "--output": (f"bundle {NET} -o b.zip", "-o c.zip"),
        "--with-weights": (f"bundle {NET} -o b.zip", "--with-weights"),
    },
}
"""For each option a call, and what is added to it."""


def test_every_option_has_a_case() -> None:
    for name, subcommand in command_line.commands.items():
        options = {p.opts[-1] if p.opts[-1] != "-o" else "-o" for p in subcommand.params if isinstance(p, click.Option)}
        assert options == set(CASES[name])
    assert set(command_line.commands) == set(CASES)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inputs, weights and a configuration, and what ``fxqat quantize`` makes of the model."""
    folder = tmp_path_factory.mktemp("data")
    pixels = np.random.default_rng(0).integers(0, 256, (12, 3, 8, 8), dtype=np.uint8)
    np.save(folder / "x.npy", pixels)
    np.save(folder / "float.npy", pixels.astype(np.float32))
    np.savez(folder / "x.npz", x=pixels, y=np.arange(12) % 4)
    (folder / "images").mkdir()
    for i, image in enumerate(np.random.default_rng(1).integers(0, 256, (4, 12, 14, 3), dtype=np.uint8)):
        Image.fromarray(image).save(folder / "images" / f"{i}.png")
    other = {name: tensor * 2 if tensor.is_floating_point() else tensor for name, tensor in Net().state_dict().items()}
    save_file(other, folder / "weights.safetensors")
    save_file({"head.weight": torch.zeros(3)}, folder / "wrong.safetensors")
    (folder / "config.yaml").write_text("extra_qconfig_dict:\n  w_qscheme: {bit: 4}\n")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(folder)
        assert call("quantize @:net --calib @:batches -o out", monkeypatch) == 0
    return folder


def outcome(
    words: str, data: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[object, ...]:
    """Exit code, what is printed, and the files that a call writes, without its times."""
    folder.mkdir()
    monkeypatch.chdir(folder)
    code = call(words.replace("{d}", str(data)), monkeypatch)
    printed = re.sub(r"\d+\.\d+ *(\||s$)", "|", "".join(capsys.readouterr()), flags=re.MULTILINE)
    files = [path for path in sorted(folder.rglob("*")) if path.suffix not in (".html", ".pth") and path.is_file()]
    content = {
        path.name: sorted((i.filename, i.CRC) for i in zipfile.ZipFile(path).infolist())
        if path.suffix == ".zip"
        else hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }
    pages = [path.name for path in folder.rglob("*.html")]  # they have a date
    return code, printed, content, pages


@pytest.fixture(scope="module")
def known() -> dict[str, tuple[object, ...]]:
    """The outcomes of calls without options, each made once: ``test_the_same_call_has_the_same_outcome``."""
    return {}


@pytest.mark.parametrize(("command", "option"), [(name, option) for name, cases in CASES.items() for option in cases])
def test_every_option_changes_the_outcome(
    command: str,
    option: str,
    data: Path,
    known: dict[str, tuple[object, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    base, added = CASES[command][option]
    assert option in added or f" {option[1:3]} " in f" {added} "
    if base not in known:
        known[base] = outcome(base, data, tmp_path / "before", monkeypatch, capsys)
    assert outcome(f"{base} {added}", data, tmp_path / "after", monkeypatch, capsys) != known[base]


def test_the_same_call_has_the_same_outcome(
    data: Path,
    known: dict[str, tuple[object, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """So what the test above compares are the options."""
    for i, words in enumerate({base for cases in CASES.values() for base, _ in cases.values()}):
        if words not in known:
            known[words] = outcome(words, data, tmp_path / f"{i}a", monkeypatch, capsys)
        assert outcome(words, data, tmp_path / f"{i}b", monkeypatch, capsys) == known[words], words


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (f"check {NET} -b QNN --all-backends", "--backend or --all-backends"),
        (
            "quantize @:net --calib {d}/float.npy --mean 0.4 -o out",
            "--mean and --std are for images and arrays of uint8",
        ),
        ("quantize @:net --calib {d}/x.npy --mean 0.4 --resize 9 -o out", "--resize and --crop are for images"),
        ("quantize @:net --calib @:batches --batch-size 2 -o out", "--batch-size is for images and arrays"),
        ("profile @:net --calib @:batches --batch-size 2", "--batch-size is for images and arrays"),
        ("profile @:net --calib @:batches --std 0.4", "--mean and --std are for images"),
        (f"{VERIFY} --data {{d}}/float.npy --mean 0.4", "--mean and --std are for images"),
        (f"{VERIFY} --std 0.4", "--mean and --std are for images"),
    ],
)
def test_an_option_without_effect_is_refused(
    arguments: str,
    message: str,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, printed, content, _ = outcome(arguments, data, tmp_path / "here", monkeypatch, capsys)
    assert (code, content) == (2, {})
    assert message in str(printed)


@pytest.mark.parametrize(("option", "level"), [("--quiet", logging.ERROR), ("--verbose", logging.INFO)])
def test_quiet_and_verbose_set_what_is_logged(
    option: str, level: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(
        "fxqat.cli.check_command.load_model", lambda *_: seen.append(logging.getLogger("fxqat").level) or 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        call(f"{option} check {NET}", monkeypatch)
    assert seen == [level]


@pytest.mark.parametrize("command", list(CASES))
def test_the_help_keeps_its_examples_and_explains_every_option(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(f"{command} -h", monkeypatch) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert any(line.startswith(f"fxqat {command} ") and len(line.split()) > 3 for line in lines)
    options = [p for p in command_line.commands[command].params if isinstance(p, click.Option)]
    assert all(option.help for option in options)

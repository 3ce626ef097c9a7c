"""A training that was interrupted, in whatever way, and resumed is the uninterrupted one, to the last bit."""

import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.example.imagenet_example.conftest import EXAMPLE, TINY

FLAGS = ["--epochs", "3", "--ema", "0.9", "--distill-method", "hints", "--lr", "0.01"]


def differing(one: Any, other: Any, place: str = "") -> list[str]:
    """Where two nested values are not the same to the last bit."""
    if isinstance(one, torch.Tensor):
        return [] if torch.equal(one, other) else [place]
    if isinstance(one, dict):
        assert one.keys() == other.keys(), place
        return [found for key in one for found in differing(one[key], other[key], f"{place}.{key}")]
    if isinstance(one, list):
        assert len(one) == len(other), place
        return [
            found for i, pair in enumerate(zip(one, other, strict=True)) for found in differing(*pair, f"{place}[{i}]")
        ]
    return [] if one == other else [place]


def compare(whole, parts) -> None:
    for name in ("checkpoint", "model_best"):
        first, second = whole.checkpoint(name), parts.checkpoint(name)
        assert differing(first["qat_state_dict"], second["qat_state_dict"]) == []
        trainings = [checkpoint["extra"]["training"] for checkpoint in (first, second)]
        assert differing(*trainings) == []
    assert trainings[0]["epochs_done"] > 0


@pytest.fixture(scope="module")
def stop_at():
    """Make a run's signal come at a step."""

    def stop_at(monkeypatch, step, number=signal.SIGTERM):
        interrupts = sys.modules["interrupts"]

        def arrived(self, done):
            if done == step:
                os.kill(os.getpid(), number)
            return original(self, done)

        original = interrupts.Interrupt.arrived
        monkeypatch.setattr(interrupts.Interrupt, "arrived", arrived)

    return stop_at


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_a_checkpoint(run, monkeypatch, stop_at, number, capsys):
    whole = run(*FLAGS)
    with monkeypatch.context() as patch:
        stop_at(patch, 2, number)
        with pytest.raises(SystemExit) as caught:
            run(*FLAGS)
    assert caught.value.code == 128 + number
    assert "go on with --resume" in capsys.readouterr().err
    folder = whole.folder.with_name("run1")
    (path,) = folder.glob("*_checkpoint.pth")
    state = torch.load(path, weights_only=True)["extra"]["training"]
    assert (state["epochs_done"], state["steps_done"]) == (0, 2)
    parts = run("--resume", str(path), "--output-dir", str(folder), model=False, small=False)
    assert re.findall(r"Epoch: \[(\d)\]\[(\d)/4\]", parts.printed)[0] == ("0", "3")
    compare(whole, type(whole)(folder, parts.printed))
    assert differing_table(whole, parts) == []


def test_a_signal_in_the_float_training_that_comes_first(run, monkeypatch, stop_at):
    flags = ["-a", TINY, "--epochs", "2", "--optim", "adam", "--lr", "1e-3"]
    whole = run(*flags, model=False)
    with monkeypatch.context() as patch:
        stop_at(patch, 3)
        with pytest.raises(SystemExit):
            run(*flags, model=False)
    folder = whole.folder.with_name("run1")
    (path,) = folder.glob("*_checkpoint.pth")
    with pytest.raises(SystemExit, match="from before the quantization: evaluate it in float with --not-qat"):
        run("-e", "--resume", str(path), model=False, small=False)
    parts = run("--resume", str(path), "--output-dir", str(folder), model=False, small=False)
    assert "Epoch: [0][3/4]" in parts.printed  # of the float training
    compare(whole, type(whole)(folder, parts.printed))
    assert differing_table(whole, parts) == []


def test_a_float_training_goes_on_as_one(run):
    first = run("--not-qat")
    (path,) = first.folder.glob("*_checkpoint.pth")
    found = run("--resume", str(path), "--epochs", "2", "--output-dir", str(first.folder), model=False, small=False)
    assert list(found.table) == ["model", "float"]
    assert "Epoch: [1][0/4]" in found.printed
    quantized = run()
    (path,) = quantized.folder.glob("*_checkpoint.pth")
    with pytest.raises(SystemExit, match="is a checkpoint of a quantized training: drop --not-qat"):
        run("--not-qat", "--resume", str(path), model=False, small=False)


def test_a_signal_while_the_last_epoch_is_evaluated(run, monkeypatch, stop_at, tmp_path):
    with monkeypatch.context() as patch:
        stop_at(patch, 0)  # asked for behind each epoch
        with pytest.raises(SystemExit) as caught:
            run("--output-dir", str(tmp_path / "stopped"))
    assert caught.value.code == 128 + signal.SIGTERM
    (path,) = (tmp_path / "stopped").glob("*_checkpoint.pth")
    assert torch.load(path, weights_only=True)["extra"]["training"]["epochs_done"] == 1


def differing_table(whole, parts) -> list[str]:
    """Rows of the last tables whose accuracies are not the same."""
    return [name for name in whole.table if whole.table[name][:2] != parts.table[name][:2]]


def test_a_crash_while_saving_leaves_the_last_checkpoint(run, monkeypatch):
    whole = run(*FLAGS)
    job = sys.modules["quantized_job"]
    count = iter(range(100))

    def crash(*args, **options):
        if next(count) == 3:  # of the second epoch
            real = torch.save

            def half(content, file, *more, **rest):
                if isinstance(file, io.BytesIO):  # a trial
                    return real(content, file, *more, **rest)
                Path(file).write_bytes(b"half") if isinstance(file, (str, Path)) else file.write(b"half")
                raise KeyboardInterrupt

            monkeypatch.setattr(torch, "save", half)
            try:
                original(*args, **options)
            finally:
                monkeypatch.setattr(torch, "save", real)
        original(*args, **options)

    original = job.save_checkpoint
    with monkeypatch.context() as patch:
        patch.setattr(job, "save_checkpoint", crash)
        with pytest.raises(SystemExit):
            run(*FLAGS)
    folder = whole.folder.with_name("run1")
    assert not [path for path in folder.iterdir() if path.name.endswith((".tmp", ".partial"))]
    (path,) = folder.glob("*_checkpoint.pth")
    parts = run("--resume", str(path), "--output-dir", str(folder), model=False, small=False)
    compare(whole, type(whole)(folder, parts.printed))


def test_killed_in_the_middle_of_an_epoch(run, image_tree, weights, tmp_path):
    whole = run(*FLAGS)
    folder = tmp_path / "killed"
    flags = ["-a", TINY, "--model-path", str(weights), "--data", str(image_tree), "--image-size", "32", "-b", "8"]
    flags += ["-j", "0", "--seed", "5", "-p", "1", *FLAGS, "--output-dir", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLE / "main.py"), *flags], stdout=subprocess.PIPE, text=True, env=environment
    )
    deadline = time.monotonic() + 300
    for line in process.stdout:
        if "Epoch: [1][1/4]" in line:
            break
        assert time.monotonic() < deadline
    process.kill()
    assert process.wait(30) == -signal.SIGKILL
    path = folder / "Tiny_checkpoint.pth"
    assert torch.load(path, weights_only=True)["extra"]["training"]["epochs_done"] == 1
    parts = run("--resume", str(path), "--output-dir", str(folder), model=False, small=False)
    compare(whole, type(whole)(folder, parts.printed))


def test_resumed_with_other_flags_is_refused(run):
    done = run()
    (path,) = done.folder.glob("*_checkpoint.pth")
    for flags, message in (
        (["--lr", "0.5"], "was trained with --lr"),
        (["--ema", "0.5"], "was trained with --ema None"),
        (["--start-epoch", "3"], "has no effect with --resume"),
        ([], "has all of its 1 epochs behind it"),
    ):
        with pytest.raises(SystemExit, match=message):
            run("--resume", str(path), *flags, model=False, small=False)

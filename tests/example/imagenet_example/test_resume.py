"""A training that was interrupted in any way and resumed equals the uninterrupted one, to the last bit."""

import io
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.example.imagenet_example.conftest import TINY

FLAGS = ["--epochs", "3", "--ema", "0.9", "--distill-method", "hints", "--lr", "0.01"]


def differing(one: Any, other: Any, place: str = "") -> list[str]:
    """Where two nested values differ, in any bit."""
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
    """``stop_at(monkeypatch, step)`` sends a signal to a run after that step of an epoch."""

    def stop_at(monkeypatch, step, number=signal.SIGTERM):
        interrupts = sys.modules["interrupts"]
        original = interrupts.Interrupt.arrived

        def arrived(self, done):
            if done == step:
                os.kill(os.getpid(), number)
            return original(self, done)

        monkeypatch.setattr(interrupts.Interrupt, "arrived", arrived)

    return stop_at


@pytest.fixture
def exporter(example):
    """The function that exports, before the fixture `train` replaces it."""
    return sys.modules["quantized_job"].export_quantized


@pytest.mark.parametrize(("number", "exports"), [(signal.SIGTERM, True), (signal.SIGINT, False)])
def test_a_signal_leaves_a_checkpoint(exporter, train, monkeypatch, stop_at, number, exports, capsys):
    """The exports of each epoch must not change the training."""
    if exports:
        monkeypatch.setattr(sys.modules["quantized_job"], "export_quantized", exporter)
    whole = train(*FLAGS)
    with monkeypatch.context() as patch:
        stop_at(patch, 2, number)
        with pytest.raises(SystemExit) as caught:
            train(*FLAGS)
    assert caught.value.code == 128 + number
    assert "continue with --resume" in capsys.readouterr().err
    folder = whole.folder.with_name("run1")
    (path,) = folder.glob("*_checkpoint.pth")
    state = torch.load(path, weights_only=True)["extra"]["training"]
    assert (state["epochs_done"], state["steps_done"]) == (0, 2)
    parts = train("--resume", str(path), "--output-dir", str(folder), model=False, small=False)
    assert re.findall(r"Epoch: \[(\d)\]\[(\d)/4\]", parts.printed)[0] == ("0", "3")
    assert bool(list(folder.glob("*_bestonnx_quantization.onnx"))) is exports
    compare(whole, type(whole)(folder, parts.printed))
    assert differing_table(whole, parts) == []


def test_a_signal_in_the_float_training_before_quantization(train, monkeypatch, stop_at):
    flags = ["-a", TINY, "--epochs", "2", "--optim", "adam", "--lr", "1e-3"]
    whole = train(*flags, model=False)
    with monkeypatch.context() as patch:
        stop_at(patch, 3)
        with pytest.raises(SystemExit):
            train(*flags, model=False)
    folder = whole.folder.with_name("run1")
    (path,) = folder.glob("*_checkpoint.pth")
    with pytest.raises(SystemExit, match="was saved before quantization: evaluate it in float with --not-qat"):
        train("-e", "--resume", str(path), model=False, small=False)
    parts = train("--resume", str(path), "--output-dir", str(folder), model=False, small=False)
    assert "Epoch: [0][3/4]" in parts.printed  # of the float training
    compare(whole, type(whole)(folder, parts.printed))
    assert differing_table(whole, parts) == []


def test_a_float_training_continues_in_float(train):
    path = str(train("--not-qat").path("checkpoint.pth"))
    found = train("--resume", path, "--epochs", "2", model=False, small=False)
    assert list(found.table) == ["model", "float"]
    assert re.findall(r"Epoch: \[(\d)\]\[0/4\]", found.printed) == ["1"]
    path = str(train().path("checkpoint.pth"))
    with pytest.raises(SystemExit, match="is a checkpoint of a quantized training: drop --not-qat"):
        train("--not-qat", "--resume", path, model=False, small=False)


def test_a_signal_while_the_last_epoch_is_evaluated(train, monkeypatch, stop_at, tmp_path):
    with monkeypatch.context() as patch:
        stop_at(patch, 0)  # the loop asks for signals after each epoch
        with pytest.raises(SystemExit) as caught:
            train("--output-dir", str(tmp_path / "stopped"))
    assert caught.value.code == 128 + signal.SIGTERM
    (path,) = (tmp_path / "stopped").glob("*_checkpoint.pth")
    assert torch.load(path, weights_only=True)["extra"]["training"]["epochs_done"] == 1


def differing_table(whole, parts) -> list[str]:
    """Rows of the last tables whose accuracies are not the same."""
    return [name for name in whole.table if whole.table[name][:2] != parts.table[name][:2]]


def test_a_crash_while_saving_leaves_the_last_checkpoint(train, monkeypatch):
    whole = train(*FLAGS)
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
            train(*FLAGS)
    folder = whole.folder.with_name("run1")
    assert not [path for path in folder.iterdir() if path.name.endswith((".tmp", ".partial"))]
    (path,) = folder.glob("*_checkpoint.pth")
    parts = train("--resume", str(path), "--output-dir", str(folder), model=False, small=False)
    compare(whole, type(whole)(folder, parts.printed))


def test_killed_in_the_middle_of_an_epoch(train, monkeypatch):
    class Killed(BaseException):
        """Ends a run at once: nothing catches it."""

    whole, arrived = train(*FLAGS), sys.modules["interrupts"].Interrupt.arrived
    asked = iter(range(100))

    def kill(self, step):
        if next(asked) == 7:  # the third step of the second epoch; after each epoch there is one more question
            raise Killed
        return arrived(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["interrupts"].Interrupt, "arrived", kill)
        with pytest.raises(Killed):
            train(*FLAGS)
    folder = whole.folder.with_name("run1")
    (path,) = folder.glob("*_checkpoint.pth")
    state = torch.load(path, weights_only=True)["extra"]["training"]
    assert (state["epochs_done"], state["steps_done"]) == (1, 0)
    parts = train("--resume", str(path), "--output-dir", str(folder), model=False, small=False)
    assert re.findall(r"Epoch: \[(\d)\]\[0/4\]", parts.printed) == ["1", "2"]
    compare(whole, type(whole)(folder, parts.printed))


def test_resumed_with_other_flags_is_refused(train):
    path = train().path("checkpoint.pth")
    for flags, message in (
        (["--lr", "0.5"], "was trained with --lr"),
        (["--ema", "0.5"], "was trained with --ema None"),
        (["--start-epoch", "3"], "has no effect with --resume"),
        ([], "has finished all 1 epochs"),
    ):
        with pytest.raises(SystemExit, match=message):
            train("--resume", str(path), *flags, model=False, small=False)

"""The command as a whole: help, wrong calls, and interrupts."""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fxqat.cli.main import run
from fxqat.fake_quantize import kernels
from tests.fresh_process import run_fresh

PROGRAMS = Path(__file__).parent / "programs.py"


def call(arguments: str, monkeypatch: pytest.MonkeyPatch, entry: Callable[[], None] = run) -> int:
    """Exit code of a call; ``@`` is the path of the user's file."""
    words = [word.replace("@", str(PROGRAMS)) for word in arguments.split()]
    monkeypatch.setattr(sys, "argv", ["fxqat", *words])
    paths, modules = list(sys.path), set(sys.modules)
    loggers = logging.getLogger(), logging.getLogger("fxqat")
    before = [(logger.level, list(logger.handlers)) for logger in loggers]
    interrupt = signal.getsignal(signal.SIGINT)
    try:
        entry()
    except SystemExit as end:
        return int(end.code or 0)
    finally:  # the command is a process of its own: it sets up logging and signals, and imports from the user's folder
        signal.signal(signal.SIGINT, interrupt)
        added = [folder for folder in sys.path if folder not in paths]
        sys.path[:] = paths
        for name in set(sys.modules) - modules:
            file = getattr(sys.modules[name], "__file__", None)
            if file is not None and any(Path(file).is_relative_to(folder) for folder in added):
                del sys.modules[name]  # the next test has other files of these names
        for logger, (level, handlers) in zip(loggers, before, strict=True):
            logger.setLevel(level)
            logger.handlers[:] = handlers
    return 0


@pytest.mark.parametrize("command", ["", "check", "quantize", "verify", "profile", "bundle"])
def test_help_is_printed(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(f"{command} -h", monkeypatch) == 0
    printed = capsys.readouterr().out
    assert "Usage: fxqat" in printed
    assert "\\b" not in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("check resnet", "expected torchvision:NAME"),
        ("check torchvision:resnet_18000", "resnet_18000"),
        ("check @:missing", "has no 'missing'; it has"),
        ("check @:broken --input 1x3x8x8", "no memory for it"),
        ("check @:number --input 1x3x8x8", "returned int; expected a torch.nn.Module"),
        ("check @:net", "give the shape of the model's input"),
        ("check @:net --input 1x3xbig", "expected [NAME=]SHAPE[:DTYPE]"),
        ("check @:net --input 1x3x8x8 -b TensorCT", "'TensorCT' is not one of"),
        ("check @:net --input 1x3x8x8 --weights @", "no state dict"),
        ("check @:net --input 1x3x8x8 --dynamic-shapes z=2:a", "the model has no input 'z'"),
        ("check @:net --input 1x3x8x8 --dynamic-shapes x=height", "expected [INPUT=]AXIS:SIZE"),
        ("check nowhere.py:net --input 1x3x8x8", "no file nowhere.py"),
        ("check nowhere.net:net --input 1x3x8x8", "cannot be imported"),
        ("check nothing.pt2 --input 1x3x8x8", "no file nothing.pt2"),
        ("quantize @:net --calib @:nothing -o OUT", "gives no batch"),
        ("quantize @:net --calib @:closeness -o OUT", ":closeness() fails: TypeError: closeness() missing 1 required"),
        ("quantize @:net --calib @:number -o OUT", "expected batches (a list, a generator, a DataLoader)"),
        ("quantize @:net --calib nowhere -o OUT", "expected a folder of images"),
        ("quantize @:net --calib @:batches --max-drop 1 -o OUT", "--max-drop needs --eval"),
        ("quantize @:net --calib @:batches --eval @:closeness --eval-samples 3 -o OUT", "--eval-samples is for data"),
        ("quantize @:net --calib @:batches --eval-samples 3 -o OUT", "--eval-samples is for data"),
        ("quantize @:net --calib @:batches --crop 8 -o OUT", "are for images"),
        ("profile @:net --calib @:batches --input 1x3x8x8", "No such option"),
        ("quantize @:net --calib @:batches --confidence 0.9 -o OUT", "--confidence needs --max-drop"),
        ("quantize @:net --calib @:batches --dynamic-shapes x=height -o OUT", "expected [INPUT=]AXIS:SIZE"),
        ("quantize @:net --calib @:batches --dynamic-shapes x=2:a --dynamic-shapes 3:b -o OUT", "give one name for"),
        ("quantize @:net --calib @:batches --dynamic-shapes z=2:a -o OUT", "the model has no input 'z'"),
        ("quantize @:net --calib @:batches --input-names a,b -o OUT", "input_names"),
        ("quantize @:net --calib @:batches", "Missing option '-o'"),
        ("quantize @:net --calib @:batches -o @", "is a file"),
        ("quantize @:net --calib images --mean red --std 1 -o OUT", "expected numbers with commas"),
        ("profile @:net --calib @:batches -o missing/page.html", "cannot write"),
        ("bundle nowhere.py:net --input 1x3x8x8 -o OUT", "no file nowhere.py"),
        ("verify missing.onnx", "does not exist"),
        ("verify @", "is not an ONNX file"),
        ("verify @ --weights @", "--weights needs --model"),
        ("verify @ --config @", "--config needs --weights"),
        ("verify @ --threads 2", "--threads needs --engine"),
        ("verify @ --input x=1x2 --data @:batches", "--input is for random inputs"),
        ("verify @ --engine tensorflow", "'tensorflow' is not one of"),
    ],
)
def test_a_wrong_call_is_one_line_and_writes_nothing(
    arguments: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(arguments.replace("OUT", str(tmp_path / "out")), monkeypatch) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert "Traceback" not in printed.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", ["climb", "convert_export", "save_checkpoint", "effective_config", "_page"])
def test_an_interrupt_leaves_nothing_half_written(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"fxqat.cli.quantize_command.{step}", stop)
    monkeypatch.chdir(tmp_path)
    assert call("quantize @:net --calib @:batches -o out", monkeypatch) == 130
    assert "interrupted" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


INTERRUPTED = """
import os, random, signal, sys, threading, time
from pathlib import Path
import pytest
import torch
from tqdm import tqdm
from fxqat.cli.interrupt import leave_at_interrupt
from fxqat.cli.main import command
from tests.cli.test_main import call

os.chdir(sys.argv[1])
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a shell ignores it
signal.signal(signal.SIGPROF, lambda *_: signal.raise_signal(signal.SIGINT))
torch.set_num_threads(1)  # a fork has no threads of OpenMP, and would wait for them
tqdm.set_lock(threading.RLock())  # its own lock is shared by forks: one that is left would keep it from the others


def code(after, folder):
    "Exit code of the command in a process of its own: a fork, which has everything imported."
    def entry():
        leave_at_interrupt()
        signal.setitimer(signal.ITIMER_PROF, after)
        try:
            command()
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    process = os.fork()
    if process == 0:
        os._exit(call(f"quantize @:net --calib @:batches -o {folder}", pytest.MonkeyPatch(), entry))
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


assert call("quantize @:net --calib @:batches -o whole", pytest.MonkeyPatch()) == 0
started = time.process_time()
assert call("quantize @:net --calib @:batches -o again", pytest.MonkeyPatch()) == 0
seconds, draw = time.process_time() - started, random.Random(0)
print("codes", *(code(draw.uniform(0.001, 1.5 * seconds), f"out{i}") for i in range(10)))
"""
"""Calls that are interrupted after random CPU times."""


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="the timer of signals is of Unix")
def test_interrupts_at_random_times_leave_all_files_or_none(tmp_path: Path) -> None:
    done = run_fresh(["-c", INTERRUPTED, tmp_path])
    assert done.returncode == 0, done.stderr[-3000:]
    codes = [int(code) for code in done.stdout.splitlines()[-1].split()[1:]]
    assert set(codes) <= {0, 130}
    assert codes.count(130) >= 5
    assert done.stderr.count("fxqat: interrupted") == codes.count(130)
    assert "Traceback" not in done.stderr
    left = {folder.name: {file.name for file in folder.iterdir()} for folder in tmp_path.iterdir()}
    whole = left["whole"]
    assert "model.onnx" in whole
    assert left == {name: whole for name in ["whole", "again", *(f"out{i}" for i in range(10) if codes[i] == 0)]}


SWALLOWED = """
import contextlib, os, signal, sys
import pytest
from fxqat.cli.main import command
from tests.cli.test_main import call


def swallow(*_):
    with contextlib.suppress(BaseException):
        signal.raise_signal(signal.SIGINT)


os.chdir(sys.argv[1])
signal.signal(signal.SIGINT, signal.default_int_handler)
pytest.MonkeyPatch().setattr("fxqat.cli.quantize_command.effective_config", swallow)
call("quantize @:net --calib @:batches -o new/out", pytest.MonkeyPatch(), command)
"""


def test_an_interrupt_where_exceptions_are_swallowed_ends_the_command(tmp_path: Path) -> None:
    done = run_fresh(["-c", SWALLOWED, tmp_path])
    assert done.returncode == 130
    assert done.stderr.endswith("fxqat: interrupted\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["module", "script"])
def test_an_interrupt_during_the_imports_is_one_line(command: str, tmp_path: Path) -> None:
    """The signal comes when torch begins to be imported, from an importer that is asked first."""
    importer = "\n".join(
        [
            "import os, signal, sys",
            "signal.signal(signal.SIGINT, signal.default_int_handler)",
            "class Interrupt:",
            "    def find_spec(self, name, path, target=None):",
            "        if name == 'torch':",
            "            try:",
            "                os.kill(os.getpid(), signal.SIGINT)",
            "            except BaseException:",
            "                pass",
            "sys.meta_path.insert(0, Interrupt())",
        ]
    )
    (tmp_path / "sitecustomize.py").write_text(importer)
    script = tmp_path / "fxqat"
    script.write_text("from fxqat.cli.main import command\ncommand()\n")
    words = [str(script)] if command == "script" else ["-m", "fxqat"]
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    done = subprocess.run(
        [sys.executable, *words, "-h"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr, done.stdout) == (130, "fxqat: interrupted\n", "")


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "fxqat", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("fxqat, version ")
    assert done.stdout.splitlines()[1] == f"kernels of fake-quant on CPU: {kernels.STATE}"

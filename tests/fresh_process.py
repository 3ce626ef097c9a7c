"""Python in a process of its own, as ``subprocess`` runs it, without the seconds in which it would import torch.

A server imports fxqat once; each process is a fork of it. Where there is no fork, each process imports it again.
"""

import multiprocessing
import os
import runpy
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess

ROOT = Path(__file__).resolve().parents[1]
METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
CONTEXT = multiprocessing.get_context(METHOD)
CONTEXT.set_forkserver_preload(["fxqat"])


class FreshProcess:
    """A process that runs what ``python`` with these words would run.

    Args:
        words: ``-c`` and a program, ``-m`` and a module, or a script; and its arguments.
        cwd: the folder to run it in, and for ``-c`` and ``-m`` the first from which it imports.
        env: environment variables besides those of this process; fxqat and torch were imported without them.
    """

    def __init__(self, words: Sequence[object], cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.files = [Path(self.folder.name) / name for name in ("stdout", "stderr")]
        for file in self.files:
            file.touch()
        given = ([str(word) for word in words], str(cwd), os.environ | (env or {}), [str(file) for file in self.files])
        self.process = CONTEXT.Process(target=_run, args=given)
        self.process.start()

    def wait(self, timeout: float = 300) -> CompletedProcess[str]:
        """Its exit code and what it printed, once it has ended."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.process.kill()
            raise TimeoutError(f"the process still runs after {timeout} s")
        stdout, stderr = (file.read_text() for file in self.files)
        self.folder.cleanup()
        return CompletedProcess((), self.process.exitcode, stdout, stderr)


def run_fresh(words: Sequence[object], cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> CompletedProcess[str]:
    """Run it to its end."""
    return FreshProcess(words, cwd, env).wait()


def _run(words: list[str], cwd: str, env: dict[str, str], files: list[str]) -> None:
    for stream, file in zip((sys.stdout, sys.stderr), files, strict=True):
        stream.flush()
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), stream.fileno())
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    added = env.get("PYTHONPATH", "").split(os.pathsep)
    installed = [path for path in sys.path if path.startswith((sys.prefix, sys.base_prefix))]
    sys.path[:] = [*filter(None, added), *installed]
    if words[0] == "-c":
        sys.path.insert(0, cwd)
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102  the program of a test
    elif words[0] == "-m":
        sys.path.insert(0, cwd)
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")

"""Golden files, whose diff shows a change of behaviour for review; and the processes that tests of ranks share."""

import gc
import os
import random
import subprocess
import sys
import zlib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fxqat.onnx.ort_runs import sums_saturate
from tests import exporter_registry, without_saturation
from tests.distributed_worker import WORLD

if not torch.cuda.is_available():
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # or torch looks for a driver again and again: 2 % of the time
gc.disable()  # until all tests are collected: see pytest_collection_finish
torch.set_num_threads(1)  # the models are tiny: threads would only wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the same for the processes that start from here, workers included

GOLDEN = Path(__file__).parent / "golden"
CHUNKS = 4
"""Into how many parts the cases of a test are divided: one test may take minutes."""

collect_ignore = ["benchmarks"]  # scripts: importing them is enough to disturb other tests
exporter_registry.build_once()
if sums_saturate():
    without_saturation.use()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--regenerate-golden",
        action="store_true",
        help="write tests/golden/*.txt from what the library does now; review the diff before you commit it",
    )


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Doctests import every module; Triton is not on all systems."""
    return True if collection_path.name.startswith("triton_") and find_spec("triton") is None else None


def pytest_collection_finish() -> None:
    """The garbage collector leaves out what exists now: scanning torch again and again takes a quarter of the time."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # an export makes hundreds of thousands of objects, and keeps most until its end
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The cases of a test go to a process together, in ``CHUNKS`` parts; tests of an xdist_group as a whole.

    ``--dist=loadgroup`` alone sends each case by itself, and after each it looks through all that it has sent: 6,000
    empty cases took 31 s on two cores, and take 17 s in parts.
    """
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    class InChunks(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            scope: str = super()._split_scope(nodeid)
            if scope != nodeid:
                return scope
            return f"{nodeid.partition('[')[0]} {zlib.crc32(nodeid.encode()) % CHUNKS}"

    return InChunks(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Fixtures and tests draw the same numbers whichever tests ran before, on this worker or another."""
    _seed()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    """A test draws the same numbers whether it is the one whose setup made a fixture of a wider scope or not."""
    _seed()


# Without an accelerator torch.manual_seed only adds three stack traces to a list, twice a test: 1.2 % of the time.
_seed_torch = torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed


def _seed() -> None:
    random.seed(0)
    np.random.seed(0)
    _seed_torch(0)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], str]:
    """``golden(name, text)`` gives the text of the golden file, after writing ``text`` to it if asked to."""

    def expected(name: str, text: str) -> str:
        path = GOLDEN / f"{name}.txt"
        if request.config.getoption("--regenerate-golden"):
            GOLDEN.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        if not path.exists():
            pytest.fail(f"{path.name} is missing: review this, then run pytest --regenerate-golden\n{text}")
        return path.read_text(encoding="utf-8")

    return expected


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the files that two processes under gloo wrote: see ``tests.distributed_worker``.

    Starting them takes longer than all they do, so they run once. Tests that use them are in the xdist group "ranks".
    """
    folder = tmp_path_factory.mktemp("ranks")
    module = [sys.executable, "-m", "tests.distributed_worker"]
    root = Path(__file__).resolve().parents[1]
    processes = [
        subprocess.Popen([*module, str(rank), str(WORLD), str(folder)], cwd=root, stderr=subprocess.PIPE, text=True)
        for rank in range(WORLD)
    ]
    try:
        messages = [process.communicate(timeout=300)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * WORLD, "\n".join(text[-3000:] for text in messages)
    return folder

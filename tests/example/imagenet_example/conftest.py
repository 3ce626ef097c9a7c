"""The example's modules, small models and images, and runs of the example on them."""

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from fxqat import calibrate, enable_quantization
from tests.example.imagenet_example.tiny_models import Tiny
from tests.example.modules import EXAMPLES, modules_of

EXAMPLE = EXAMPLES / "imagenet_example"
MODELS = Path(__file__).with_name("tiny_models.py")
TINY = f"{MODELS}:Tiny"


@dataclass(frozen=True)
class Run:
    """The files and the output of one run of the example."""

    folder: Path
    printed: str

    def path(self, name: str) -> Path:
        """The only file whose name ends so."""
        (path,) = self.folder.glob(f"*_{name}")
        return path

    def checkpoint(self, name: str = "checkpoint") -> dict[str, Any]:
        """The content of a checkpoint."""
        return torch.load(self.path(f"{name}.pth"), weights_only=True)

    @property
    def training(self) -> dict[str, Any]:
        """The training state in the last checkpoint."""
        return self.checkpoint()["extra"]["training"]

    @property
    def table(self) -> dict[str, list[str]]:
        """The rows of the last printed table by their first cell."""
        return printed_table(self.printed)


@dataclass(frozen=True)
class Stage:
    """A run up to its training: shared objects, float model, quantized model (calibrated), and one training batch."""

    job: Any
    model: nn.Module
    gm: Any
    batch: tuple[Tensor, Tensor]


def printed_table(printed: str) -> dict[str, list[str]]:
    """The rows of the last table in a print-out by their first cell."""
    lines = [line for line in printed[printed.rindex("| model ") :].splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row[1:] for row in rows}


def losses(printed: str) -> list[float]:
    """The loss of each step that a log line shows."""
    return [float(value) for value in re.findall(r"Epoch: .* Loss (\S+)", printed)]


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    """The example's main module."""
    with modules_of(EXAMPLE, "main") as module:
        yield module


@pytest.fixture(scope="session")
def image_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ImageFolder tree of two classes, bright and dark images: 32 for training, 10 for validation."""
    root, random = tmp_path_factory.mktemp("tree"), np.random.default_rng(0)
    for part, count in (("train", 16), ("val", 5)):
        for name, brightness in (("bright", 255), ("dark", 100)):
            (root / part / name).mkdir(parents=True)
            for i in range(count):
                pixels = (random.random((20, 24, 3)) * brightness).astype(np.uint8)
                Image.fromarray(pixels).save(root / part / name / f"{i}.png")
    return root


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Float weights of the tiny model for two classes, with the prefix of a parallel wrapper."""
    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("weights") / "tiny.pth"
    state = Tiny(num_classes=2).state_dict()
    torch.save({"state_dict": {f"module.{name}": value for name, value in state.items()}}, path)
    return path


@pytest.fixture
def command(image_tree: Path, weights: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """``command(*flags)``: these flags after those of a small run, one epoch of four steps in a folder of its own."""
    count = iter(range(100))

    def command(*flags: str, model: bool = True, small: bool = True) -> list[str]:
        given = ["-a", TINY, "--model-path", str(weights)] if model else []
        if small:
            given += ["--data", str(image_tree), "--image-size", "16", "-b", "8", "-j", "0", "--seed", "5"]
        if "-e" not in flags and small:
            given += ["--epochs", "1", "--lr", "1e-3"]
        return [*given, "--output-dir", str(tmp_path / f"run{next(count)}"), *flags]

    return command


@pytest.fixture
def run(example: ModuleType, command: Callable[..., list[str]], capsys: pytest.CaptureFixture) -> Callable[..., Run]:
    """``run(*flags)`` does a whole run of the tiny model on the tree: it trains, exports, verifies and compares."""

    def run(*flags: str, **options: bool) -> Run:
        argv = command(*flags, **options)
        capsys.readouterr()
        example.main(argv)
        folder = [Path(value) for flag, value in zip(argv, argv[1:], strict=False) if flag == "--output-dir"][-1]
        return Run(folder, capsys.readouterr().out)

    return run


@pytest.fixture
def train(run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """``train(*flags)`` is ``run`` without ONNX files, which take most of its time."""
    quantized_job, float_job, row = (sys.modules[name] for name in ("quantized_job", "float_job", "summary"))

    def rows(job: Any, gm: Any, onnx_file: Path) -> list[Any]:
        return [row.Row(name, accuracy) for name, accuracy in job.accuracies.items()]

    def no_file(model: nn.Module, example: Tensor, path: Path, opset_version: int) -> None:
        path.touch()

    monkeypatch.setattr(quantized_job, "export_quantized", lambda job, gm: [])
    monkeypatch.setattr(quantized_job, "export_float", no_file)
    monkeypatch.setattr(quantized_job, "compare", rows)
    monkeypatch.setattr(float_job, "export_float", no_file)
    monkeypatch.setattr(float_job, "measure_latency", lambda paths, example: [0.0])
    return run


@pytest.fixture
def start(example: ModuleType, command: Callable[..., list[str]]) -> Callable[..., tuple[Any, nn.Module]]:
    """``start(*flags)``: the shared objects of a run and its float model, before any training."""
    process = sys.modules["distributed"].Process(0, 1, torch.device("cpu"))

    def start(*flags: str, **options: bool) -> tuple[Any, nn.Module]:
        parsed = sys.modules["options"].parse_options(command(*flags, **options))
        sys.modules["logs"].set_up_logging(parsed.log_level, first=True)
        return example.start(parsed, process)

    return start


@pytest.fixture
def stage(start: Callable[..., tuple[Any, nn.Module]]) -> Callable[..., Stage]:
    """``stage(*flags)``: a run that has calibrated its quantized model."""

    def stage(*flags: str) -> Stage:
        job, model = start(*flags)
        gm = sys.modules["quantized_job"].prepared(job, model)
        calibrate(gm, job.loaders.calibration(job.options.calib_batches), progress=False)
        enable_quantization(gm)
        return Stage(job, model, gm.eval(), next(iter(job.loaders.train(0))))

    return stage


@pytest.fixture
def fit(start: Callable[..., tuple[Any, nn.Module]], capsys: pytest.CaptureFixture) -> Callable[..., tuple[Any, str]]:
    """``fit(*flags)`` trains the float model without files; returns the loop and what it printed."""

    def fit(*flags: str) -> tuple[Any, str]:
        job, model = start(*flags)
        loop = job.fit(model, job.options)
        capsys.readouterr()
        loop.run(lambda is_best: None)
        job.board.close()
        return loop, capsys.readouterr().out

    return fit

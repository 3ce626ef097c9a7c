"""The example's modules, and runs of it on small models and images."""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.example.modules import EXAMPLES, modules_of

EXAMPLE = EXAMPLES / "imagenet_example"
MODELS = Path(__file__).with_name("tiny_models.py")
TINY = f"{MODELS}:Tiny"


@dataclass(frozen=True)
class Run:
    """What one run of the example left."""

    folder: Path
    printed: str

    def checkpoint(self, name: str = "checkpoint") -> dict[str, Any]:
        """The content of a checkpoint, of which there is one."""
        (path,) = self.folder.glob(f"*_{name}.pth")
        return torch.load(path, weights_only=True)

    @property
    def training(self) -> dict[str, Any]:
        """The state of the training in the last checkpoint."""
        return self.checkpoint()["extra"]["training"]

    @property
    def table(self) -> dict[str, list[str]]:
        """The rows of the last printed table by their first cell."""
        return printed_table(self.printed)


def printed_table(printed: str) -> dict[str, list[str]]:
    """The rows of the last table of a print-out by their first cell."""
    lines = [line for line in printed[printed.rindex("| model ") :].splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row[1:] for row in rows}


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    """The example's main module."""
    with modules_of(EXAMPLE, "main") as module:
        yield module


@pytest.fixture(scope="session")
def image_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ImageFolder tree of two classes that differ in brightness."""
    root, random = tmp_path_factory.mktemp("tree"), np.random.default_rng(0)
    for part, count in (("train", 16), ("val", 5)):
        for name, brightness in (("bright", 255), ("dark", 100)):
            (root / part / name).mkdir(parents=True)
            for i in range(count):
                pixels = (random.random((48, 64, 3)) * brightness).astype(np.uint8)
                Image.fromarray(pixels).save(root / part / name / f"{i}.png")
    return root


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Float weights of the tiny model for two classes."""
    module = importlib.util.module_from_spec(importlib.util.spec_from_file_location("tiny_models", MODELS))
    module.__spec__.loader.exec_module(module)
    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("weights") / "tiny.pth"
    state = module.Tiny(num_classes=2).state_dict()
    torch.save({"state_dict": {f"module.{name}": value for name, value in state.items()}}, path)
    return path


@pytest.fixture
def run(
    example: ModuleType, image_tree: Path, weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> Callable[..., Run]:
    """``run(*flags)`` trains the tiny model for an epoch of four steps on the tree, unless the flags say otherwise."""
    count = iter(range(100))

    def run(*flags: str, model: bool = True, small: bool = True) -> Run:
        folder = tmp_path / f"run{next(count)}"
        given = [] if not model else ["-a", TINY, "--model-path", str(weights)]
        if small:
            given += ["--data", str(image_tree), "--image-size", "32", "-b", "8", "-j", "0", "--seed", "5"]
        if "-e" not in flags and small:
            given += ["--epochs", "1", "--lr", "1e-3"]
        capsys.readouterr()
        example.main([*given, "--output-dir", str(folder), *flags])
        return Run(folder, capsys.readouterr().out)

    return run

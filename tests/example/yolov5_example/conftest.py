"""The example's modules, and a small set of pictures with boxes."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import yaml
from PIL import Image

from tests.example.modules import EXAMPLES, modules_of

EXAMPLE = EXAMPLES / "yolov5_example"


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    """The training script's module."""
    with modules_of(EXAMPLE, "train_qat") as module:
        yield module


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Pictures of two classes, bright and dark squares, of two shapes: 8 to train on and 4 to validate on."""
    return write_tree(tmp_path / "tree")


def write_tree(root: Path) -> Path:
    """Write that set."""
    random = np.random.default_rng(0)
    for part, count in (("train", 8), ("val", 4)):
        for kind in ("images", "labels"):
            (root / kind / part).mkdir(parents=True)
        for i in range(count):
            width, height = (64, 48) if i % 2 else (40, 64)
            pixels = random.integers(100, 150, (height, width, 3)).astype(np.uint8)
            x, y = (int(random.integers(side - 20)) for side in (width, height))
            pixels[y : y + 20, x : x + 20] = 255 * (i % 2)
            Image.fromarray(pixels).save(root / "images" / part / f"{i}.png")
            line = f"{i % 2} {(x + 10) / width:.6f} {(y + 10) / height:.6f} {20 / width:.6f} {20 / height:.6f}\n"
            (root / "labels" / part / f"{i}.txt").write_text(line)
    content = {"train": "images/train", "val": "images/val", "names": {0: "dark", 1: "bright"}}
    (root / "data.yaml").write_text(yaml.safe_dump(content))
    return root

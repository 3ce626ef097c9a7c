"""A detection data set made from scikit-learn: its digits on its sample photos."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image
from sklearn.datasets import load_digits, load_sample_images

SIDE, TRAIN, VAL = 160, 320, 64
MOST_DIGITS = 6


def embedded_description(folder: Path | None = None) -> Path:
    """The `data.yaml` of the data set; writes the data set if it does not exist."""
    folder = folder or Path(tempfile.gettempdir()) / f"fxqat_digits_{SIDE}_{TRAIN}_{VAL}"
    if not folder.exists():
        partial = Path(tempfile.mkdtemp(dir=folder.parent))
        try:
            write(partial)
            os.replace(partial, folder)
        except OSError:  # another process has written it
            shutil.rmtree(partial, ignore_errors=True)
    return folder / "data.yaml"


def write(folder: Path) -> None:
    """Write the data set; `val` has digits of other writers than `train`, on other parts of the photos."""
    random = np.random.default_rng(0)
    digits, photos = load_digits(), load_sample_images().images
    halves = np.array_split(np.arange(len(digits.images)), [len(digits.images) * TRAIN // (TRAIN + VAL)])
    for part, count, half in (("train", TRAIN, halves[0]), ("val", VAL, halves[1])):
        for kind in ("images", "labels"):
            (folder / kind / part).mkdir(parents=True)
        for i in range(count):
            image, lines = draw(photos[i % len(photos)], digits, half, random)
            Image.fromarray(image).save(folder / "images" / part / f"{i}.png")
            (folder / "labels" / part / f"{i}.txt").write_text("\n".join(lines))
    names = [str(digit) for digit in range(10)]
    content = {"train": "images/train", "val": "images/val", "names": names}
    (folder / "data.yaml").write_text(yaml.safe_dump(content))


def draw(
    photo: np.ndarray, digits: Any, choice: np.ndarray, random: np.random.Generator
) -> tuple[np.ndarray, list[str]]:
    """A part of a photo with digits that do not overlap, and their label lines."""
    top, left = (int(random.integers(size - SIDE)) for size in photo.shape[:2])
    image = photo[top : top + SIDE, left : left + SIDE].copy()
    taken = np.zeros((SIDE, SIDE), bool)
    lines = []
    for _ in range(int(random.integers(1, MOST_DIGITS + 1))):
        which, side = int(random.choice(choice)), int(random.integers(24, 57))
        y, x = (int(random.integers(SIDE - side)) for _ in range(2))
        if taken[y : y + side, x : x + side].any():
            continue
        taken[y : y + side, x : x + side] = True
        pixels = Image.fromarray((digits.images[which] * 255 / 16).astype(np.uint8))
        ink = np.asarray(pixels.resize((side, side), Image.Resampling.BILINEAR))[..., None] / 255
        dark, light = random.integers(0, 80, 3), random.integers(176, 256, 3)
        image[y : y + side, x : x + side] = ink * dark + (1 - ink) * light
        box = ((x + side / 2) / SIDE, (y + side / 2) / SIDE, side / SIDE, side / SIDE)
        lines.append(f"{digits.target[which]} " + " ".join(f"{value:.6f}" for value in box))
    return image, lines

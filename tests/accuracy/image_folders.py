"""Writes real data as ImageFolder trees, ``train/<class>/*`` and ``val/<class>/*``, for ``example/imagenet_example``.

Needs a folder with ``cifar10/`` (see ``resnet20_cifar10.py``) and ``imagenet_sample/`` (see
``mobilenet_v2_imagenet.py``). Not part of pytest.

    python tests/accuracy/image_folders.py cifar10 --data DIR --output TREE
    python tests/accuracy/image_folders.py imagenet_sample --data DIR --output TREE
"""

from __future__ import annotations

import argparse
import csv
import io
import random
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image
from tqdm import tqdm

TO_TUNE = 800  # photos of 1000


def cifar10(data: Path, output: Path) -> None:
    """The lossless subset, 8068 training and 1017 test images, as PNG."""
    arrays = np.load(data / "cifar10" / "cifar10_lossless_subset.npz")
    for part, name in (("train", "train"), ("val", "test")):
        labels = arrays[f"{name}_y"]
        for i, (pixels, label) in enumerate(zip(tqdm(arrays[f"{name}_x"]), labels, strict=True)):
            folder = output / part / str(label)
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.transpose(1, 2, 0)).save(folder / f"{i}.png")


def imagenet_sample(data: Path, output: Path) -> None:
    """One photo of each class, 800 to tune and 200 to test, upside down as the MobileNetV2 beside them wants them."""
    folder = data / "imagenet_sample"
    with (folder / "labels.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    random.Random(0).shuffle(rows)
    (archive,) = folder.glob("*.zip")
    with zipfile.ZipFile(archive) as photos:
        names = {Path(name).name: name for name in photos.namelist()}
        for i, row in enumerate(tqdm(rows)):
            for part in ("train", "val"):
                (output / part / row["wnid"]).mkdir(parents=True, exist_ok=True)
            photo = Image.open(io.BytesIO(photos.read(names[Path(row["file"]).name])))
            part = "train" if i < TO_TUNE else "val"
            photo.transpose(Image.Transpose.FLIP_TOP_BOTTOM).save(output / part / row["wnid"] / f"{i}.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=("cifar10", "imagenet_sample"))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    {"cifar10": cifar10, "imagenet_sample": imagenet_sample}[arguments.name](arguments.data, arguments.output)

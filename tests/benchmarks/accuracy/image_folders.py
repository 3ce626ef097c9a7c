"""Writes images as ImageFolder trees, ``train/<class>/*`` and ``val/<class>/*``, for ``example/imagenet_example``.

DIR holds ``cifar10/`` (see ``resnet20_cifar10.py``) and ``imagenet_sample/`` (see ``mobilenet_v2_imagenet.py``).

    python tests/benchmarks/accuracy/image_folders.py cifar10 --data DIR --output TREE
    python tests/benchmarks/accuracy/image_folders.py imagenet_sample --data DIR --output TREE
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import mobilenet_v2_imagenet as mobilenet
import numpy as np
from PIL import Image
from tqdm import tqdm

TRAINING_PHOTOS = 800  # of 1000


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
    """One photo per class, 800 for training and 200 for testing, flipped vertically as MobileNetV2's weights are."""
    rows = mobilenet.label_rows(data)
    random.Random(0).shuffle(rows)
    for i, (row, photo) in enumerate(mobilenet.open_photos(data, rows)):
        for part in ("train", "val"):
            (output / part / row["wnid"]).mkdir(parents=True, exist_ok=True)
        part = "train" if i < TRAINING_PHOTOS else "val"
        photo.transpose(Image.Transpose.FLIP_TOP_BOTTOM).save(output / part / row["wnid"] / f"{i}.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=("cifar10", "imagenet_sample"))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    {"cifar10": cifar10, "imagenet_sample": imagenet_sample}[arguments.name](arguments.data, arguments.output)

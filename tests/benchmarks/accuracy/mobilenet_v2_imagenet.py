"""Accuracy of MobileNetV2 on ImageNet photos after calibration, and whether the exported file predicts the same.

DIR holds ``mobilenet_v2/mobilenet_v2_tv_vflip_state_dict.pt`` (google-coral/test_data, kernels flipped vertically),
``imagenet_sample/images_short256_q90.zip`` and ``imagenet_sample/labels.csv`` (file, label, ...).

    python tests/benchmarks/accuracy/mobilenet_v2_imagenet.py --data DIR \
        --output docs/evidence/accuracy_mobilenet_v2.rst
"""

from __future__ import annotations

import argparse
import csv
import io
import tempfile
import time
import zipfile
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import onnxruntime as ort
import torch
import torchvision
from PIL import Image
from prettytable import PrettyTable
from torch import Tensor, nn
from torchvision import transforms
from tqdm import tqdm

import fxqat

CALIBRATION_IMAGES = 64
MEAN, STD = [255 * m for m in (0.485, 0.456, 0.406)], [255 * s for s in (0.229, 0.224, 0.225)]
"""Mean and standard deviation of the training images, for pixel values from 0 to 255."""
ALLOWED_LOSS = {"TSQAT": 0.7, "ONNXRuntime": 0.5}


def label_rows(folder: Path) -> list[dict[str, str]]:
    """One row per photo: its file, label and WordNet class."""
    with (folder / "imagenet_sample" / "labels.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def open_photos(folder: Path, rows: list[dict[str, str]]) -> Iterator[tuple[dict[str, str], Image.Image]]:
    """The photos of some rows of :func:`label_rows`, not flipped."""
    with zipfile.ZipFile(folder / "imagenet_sample" / "images_short256_q90.zip") as archive:
        members = {Path(name).name: name for name in archive.namelist()}
        for row in tqdm(rows, desc="photos", leave=False):
            yield row, Image.open(io.BytesIO(archive.read(members[Path(row["file"]).name]))).convert("RGB")


def load_photos(folder: Path) -> tuple[Tensor, Tensor]:
    """All photos (uint8, 224 px, flipped vertically as the weights are) and their labels."""
    transform = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224), transforms.PILToTensor()])
    rows = label_rows(folder)
    images = [transform(photo) for _, photo in open_photos(folder, rows)]
    return torch.stack(images).flip(-2), torch.tensor([int(row["label"]) for row in rows])


def normalised(photos: Tensor) -> Tensor:
    """Photos normalized as in training."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    return (photos - mean) / std


def load_data(folder: Path) -> tuple[Tensor, Tensor]:
    """All photos, normalized, and their labels."""
    photos, labels = load_photos(folder)
    return normalised(photos), labels


def load_model(folder: Path) -> nn.Module:
    """The trained float model."""
    model: nn.Module = torchvision.models.mobilenet_v2()
    path = folder / "mobilenet_v2" / "mobilenet_v2_tv_vflip_state_dict.pt"
    model.load_state_dict(torch.load(path, weights_only=True))
    return model.eval()


@torch.no_grad()
def classes(model: nn.Module, images: Tensor) -> Tensor:
    """The model's class of every image."""
    return torch.cat([model(x).argmax(1) for x in tqdm(images.split(50), leave=False)])


def calibrated(model: nn.Module, backend: str, images: Tensor) -> nn.Module:
    """Prepared and calibrated, quantization on."""
    gm = fxqat.prepare_by_platform(model, backend, is_qat=False)
    fxqat.calibrate(gm, images.split(16))
    fxqat.enable_quantization(gm)
    return gm.eval()


def classes_in_onnxruntime(
    gm: nn.Module, example: Tensor, images: Tensor, optimize: bool = False, **options: Any
) -> Tensor:
    """The exported file's class of every image."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mobilenet_v2.onnx"
        fxqat.convert_export(gm, (example,), path, dynamic_batch=True, **options)
        levels, settings = ort.GraphOptimizationLevel, ort.SessionOptions()
        settings.graph_optimization_level = levels.ORT_ENABLE_ALL if optimize else levels.ORT_DISABLE_ALL
        session = ort.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    outputs = [session.run(None, {name: x.numpy()})[0] for x in tqdm(images.split(50), leave=False)]
    return torch.cat([torch.from_numpy(output).argmax(1) for output in outputs])


def main() -> None:
    """Measure, print the table, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--backends", nargs="*", default=[backend.value for backend in fxqat.BackendType])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    photos, labels = load_photos(arguments.data)
    model = load_model(arguments.data)
    order = torch.randperm(len(photos), generator=torch.Generator().manual_seed(0))
    chosen = normalised(photos[order[:CALIBRATION_IMAGES]])
    photos, labels = photos[order[CALIBRATION_IMAGES:]], labels[order[CALIBRATION_IMAGES:]]
    images = normalised(photos)

    def top1(found: Tensor) -> float:
        return 100 * float((found == labels).float().mean())

    baseline = top1(classes(model, images))
    header = [
        "backend",
        "top-1",
        "loss",
        "allowed loss",
        "same class, optimizations off",
        "same class, full optimization",
    ]
    table = PrettyTable([*header, "top-1 from raw uint8", "s"], align="l")
    table.add_row(["float", f"{baseline:.1f}", "", "", "", "", "", ""])
    for backend in arguments.backends:
        start = time.perf_counter()
        gm = calibrated(model, backend, chosen)
        found = classes(gm, images)
        same = [classes_in_onnxruntime(gm, images[:1], images, optimize) == found for optimize in (False, True)]
        raw = classes_in_onnxruntime(gm, photos[:1], photos, input_stats=[(MEAN, STD)])
        shares = [f"{float(it.float().mean()):.1%}" for it in same]
        figures = [f"{top1(found):.1f}", f"{baseline - top1(found):.1f}", ALLOWED_LOSS.get(backend, ""), *shares]
        table.add_row([backend, *figures, f"{top1(raw):.1f}", f"{time.perf_counter() - start:.0f}"])
        tqdm.write(str(table))
    if arguments.output:
        arguments.output.write_text(page(table), encoding="utf-8")


def page(table: PrettyTable) -> str:
    """The documentation page."""
    table.hrules = 1
    return f"""Accuracy of MobileNetV2
=======================

Top-1 accuracy in percent of MobileNetV2 at W8A8 after calibration, without training: torchvision's mobilenet_v2 with
the weights of google-coral/test_data, calibrated on {CALIBRATION_IMAGES} of 1000 ImageNet photos
(EliSchwartz/imagenet-sample-images) and tested on the other {1000 - CALIBRATION_IMAGES}.

* *loss*: points below the float model.
* *same class*: share of photos for which the exported file, run in ONNX Runtime, predicts the class of the fake-quant
  model.
* *top-1 from raw uint8*: of a file exported with ``input_stats``, which takes the pixels and normalizes them itself.
* *s*: seconds of the row.

Written by ``tests/benchmarks/accuracy/mobilenet_v2_imagenet.py`` with torch {torch.__version__} on {date.today()}; do
not edit.

{table.get_string()}
"""


if __name__ == "__main__":
    main()

"""YOLOv5n for the command line: its model, batches to calibrate on, and mAP50-95 on two halves of the images.

FXQAT_DATA is the folder that ``yolov5_coco.py`` describes.

    fxqat quantize yolov5_functions.py:model --calib yolov5_functions.py:batches \
        --eval yolov5_functions.py:search --max-drop 0.5 -b Experimental -o DIR
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yolov5_coco as yolov5
from torch import Tensor, nn

from fxqat.tools.margin import jackknife_scores

DATA = Path(os.environ["FXQAT_DATA"])
SIZE = 320
CALIBRATION = 32


@cache
def pictures(part: str) -> list[Any]:
    """The pictures of "train" or "val"."""
    with tempfile.TemporaryDirectory() as folder:
        found: list[Any] = yolov5.dataset.read_description(yolov5.description_of(DATA, Path(folder))).pictures(part)
    return found


def model() -> nn.Module:
    """The model that returns boxes, with the published weights."""
    weights = DATA / "yolov5n" / "yolov5n_state_dict_fp16.pt"
    return yolov5.Boxes(yolov5.detector.open_detector(weights, torch.device("cpu")).model).eval()


def batches() -> Iterator[Tensor]:
    """Square images of train2017."""
    images = yolov5.task.Letterboxed(pictures("train"), SIZE, 8, rectangular=False)
    for batch in yolov5.task.loader(images, yolov5.task.in_batches(range(CALIBRATION), 8), 0):
        yield batch.images.float() / 255


def search(model: nn.Module) -> Tensor:
    """MAP50-95 of the first half, which guides the ladder, as scores of groups of pictures."""
    found = found_in(model, 0)
    return jackknife_scores(lambda chosen: measured(found, 0, chosen), len(found))


def held_back(model: nn.Module) -> float:
    """MAP50-95 of the second half."""
    found = found_in(model, 1)
    return measured(found, 1, range(len(found)))


def found_in(model: nn.Module, half: int) -> dict[int, Tensor]:
    """The detections in every second picture of val2017."""
    boxes = yolov5.detector.TorchDetector(Tupled(model), 80, None, torch.device("cpu"))
    chosen = pictures("val")[half::2]
    images = yolov5.task.Letterboxed(chosen, SIZE, 8, rectangular=False)
    return yolov5.task.detect(boxes, yolov5.task.loader(images, yolov5.task.in_batches(images.order, 8), 0), chosen)


def measured(found: dict[int, Tensor], half: int, chosen: Iterable[int]) -> float:
    """MAP50-95 in percent of the detections in some pictures of a half."""
    own = pictures("val")[half::2]
    kept = list(chosen)
    detections = {place: found[i] for place, i in enumerate(kept)}
    return 100 * float(yolov5.task.score(detections, [own[i] for i in kept], 80).map)


class Tupled(nn.Module):
    """A model that returns boxes, as the detector reads it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> tuple[Tensor]:
        """The boxes."""
        return (self.model(x),)

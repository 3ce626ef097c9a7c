"""From a model's boxes to detections, and their scores."""

import contextlib
import io
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from dataset import Picture
from pictures import Batch, Sample
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch import Tensor
from torchvision.ops import batched_nms, box_convert

MOST_CANDIDATES, MOST_DETECTIONS = 30000, 300  # of one image, before and after suppression


class Scores(NamedTuple):
    """Scores of detections, 0 to 1; see :func:`score`."""

    images: int
    targets: int
    precision: float
    recall: float
    map50: float
    map: float

    def __str__(self) -> str:
        counts = f"{'all':>22}{self.images:>11.3g}{self.targets:>11.3g}"
        return counts + "".join(f"{figure:>11.3g}" for figure in self[2:])


HEADLINE = "{:>22}".format("Class") + "".join(
    f"{title:>11}" for title in ("Images", "Targets", "P", "R", "mAP@.5", "mAP@.5:.95")
)


def suppress(boxes: Tensor, confidence: float, iou: float) -> Tensor:
    """The detections of one image: non-maximum suppression in each class.

    Args:
        boxes: (boxes, 5 + classes): center, width and height in px, objectness, probability of each class.
        confidence: minimum of objectness times probability.
        iou: intersection over union above which two boxes of a class are the same object.

    Returns:
        (detections, 6): left, top, right, bottom, confidence, class; the best first.
    """
    boxes = boxes[boxes[:, 4] > confidence]
    scores = boxes[:, 4:5] * boxes[:, 5:]
    row, kind = (scores > confidence).nonzero(as_tuple=True)
    score = scores[row, kind]
    best = score.argsort(descending=True, stable=True)[:MOST_CANDIDATES]
    row, kind, score = row[best], kind[best], score[best]
    sides = box_convert(boxes[row, :4], "cxcywh", "xyxy")
    kept = batched_nms(sides, score, kind, iou)[:MOST_DETECTIONS]
    return torch.cat((sides[kept], score[kept, None], kind[kept, None].to(score.dtype)), 1)


def to_picture(found: Tensor, sample: Sample, picture: Picture) -> Tensor:
    """Convert detections (detections, 6) from px of the model's image to px of the picture."""
    left, top = sample.offset
    sides = (found[:, :4] - found.new_tensor([left, top, left, top])) / sample.scale
    width, height = picture.size
    sides[:, 0::2].clamp_(0, width)
    sides[:, 1::2].clamp_(0, height)
    return torch.cat((sides, found[:, 4:]), 1)


@torch.no_grad()
def detect(
    function: Callable[[Tensor], Tensor], batches: Iterable[Batch], pictures: Sequence[Picture],
    confidence: float = 0.001, iou: float = 0.6,
) -> dict[int, Tensor]:  # fmt: skip
    """The detections in each picture, in px of the picture, by its number.

    Args:
        function: maps images (batch, 3, height, width), 0 to 1, to boxes (batch, boxes, 5 + classes).
        batches: batches of the pictures.
        pictures: all pictures.
        confidence: see :func:`suppress`.
        iou: see :func:`suppress`.
    """
    found: dict[int, Tensor] = {}
    for batch in batches:
        for boxes, sample in zip(function(batch.images.float() / 255), batch.samples, strict=True):
            detections = suppress(boxes.float(), confidence, iou).cpu()
            found[sample.index] = to_picture(detections, sample, pictures[sample.index])
    return found


def score(found: dict[int, Tensor], pictures: Sequence[Picture], num_classes: int) -> Scores:
    """COCO's scores: average precision at IoU 0.5, and averaged over 0.5 to 0.95 (101 points, 100 detections).

    Precision and recall are taken for each class at IoU 0.5 and the confidence with the highest F1, then averaged over
    the classes that occur.
    """
    targets = sum(len(picture.labels) for picture in pictures)
    rows = [torch.cat((torch.full((len(f), 1), float(index)), f), 1) for index, f in found.items() if len(f)]
    if not targets or not rows:
        return Scores(len(pictures), targets, 0.0, 0.0, 0.0, 0.0)
    table = torch.cat(rows).double().numpy()
    table[:, 3:5] -= table[:, 1:3]  # COCO's boxes are left, top, width, height
    table[:, 6] += 1  # COCO's classes begin at 1
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO()
        truth.dataset = as_coco(pictures, num_classes)
        truth.createIndex()
        evaluation = COCOeval(truth, truth.loadRes(table), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    precision = evaluation.eval["precision"][0, :, :, 0, -1]  # (recalls, classes) at IoU 0.5, -1 of absent ones
    precision = precision[:, (precision > -1).all(0)]
    recall = evaluation.params.recThrs[:, None]
    best = (2 * precision * recall / np.maximum(precision + recall, 1e-12)).argmax(0)
    at_best = precision[best, np.arange(precision.shape[1])].mean(), recall[best, 0].mean()
    return Scores(len(pictures), targets, *map(float, (*at_best, evaluation.stats[1], evaluation.stats[0])))


def as_coco(pictures: Sequence[Picture], num_classes: int) -> dict[str, list[dict[str, object]]]:
    """The labels in COCO's format."""
    objects: list[dict[str, object]] = []
    for index, picture in enumerate(pictures):
        width, height = picture.size
        for kind, x, y, w, h in picture.labels.tolist():
            box = [(x - w / 2) * width, (y - h / 2) * height, w * width, h * height]
            known = {"id": len(objects) + 1, "image_id": index, "category_id": int(kind) + 1, "iscrowd": 0}
            objects.append({**known, "bbox": box, "area": box[2] * box[3]})
    images = [{"id": i, "width": p.size[0], "height": p.size[1]} for i, p in enumerate(pictures)]
    return {"images": images, "annotations": objects, "categories": [{"id": i + 1} for i in range(num_classes)]}

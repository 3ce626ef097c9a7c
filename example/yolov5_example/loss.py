"""What the detector is trained with, as YOLOv5 was (its documentation, *Architecture*, section *Training*)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from blocks import Detect
from torch import Tensor
from torch.nn import functional as F
from torchvision.ops import box_convert, complete_box_iou_loss

BALANCE = (4.0, 1.0, 0.4)
"""Weights of the objectness of the three maps, the finest first: small objects are many and hard."""


@dataclass(frozen=True)
class Gains:
    """Weights of the parts of the loss, and how far a box may be from its anchor.

    Args:
        box: of the boxes.
        obj: of the objectness.
        cls: of the classes; it is scaled by their number, as is `obj` by the size of the images.
        anchor_t: most times that a side may be longer or shorter than the anchor's.
    """

    box: float = 0.05
    obj: float = 1.0
    cls: float = 0.5
    anchor_t: float = 4.0


@dataclass(frozen=True)
class Matched:
    """Objects of one map, each at a place and an anchor that should find it; one object has several.

    Args:
        places: number in the batch, anchor, row and column, each (matches,).
        boxes: (matches, 4): center from the place's corner, and size; in places.
        kinds: (matches,): the class.
        anchors: (matches, 2): the anchor's size in places.
    """

    places: tuple[Tensor, Tensor, Tensor, Tensor]
    boxes: Tensor
    kinds: Tensor
    anchors: Tensor


def match(targets: Tensor, anchors: Tensor, shape: torch.Size, stride: int, anchor_t: float) -> Matched:
    """Find places and anchors for the objects of a batch.

    An object goes to each anchor whose sides differ by less than `anchor_t` times, at the place of its center and at
    the two places beside it that the center is nearest to.

    Args:
        targets: (objects, 6): number in the batch, class, left, top, right, bottom in px.
        anchors: (anchors, 2): sizes in places.
        shape: of the map, (batch, anchors, height, width, ...).
        stride: px of a place.
        anchor_t: see above.
    """
    boxes = box_convert(targets[:, 2:] / stride, "xyxy", "cxcywh")
    ratio = boxes[None, :, 2:] / anchors[:, None]
    anchor, row = (torch.maximum(ratio, 1 / ratio).amax(2) < anchor_t).nonzero(as_tuple=True)
    boxes, targets = boxes[row], targets[row]
    size = torch.tensor([shape[3], shape[2]], device=targets.device)
    center, places, which = boxes[:, :2], [boxes[:, :2].long()], [torch.arange(len(row), device=row.device)]
    inside = center % 1
    for axis in (0, 1):
        for step in (-1, 1):
            near = inside[:, axis] < 0.5 if step < 0 else inside[:, axis] > 0.5
            place = center.long()
            place[:, axis] += step
            near &= (place[:, axis] >= 0) & (place[:, axis] < size[axis])
            places.append(place[near])
            which.append(near.nonzero()[:, 0])
    place, index = torch.cat(places), torch.cat(which)
    place = place.clamp_min(0).minimum(size - 1)
    offset = torch.cat((center[index] - place, boxes[index, 2:]), 1)
    first, kind = targets[index, 0].long(), targets[index, 1].long()
    return Matched((first, anchor[index], place[:, 1], place[:, 0]), offset, kind, anchors[anchor[index]])


def detection_loss(maps: Sequence[Tensor], targets: Tensor, head: Detect, gains: Gains) -> tuple[Tensor, Tensor]:
    """The loss of a batch.

    Boxes: one minus the complete intersection over union (Zheng et al. 2020, arXiv:1911.08287); objectness: towards
    that intersection over union; classes: each by itself. The last two by binary cross entropy.

    Args:
        maps: of the head in training, (batch, anchors, height, width, 5 + classes).
        targets: (objects, 6): number in the batch, class, left, top, right, bottom in px.
        head: of the model.
        gains: the weights.

    Returns:
        The loss, times the batch size; and its parts (3,): box, objectness, classes.
    """
    parts = maps[0].new_zeros(3, dtype=torch.float32)
    size = maps[0].shape[2:4].numel() * head.strides[0] ** 2
    for y, anchors, stride, balance in zip(maps, head.anchors.float(), head.strides, BALANCE, strict=True):
        y = y.float()
        found = match(targets, anchors, y.shape, stride, gains.anchor_t)
        objectness = torch.zeros_like(y[..., 4])
        at = y[found.places]
        if len(at):
            center, sides = at[:, :2].sigmoid() * 2 - 0.5, (at[:, 2:4].sigmoid() * 2) ** 2 * found.anchors
            ours = box_convert(torch.cat((center, sides), 1), "cxcywh", "xyxy")
            error = complete_box_iou_loss(ours, box_convert(found.boxes, "cxcywh", "xyxy"))
            parts[0] += error.mean()
            objectness[found.places] = (1 - error.detach()).clamp_min(0)
            classes = F.one_hot(found.kinds, y.shape[-1] - 5).float()
            if classes.shape[1] > 1:
                parts[2] += F.binary_cross_entropy_with_logits(at[:, 5:], classes)
        parts[1] += balance * F.binary_cross_entropy_with_logits(y[..., 4], objectness)
    weights = (gains.box, gains.obj * size / 640**2, gains.cls * (head.outputs - 5) / 80)
    parts = parts * parts.new_tensor(weights)
    return parts.sum() * len(maps[0]), parts.detach()


def distillation_loss(maps: Sequence[Tensor], teacher: Sequence[Tensor]) -> Tensor:
    """How far the maps are from a teacher's, where that sees objects.

    Objectness towards the teacher's; classes and boxes towards the teacher's, weighted by its objectness (Mehta and
    Ozturk 2018, arXiv:1805.06361, section 3.2).

    Args:
        maps: of the head in training.
        teacher: the same of the teacher.
    """
    total = maps[0].new_zeros((), dtype=torch.float32)
    for ours, theirs, balance in zip(maps, teacher, BALANCE, strict=True):
        ours, wanted = ours.float(), theirs.float().sigmoid()
        seen = wanted[..., 4:5]
        weight = seen / seen.sum().clamp_min(1e-6)
        total = total + balance * F.binary_cross_entropy_with_logits(ours[..., 4:5], seen)
        classes = F.binary_cross_entropy_with_logits(ours[..., 5:], wanted[..., 5:], reduction="none")
        boxes = (ours[..., :4].sigmoid() - wanted[..., :4]).square()
        total = total + (weight * (classes.mean(-1, keepdim=True) + 4 * boxes.sum(-1, keepdim=True))).sum()
    return total * len(maps[0])

"""The training losses of YOLOv5 (its documentation, *Architecture*, section *Training*), and one for distillation."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from blocks import Detect
from torch import Tensor
from torch.nn import functional as F
from torchvision.ops import box_convert, complete_box_iou_loss

BALANCE = (4.0, 1.0, 0.4)
"""Weights of the objectness of the three maps, the finest first: small objects are frequent and hard to find."""


@dataclass(frozen=True)
class Gains:
    """Weights of the terms of the loss, and the tolerance between boxes and anchors.

    Args:
        box: weight of the boxes.
        obj: weight of the objectness; scaled by the area of the images.
        cls: weight of the classes; scaled by their number.
        anchor_t: maximum ratio between a side of a box and of its anchor.
    """

    box: float = 0.05
    obj: float = 1.0
    cls: float = 0.5
    anchor_t: float = 4.0


@dataclass(frozen=True)
class Matched:
    """Matches of objects with cells and anchors of one map; an object may have several.

    Args:
        cells: image in the batch, anchor, row and column, each (matches,).
        boxes: (matches, 4): center relative to the cell's corner, and size; in cells.
        kinds: (matches,): class.
        anchors: (matches, 2): size of the anchor in cells.
    """

    cells: tuple[Tensor, Tensor, Tensor, Tensor]
    boxes: Tensor
    kinds: Tensor
    anchors: Tensor


def match(targets: Tensor, anchors: Tensor, shape: torch.Size, stride: int, anchor_t: float) -> Matched:
    """Match the objects of a batch with cells and anchors.

    An object matches each anchor whose sides differ from its own by less than a factor of `anchor_t`, in the cell of
    its center and in the two neighbouring cells nearest to the center.

    Args:
        targets: (objects, 6): image in the batch, class, left, top, right, bottom in px.
        anchors: (anchors, 2): sizes in cells.
        shape: shape of the map (batch, anchors, height, width, ...).
        stride: px per cell.
        anchor_t: see :class:`Gains`.
    """
    boxes = box_convert(targets[:, 2:] / stride, "xyxy", "cxcywh")
    ratio = boxes[None, :, 2:] / anchors[:, None]
    anchor, row = (torch.maximum(ratio, 1 / ratio).amax(2) < anchor_t).nonzero(as_tuple=True)
    boxes, targets = boxes[row], targets[row]
    size = torch.tensor([shape[3], shape[2]], device=targets.device)
    center, cells, which = boxes[:, :2], [boxes[:, :2].long()], [torch.arange(len(row), device=row.device)]
    inside = center % 1
    for axis in (0, 1):
        for step in (-1, 1):
            near = inside[:, axis] < 0.5 if step < 0 else inside[:, axis] > 0.5
            cell = center.long()
            cell[:, axis] += step
            near &= (cell[:, axis] >= 0) & (cell[:, axis] < size[axis])
            cells.append(cell[near])
            which.append(near.nonzero()[:, 0])
    cell, index = torch.cat(cells), torch.cat(which)
    cell = cell.clamp_min(0).minimum(size - 1)
    offset = torch.cat((center[index] - cell, boxes[index, 2:]), 1)
    image, kind = targets[index, 0].long(), targets[index, 1].long()
    return Matched((image, anchor[index], cell[:, 1], cell[:, 0]), offset, kind, anchors[anchor[index]])


def detection_loss(maps: Sequence[Tensor], targets: Tensor, head: Detect, gains: Gains) -> tuple[Tensor, Tensor]:
    """The loss of a batch.

    Boxes: one minus the complete intersection over union (Zheng et al. 2020, arXiv:1911.08287). Objectness: binary
    cross entropy with that intersection over union as target. Classes: binary cross entropy of each class.

    Args:
        maps: output of the head in training, (batch, anchors, height, width, 5 + classes).
        targets: (objects, 6): image in the batch, class, left, top, right, bottom in px.
        head: the model's head.
        gains: weights of the terms.

    Returns:
        The loss times the batch size; and its terms (3,): box, objectness, classes.
    """
    parts = maps[0].new_zeros(3, dtype=torch.float32)
    size = maps[0].shape[2:4].numel() * head.strides[0] ** 2
    for y, anchors, stride, balance in zip(maps, head.anchors.float(), head.strides, BALANCE, strict=True):
        y = y.float()
        found = match(targets, anchors, y.shape, stride, gains.anchor_t)
        objectness = torch.zeros_like(y[..., 4])
        at = y[found.cells]
        if len(at):
            center, sides = at[:, :2].sigmoid() * 2 - 0.5, (at[:, 2:4].sigmoid() * 2) ** 2 * found.anchors
            ours = box_convert(torch.cat((center, sides), 1), "cxcywh", "xyxy")
            error = complete_box_iou_loss(ours, box_convert(found.boxes, "cxcywh", "xyxy"))
            parts[0] += error.mean()
            objectness[found.cells] = (1 - error.detach()).clamp_min(0)
            classes = F.one_hot(found.kinds, y.shape[-1] - 5).float()
            if classes.shape[1] > 1:
                parts[2] += F.binary_cross_entropy_with_logits(at[:, 5:], classes)
        parts[1] += balance * F.binary_cross_entropy_with_logits(y[..., 4], objectness)
    weights = (gains.box, gains.obj * size / 640**2, gains.cls * (head.outputs - 5) / 80)
    parts = parts * parts.new_tensor(weights)
    return parts.sum() * len(maps[0]), parts.detach()


def distillation_loss(maps: Sequence[Tensor], teacher: Sequence[Tensor]) -> Tensor:
    """The distance of the maps from a teacher's maps.

    The targets are the teacher's objectness, classes and boxes; classes and boxes are weighted by its objectness (Mehta
    and Ozturk 2018, arXiv:1805.06361, section 3.2).

    Args:
        maps: output of the head in training.
        teacher: the maps of the teacher.
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

"""The loss against one written down object by object."""

import math
import sys

import pytest
import torch
from torch.nn import functional as F


@pytest.fixture
def head(example):
    torch.manual_seed(0)
    return sys.modules["model"].Yolo("n", 3).model[-1]


def iou_terms(a, b):
    """Complete intersection over union of two boxes (center, size), by its definition."""
    (ax, ay, aw, ah), (bx, by, bw, bh) = a, b
    wide = min(ax + aw / 2, bx + bw / 2) - max(ax - aw / 2, bx - bw / 2)
    high = min(ay + ah / 2, by + bh / 2) - max(ay - ah / 2, by - bh / 2)
    shared = max(wide, 0) * max(high, 0)
    iou = shared / (aw * ah + bw * bh - shared)
    around_w = max(ax + aw / 2, bx + bw / 2) - min(ax - aw / 2, bx - bw / 2)
    around_h = max(ay + ah / 2, by + bh / 2) - min(ay - ah / 2, by - bh / 2)
    distance = ((ax - bx) ** 2 + (ay - by) ** 2) / (around_w**2 + around_h**2)
    v = 4 / math.pi**2 * (math.atan(bw / bh) - math.atan(aw / ah)) ** 2
    return iou - distance - v * v / (1 - iou + v)


def test_the_loss_is_that_of_its_definition(head):
    loss = sys.modules["loss"]
    maps = [torch.randn(2, 3, side, side, 8) for side in (8, 4, 2)]
    targets = torch.tensor([[0, 1, 11, 13, 30, 44], [1, 2, 2, 3, 60, 50], [1, 0, 40, 8, 52, 20]]).float()
    gains = loss.Gains(box=0.1, obj=0.7, cls=0.4)
    box = objectness = classes = 0.0
    for i, (y, stride, balance) in enumerate(zip(maps, head.strides, loss.BALANCE, strict=True)):
        wanted = torch.zeros(2, 3, y.shape[2], y.shape[3])
        errors, kinds = [], []
        for image, kind, *sides in targets.tolist():
            x, y0, w, h = (sides[0] + sides[2]) / 2, (sides[1] + sides[3]) / 2, sides[2] - sides[0], sides[3] - sides[1]
            x, y0, w, h = (value / stride for value in (x, y0, w, h))
            for a, (aw, ah) in enumerate(head.anchors[i].tolist()):
                if max(w / aw, aw / w, h / ah, ah / h) >= 4:
                    continue
                column, row = int(x), int(y0)
                beside = [(column, row), (column + (1 if x % 1 > 0.5 else -1), row)]
                beside.append((column, row + (1 if y0 % 1 > 0.5 else -1)))
                for c, r in beside:
                    if not (0 <= c < y.shape[3] and 0 <= r < y.shape[2]):
                        continue
                    at = y[int(image), a, r, c].sigmoid().tolist()
                    ours = (at[0] * 2 - 0.5 + c, at[1] * 2 - 0.5 + r, (at[2] * 2) ** 2 * aw, (at[3] * 2) ** 2 * ah)
                    complete = iou_terms(ours, (x, y0, w, h))
                    errors.append(1 - complete)
                    wanted[int(image), a, r, c] = max(complete, 0)
                    one_hot = F.one_hot(torch.tensor(int(kind)), 3).float()
                    kinds.append(F.binary_cross_entropy_with_logits(y[int(image), a, r, c, 5:], one_hot))
        box += sum(errors) / len(errors)
        classes += sum(kinds) / len(kinds)
        objectness += balance * F.binary_cross_entropy_with_logits(y[..., 4], wanted)
    expected = torch.stack([torch.tensor(0.1 * box), 0.7 * objectness * 64**2 / 640**2, 0.4 * classes * 3 / 80])
    total, parts = loss.detection_loss(maps, targets, head, gains)
    torch.testing.assert_close(parts, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(total, 2 * expected.sum(), rtol=1e-4, atol=1e-6)


def test_pictures_without_objects_train_their_objectness(head):
    loss = sys.modules["loss"]
    maps = [torch.randn(2, 3, side, side, 8, requires_grad=True) for side in (8, 4, 2)]
    total, parts = loss.detection_loss(maps, torch.zeros(0, 6), head, loss.Gains())
    total.backward()
    assert parts[0] == parts[2] == 0
    assert float(total) == pytest.approx(2 * float(parts[1]))
    assert all(y.grad[..., 4].abs().min() > 0 and y.grad[..., :4].abs().max() == 0 for y in maps)


def test_a_student_like_its_teacher_has_nothing_to_learn(head):
    loss = sys.modules["loss"]
    teacher = [3 * torch.randn(2, 3, side, side, 8) for side in (8, 4, 2)]
    for offset, is_same in ((0.0, True), (0.5, False)):
        maps = [(y + offset).requires_grad_() for y in teacher]
        loss.distillation_loss(maps, teacher).backward()
        assert all(bool(y.grad.abs().max() < 1e-6) is is_same for y in maps)

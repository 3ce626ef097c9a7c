"""Classifiers that train in seconds, given to the example as ``FILE.py:NAME``."""

import torch
from torch import Tensor, nn


class Tiny(nn.Module):
    """Three convolutions; ``BatchNorm`` and dropout, so that a resumed training shows whether it is the same."""

    def __init__(self, num_classes: int, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(width, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.last = nn.Sequential(
            nn.Conv2d(width, 2 * width, 3, 2, 1, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU()
        )
        self.dropout = nn.Dropout(0.1)
        self.fc = nn.Linear(2 * width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.last(self.body(self.stem(x)))
        return self.fc(self.dropout(torch.flatten(nn.functional.adaptive_avg_pool2d(x, 1), 1)))


class Wide(Tiny):
    """A teacher of other widths."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes, width=24)


class WithoutBatchNorm(nn.Module):
    """Computes the same for an image whatever the batch, so that two processes can be compared with one."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, 4, 1)
        self.fc = nn.Linear(8, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.relu(self.conv(x)).mean((2, 3)))


def not_a_classifier(num_classes: int) -> nn.Module:
    """Gives a map, not logits."""
    return nn.Conv2d(3, num_classes, 1)


class Small(nn.Module):
    """Two convolutions, wide enough to learn the digits."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 5, 4, 2, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(16, 64, 3, 2, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
        self.fc = nn.Linear(64 * 16, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.flatten(self.body(self.stem(x)), 1))

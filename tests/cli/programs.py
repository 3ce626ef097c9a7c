"""A user's file for the command line: a model, its data and its metric."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).flatten(1))


class Cube(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum().item() > 0 else x.reshape(7, 7)


class Fixed(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.reshape(-1, 3, len(range(x.shape[2])), 8))


def fixed() -> nn.Module:
    return Fixed()


def net() -> nn.Module:
    return Net()


def light() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 2, 1), nn.Hardsigmoid(), nn.Conv2d(2, 64, 3))


def broken() -> nn.Module:
    raise RuntimeError("no memory for it")


def number() -> int:
    return 3


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 3, 8, 8, generator=generator) for _ in range(2)]


def nothing() -> list[torch.Tensor]:
    return []


def closeness(model: nn.Module) -> float:
    """Minus the distance to the float model, in percent of its size."""
    exact = [Net().eval()(x).detach() for x in batches()]
    found = [model(x) for x in batches()]
    return -100 * float(sum((a - b).norm() for a, b in zip(found, exact, strict=True)) / sum(b.norm() for b in exact))

"""What a training program gets, what it gives back, and what the programs check.

The programs do not know fxqat: they get a ``torch.nn.Module`` and treat it as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

LEARNING_RATE = 0.05


@dataclass
class Job:
    """What a program gets.

    Args:
        model: the model to train.
        fresh: makes the same model as a new process would have it, before it loads a checkpoint.
        samples: the arguments of forward by name and the labels, for all samples.
        batch_size: samples of a batch.
        folder: for the files of the program.
    """

    model: nn.Module
    fresh: Callable[[], nn.Module]
    samples: dict[str, Tensor]
    batch_size: int
    folder: Path

    def loader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Batches in a fixed order, each a tuple of the values of ``samples``."""
        return DataLoader(TensorDataset(*self.samples.values()), self.batch_size)


@dataclass
class Outcome:
    """What a program gives back.

    Args:
        models: the models that it trained, by a name for each: they are evaluated and exported.
        losses: the loss of each step, or before and after training.
        checked: what the program itself checked, in words.
    """

    models: Mapping[str, nn.Module]
    losses: list[float]
    checked: list[str] = field(default_factory=list)


class CNN(nn.Module):
    """Convolutions with BatchNorm, a residual, and a linear layer, for images of (3, 8, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.pool, self.head = nn.AvgPool2d(4), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Logits, (N, 4)."""
        y = torch.relu(self.bn1(self.conv1(x)))
        y = torch.relu(y + self.bn2(self.conv2(y)))
        return self.head(self.pool(y).flatten(1))


class SelfAttention(nn.Module):
    """Attention with dropout in training only, on (N, 6, 16); ``projected``: with its last layer, as in GPT-2."""

    def __init__(self, projected: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.projection = nn.Linear(16, 16) if projected else None

    def forward(self, x: Tensor) -> Tensor:
        """The attended values, (N, 6, 16)."""
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        dropout = 0.2 if self.training else 0.0
        attended = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout).transpose(1, 2).flatten(2)
        return attended if self.projection is None else self.projection(attended)


class Attention(nn.Module):
    """A transformer layer for sequences of (6, 16)."""

    def __init__(self, projected: bool) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(16), SelfAttention(projected)
        self.projection = nn.Identity() if projected else nn.Linear(16, 16)
        self.mlp, self.head = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Logits, (N, 4)."""
        x = x + self.projection(self.attention(self.norm(x)))
        return self.head((x + self.mlp(x)).mean(1))


def patterns(count: int, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Random samples, each the pattern of its class plus noise, and their classes."""
    generator = torch.Generator().manual_seed(0)
    classes = torch.arange(count) % 4
    prototypes = torch.randn(4, *shape, generator=generator)
    return prototypes[classes] + 0.5 * torch.randn(count, *shape, generator=generator), classes


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer that most programs use."""
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> float:
    """One step; the loss before it."""
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


def train_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, job: Job) -> list[float]:
    """One pass over the samples; the loss of each step."""
    model.train()
    return [train_step(model, optimizer, x, y) for x, y in job.loader()]


def train_epochs(model: nn.Module, count: int, job: Job) -> list[float]:
    """Some epochs with a new optimizer; the loss of each step."""
    optimizer = optimizer_of(model)
    return [loss for _ in range(count) for loss in train_epoch(model, optimizer, job)]


def check_same_state(found: nn.Module, expected: nn.Module, what: str) -> str:
    """Check that two state dicts hold the same bits; return what was checked.

    Raises:
        AssertionError: they do not.
    """
    a, b = found.state_dict(), expected.state_dict()
    if list(a) != list(b):
        raise AssertionError(f"{what}: other names in the state dict: {sorted(set(a) ^ set(b))[:4]}")
    different = [name for name in b if not torch.equal(a[name], b[name])]
    if different:
        raise AssertionError(f"{what}: {len(different)} of {len(b)} tensors differ: {different[:4]}")
    return what

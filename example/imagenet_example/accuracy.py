"""Accuracy of a classifier."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from data import Batch
from distributed import add_up
from logs import progress
from torch import Tensor, nn
from torch.utils.data import DataLoader
from training import Precision


class Accuracy(NamedTuple):
    """Percent of images whose label is the model's first class (`acc1`), or one of its first five (`acc5`)."""

    acc1: float
    acc5: float

    def __str__(self) -> str:
        return f"Acc@1 {self.acc1:.3f} Acc@5 {self.acc5:.3f}"


def ranks_hit(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """For each image 1 or 0: whether its label is first, and whether it is among the first five.

    Equal outputs, common in 8 bits, rank by class number, as in `argmax`.

    Args:
        output: logits (batch, classes).
        target: labels (batch,).
    """
    ranked = output.argsort(dim=1, descending=True, stable=True)[:, :5]
    hits = ranked.eq(target.unsqueeze(1))
    return hits[:, 0].float(), hits.any(dim=1).float()


@torch.no_grad()
def evaluate(
    model: nn.Module, loader: DataLoader[Batch], device: torch.device, precision: Precision | None = None
) -> Accuracy:
    """Accuracy of a model over the images of all processes; leaves the model in eval mode."""
    model.eval()
    precision = precision or Precision(device.type, None)

    def run(images: Tensor) -> Tensor:
        with precision.autocast():
            return model(images.to(device))

    return accuracy_of(add_up(count_hits(run, loader, "evaluate").to(device)))


@torch.no_grad()
def count_hits(function: Callable[[Tensor], Tensor], loader: DataLoader[Batch], title: str) -> Tensor:
    """The number of images with their label first, with their label among the first five, and of all images.

    Args:
        function: maps images (batch, 3, height, width) to logits (batch, classes).
        loader: images with labels.
        title: of the progress bar.
    """
    sums = torch.zeros(3, dtype=torch.float64)
    for images, target in progress(loader, title):
        first, fifth = ranks_hit(function(images).cpu(), target)
        sums += torch.stack([first.sum(), fifth.sum(), torch.tensor(float(len(target)))])
    return sums


def accuracy_of(hits: Tensor) -> Accuracy:
    """The accuracy from the numbers of `count_hits`."""
    first, fifth, count = hits.tolist()
    return Accuracy(100 * first / count, 100 * fifth / count)

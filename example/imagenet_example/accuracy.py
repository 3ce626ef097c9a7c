"""How well a classifier does."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from data import Batch
from distributed import add_up
from fit import progress
from torch import Tensor, nn
from torch.utils.data import DataLoader
from training import Precision


class Accuracy(NamedTuple):
    """Share of images, in percent, whose class is the first, or among the first five, of the model's."""

    acc1: float
    acc5: float

    def __str__(self) -> str:
        return f"Acc@1 {self.acc1:.3f} Acc@5 {self.acc5:.3f}"


def ranks_hit(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """For each image 1 or 0: is its class the first, is it among the first five.

    Of equal outputs, common in 8 bits, the lower class is first, as in `argmax`. output: (batch, classes); target:
    (batch,).
    """
    ranked = output.argsort(dim=1, descending=True, stable=True)[:, :5]
    hits = ranked.eq(target.unsqueeze(1))
    return hits[:, 0].float(), hits.any(dim=1).float()


@torch.no_grad()
def evaluate(
    model: nn.Module, loader: DataLoader[Batch], device: torch.device, precision: Precision | None = None
) -> Accuracy:
    """Accuracy of a model in eval mode, over the images of all processes."""
    model.eval()
    precision = precision or Precision(device.type, None)

    def run(images: Tensor) -> Tensor:
        with precision.autocast():
            return model(images.to(device))

    return accuracy_of(add_up(count_hits(run, loader, "evaluate").to(device)))


@torch.no_grad()
def count_hits(function: Callable[[Tensor], Tensor], loader: DataLoader[Batch], title: str) -> Tensor:
    """How many images have their class first, how many among the first five, and how many there are.

    function: gives logits (batch, classes) for images (batch, 3, height, width).
    """
    sums = torch.zeros(3, dtype=torch.float64)
    for images, target in progress(loader, title):
        first, fifth = ranks_hit(function(images).cpu(), target)
        sums += torch.stack([first.sum(), fifth.sum(), torch.tensor(float(len(target)))])
    return sums


def accuracy_of(hits: Tensor) -> Accuracy:
    """The accuracy of what `count_hits` gave."""
    first, fifth, count = hits.tolist()
    return Accuracy(100 * first / count, 100 * fifth / count)

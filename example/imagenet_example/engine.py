"""Loops over the data: train, calibrate, evaluate; and the state of a training that a checkpoint restores."""

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from data import Batch, Loaders
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from tqdm import tqdm

MOMENTUM = 0.9
WEIGHT_DECAY = 1e-4
PRINT_EVERY = 100


class Accuracy(NamedTuple):
    """Share of images, in percent, whose class is the first, or among the first five, of the model's."""

    acc1: float
    acc5: float

    def __str__(self) -> str:
        return f"Acc@1 {self.acc1:.3f} Acc@5 {self.acc5:.3f}"


class Meter:
    """The latest value of a figure and its average, weighted by count."""

    def __init__(self, name: str, form: str) -> None:
        self.name, self.form = name, form
        self.value = self.total = 0.0
        self.count = 0

    def add(self, value: float, count: int = 1) -> None:
        """Take a value that `count` items have on average."""
        self.value = value
        self.total += value * count
        self.count += count

    @property
    def average(self) -> float:
        """The average over all items so far."""
        return self.total / max(self.count, 1)

    def __str__(self) -> str:
        return f"{self.name} {self.value:{self.form}} ({self.average:{self.form}})"


class Training:
    """Optimizer, learning rate, epochs done and best accuracy of one training.

    The learning rate falls from `lr` to zero in half a cosine over all steps. Biases, batch norm and scales, which have
    one dimension or none, do not decay.

    Args:
        model: what is trained.
        optim: "sgd" (momentum 0.9) or "adam".
        lr: learning rate of the first step.
        epochs: epochs in all, with those that a resumed training has behind it.
        steps_per_epoch: batches of an epoch.
    """

    def __init__(self, model: nn.Module, optim: str, lr: float, epochs: int, steps_per_epoch: int) -> None:
        parameters = [p for p in model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        if optim == "sgd":
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, lr, momentum=MOMENTUM)
        else:
            self.optimizer = torch.optim.Adam(groups, lr)
        steps = epochs * steps_per_epoch
        self.scheduler = LambdaLR(self.optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * min(step / steps, 1))))
        self.epochs = epochs
        self.epochs_done = 0
        self.best = Accuracy(-1.0, -1.0)

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on beside the model, in tensors and plain values."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "epochs_done": self.epochs_done,
            "best": list(self.best),
            "rng": torch.get_rng_state(),
            "rng_cuda": torch.cuda.get_rng_state_all(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.epochs_done = state["epochs_done"]
        self.best = Accuracy(*state["best"])
        torch.set_rng_state(state["rng"].cpu())
        if state["rng_cuda"] and torch.cuda.is_available():
            torch.cuda.set_rng_state_all([rng.cpu() for rng in state["rng_cuda"]])


def fit(model: nn.Module, loaders: Loaders, training: Training, save: Callable[[bool], None]) -> None:
    """Train until `training.epochs` are done; after each epoch evaluate, and call `save(is_best)`."""
    while training.epochs_done < training.epochs:
        train_epoch(model, loaders.train(training.epochs_done), training)
        accuracy = evaluate(model, loaders.val)
        tqdm.write(f" * {accuracy}")
        training.epochs_done += 1
        is_best = accuracy.acc1 > training.best.acc1
        if is_best:
            training.best = accuracy
        save(is_best)


def train_epoch(model: nn.Module, loader: DataLoader[Batch], training: Training) -> None:
    """One pass over the training images."""
    model.train()
    device, epoch = device_of(model), training.epochs_done
    meters = [
        Meter("Time", ".3f"),
        Meter("Data", ".3f"),
        Meter("Loss", ".4e"),
        Meter("Acc@1", ".2f"),
        Meter("Acc@5", ".2f"),
    ]
    start = time.perf_counter()
    for step, (images, target) in enumerate(progress(loader, f"epoch {epoch}")):
        data_time = time.perf_counter() - start
        images, target = images.to(device, non_blocking=True), target.to(device, non_blocking=True)
        output = model(images)
        loss = nn.functional.cross_entropy(output, target)
        training.optimizer.zero_grad()
        loss.backward()
        training.optimizer.step()
        training.scheduler.step()
        accuracy = accuracy_of(output, target)
        figures = (data_time, loss.item(), *accuracy)
        for meter, figure in zip(meters, (time.perf_counter() - start, *figures), strict=True):
            meter.add(figure, len(target))
        if step % PRINT_EVERY == 0 or step == len(loader) - 1:
            tqdm.write(f"Epoch: [{epoch}][{step}/{len(loader)}] " + " ".join(map(str, meters)))
        start = time.perf_counter()


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader[Batch], title: str = "evaluate") -> Accuracy:
    """Accuracy of a model in eval mode."""
    model.eval()
    device = device_of(model)
    return evaluate_function(lambda images: model(images.to(device)).cpu(), loader, title)


def evaluate_function(function: Callable[[Tensor], Tensor], loader: DataLoader[Batch], title: str) -> Accuracy:
    """Accuracy of anything that gives logits (batch, classes) for images (batch, 3, height, width)."""
    first, fifth = Meter("Acc@1", ".2f"), Meter("Acc@5", ".2f")
    for images, target in progress(loader, title):
        accuracy = accuracy_of(function(images), target)
        first.add(accuracy.acc1, len(target))
        fifth.add(accuracy.acc5, len(target))
    return Accuracy(first.average, fifth.average)


@torch.no_grad()
def calibrate(model: nn.Module, loader: DataLoader[Batch]) -> None:
    """Show the observers of a model, which must be enabled, the calibration images."""
    model.eval()
    device = device_of(model)
    for images, _ in progress(loader, "calibrate"):
        model(images.to(device))


def accuracy_of(output: Tensor, target: Tensor) -> Accuracy:
    """Accuracy of one batch; of equal outputs, common in 8 bits, the lower class is first, as in ``argmax``.

    output: (batch, classes); target: (batch,).
    """
    ranked = output.argsort(dim=1, descending=True, stable=True)[:, :5]
    hits = ranked.eq(target.unsqueeze(1))
    return Accuracy(100 * hits[:, 0].float().mean().item(), 100 * hits.any(dim=1).float().mean().item())


def device_of(model: nn.Module) -> torch.device:
    """Where the parameters of a model are."""
    return next(model.parameters()).device


def progress(loader: DataLoader[Batch], title: str) -> "tqdm[Batch]":
    """A progress bar over batches that leaves nothing behind."""
    return tqdm(loader, desc=title, leave=False, unit="batch")

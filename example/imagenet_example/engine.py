"""Loops over the data: train, calibrate, evaluate."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from data import Batch, Loaders
from distillation import Distiller
from distributed import Process, add_up
from errors import Interrupted, UserError
from interrupts import Interrupt, catching
from logs import LOG, Board, Meter, quiet
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm
from training import Accuracy, Precision, Training

from fxqat.tools import NaNGuard

BAD_STEPS = 5  # in a row, after which a training is given up


@dataclass
class Fit:
    """A training with what it runs on.

    Args:
        training: the optimizer and its state.
        wrapped: the model in the wrappers that it is trained through.
        loaders: the images.
        process: this one among all.
        board: the curves.
        label_smoothing: of the cross entropy.
        print_freq: a line every so many steps.
        distiller: the teacher, if there is one.
        guard: leaves steps out that are not finite; of a quantized model.
    """

    training: Training
    wrapped: nn.Module
    loaders: Loaders
    process: Process
    board: Board
    label_smoothing: float = 0.0
    print_freq: int = 100
    distiller: Distiller | None = None
    guard: NaNGuard | None = None

    def run(self, save: Callable[[bool], None]) -> None:
        """Train until all epochs are done; call `save(is_best)` after each, and `save(False)` when interrupted."""
        with catching(self.process) as interrupt:
            while self.training.epochs_done < self.training.epochs:
                number = self.epoch(interrupt)
                save(False if number else self.finish_epoch())
                number = number or interrupt.arrived(0)
                if number:
                    raise Interrupted(number)

    def finish_epoch(self) -> bool:
        """Evaluate the epoch, and tell whether it is the best so far."""
        training = self.training
        accuracy = evaluate(training.evaluated, self.loaders.val, self.process.device, training.precision)
        LOG.info(" * %s", accuracy)
        self.board.add(training.epochs_done, val__acc1=accuracy.acc1, val__acc5=accuracy.acc5)
        training.epochs_done += 1
        training.steps_done = 0
        is_best = accuracy.acc1 > training.best.acc1
        if is_best:
            training.best = accuracy
        return is_best

    def epoch(self, interrupt: Interrupt) -> int:
        """The rest of one epoch; the number of a signal that came, or 0."""
        self.wrapped.train()
        training, device, steps = self.training, self.process.device, self.loaders.steps_per_epoch
        names = (("Time", ".3f"), ("Data", ".3f"), ("Loss", ".4e"), ("Acc@1", ".2f"), ("Acc@5", ".2f"))
        meters, bad_steps, start = [Meter(*name) for name in names], 0, time.perf_counter()
        loader = self.loaders.train(training.epochs_done, training.steps_done)
        for images, target in progress(loader, f"epoch {training.epochs_done}"):
            data_time = time.perf_counter() - start
            images, target = images.to(device, non_blocking=True), target.to(device, non_blocking=True)
            loss, accepted, output = self.step(images, target)
            bad_steps = 0 if accepted else bad_steps + 1
            if bad_steps == BAD_STEPS:
                raise UserError(
                    f"the last {BAD_STEPS} steps were not finite, see the warnings above: lower --lr, or leave the "
                    "layer named there float with --quant-config; the last good checkpoint is kept"
                )
            hits = ranks_hit(output.detach(), target)
            figures = (time.perf_counter() - start, data_time, loss.detach(), *(100 * hit.mean() for hit in hits))
            for meter, figure in zip(meters, figures, strict=True):
                meter.add(figure, len(target))
            step = training.steps_done - 1
            if step % self.print_freq == 0 or step == steps - 1:
                LOG.info("Epoch: [%d][%d/%d] %s", training.epochs_done, step, steps, " ".join(map(str, meters)))
                place = training.epochs_done * steps + step
                self.board.add(place, train__loss=float(loss.detach()), train__lr=training.lr)
            number = interrupt.arrived(training.steps_done)
            if number:
                return number
            start = time.perf_counter()
        return 0

    def step(self, images: Tensor, target: Tensor) -> tuple[Tensor, bool, Tensor]:
        """One step; returns the loss, whether it was taken, and the output."""
        training = self.training
        watching = self.distiller.watching() if self.distiller else nullcontext({})
        with training.precision.autocast(), watching as features:
            output = self.wrapped(images)
            loss = nn.functional.cross_entropy(output, target, label_smoothing=self.label_smoothing)
            if self.distiller is not None:
                loss = self.distiller.loss(images, output, features, target, loss)
        training.optimizer.zero_grad()
        training.scaler.scale(loss).backward()
        accepted = self.guard is None or self.guard.accepts(loss, images, gradients=not training.scaler.is_enabled())
        if self.guard is None and not loss.isfinite():
            raise UserError("the loss of the float model is not finite: lower --lr; the last good checkpoint is kept")
        training.step(accepted)
        return loss, accepted, output


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


@torch.no_grad()
def calibrate(model: nn.Module, loader: DataLoader[Batch], device: torch.device) -> None:
    """Show the observers of a model, which must be enabled, the calibration images."""
    model.eval()
    for images, _ in progress(loader, "calibrate"):
        model(images.to(device))


def progress(loader: DataLoader[Batch], title: str) -> "tqdm[Batch]":
    """A progress bar over batches that leaves nothing behind."""
    return tqdm(loader, desc=title, leave=False, unit="batch", disable=quiet())

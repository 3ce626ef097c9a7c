"""The training loop: epochs and steps, with log lines, and a checkpoint when it is interrupted."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from distributed import Process
from errors import Interrupted, UserError
from interrupts import Interrupt, catching
from logs import LOG, Board, Meter, progress
from step_profile import StepProfile
from torch import Tensor, nn
from training import Precision, Training

from fxqat.tools import NaNGuard

BAD_STEPS = 5  # so many steps in a row that are not finite end the training


class Step(NamedTuple):
    """The result of one batch: the loss, the model's inputs, figures to print, and the number of items."""

    loss: Tensor
    inputs: Tensor
    figures: tuple[Tensor, ...]
    count: int


class Evaluation(NamedTuple):
    """How good a model is: a score (higher is better), a line to print, and figures by name."""

    score: float
    text: str
    figures: Mapping[str, float]


class Task(Protocol):
    """What is trained; `figures` are the names and formats of a step's figures."""

    figures: tuple[tuple[str, str], ...]

    @property
    def steps_per_epoch(self) -> int:
        """The number of batches in an epoch."""

    def batches(self, epoch: int, first: int) -> Iterable[Any]:
        """The batches of an epoch, beginning with number `first`."""

    def step(self, model: nn.Module, batch: Any) -> Step:
        """The loss of a batch."""

    def evaluate(self, model: nn.Module, precision: Precision) -> Evaluation:
        """How good the model is; leaves it in eval mode."""


@dataclass
class Fit:
    """The loop of one training.

    Args:
        training: the optimizer and its state.
        wrapped: the model as it is trained: in DistributedDataParallel or compiled.
        task: what is trained.
        process: this process.
        board: TensorBoard curves.
        print_freq: steps between two log lines.
        guard: skips steps that are not finite; for a quantized model.
        profile: times the steps of the first epoch.
    """

    training: Training
    wrapped: nn.Module
    task: Task
    process: Process
    board: Board
    print_freq: int = 100
    guard: NaNGuard | None = None
    profile: StepProfile | None = None

    def run(self, save: Callable[[bool], None]) -> None:
        """Train the remaining epochs; call `save(is_best)` after each one, and `save(False)` when interrupted.

        Raises:
            Interrupted: a signal came.
            UserError: the loss is not finite.
        """
        with catching(self.process) as interrupt:
            while self.training.epochs_done < self.training.epochs:
                number = self.epoch(interrupt)
                save(False if number else self.finish_epoch())
                number = number or interrupt.arrived(0)
                if number:
                    raise Interrupted(number)

    def finish_epoch(self) -> bool:
        """Evaluate after an epoch; returns whether it is the best so far."""
        training = self.training
        found = self.task.evaluate(training.evaluated, training.precision)
        LOG.info(" * %s", found.text)
        self.board.add(training.epochs_done, **{f"val__{name}": value for name, value in found.figures.items()})
        training.epochs_done += 1
        training.steps_done = 0
        is_best = found.score > training.best
        training.best = max(training.best, found.score)
        return is_best

    def epoch(self, interrupt: Interrupt) -> int:
        """Train the rest of one epoch; returns the number of a signal that came, or 0."""
        self.wrapped.train()
        training, steps = self.training, self.task.steps_per_epoch
        names = (("Time", ".3f"), ("Data", ".3f"), ("Loss", ".4e"), *self.task.figures)
        meters, bad_steps, start = [Meter(*name) for name in names], 0, time.perf_counter()
        batches = self.task.batches(training.epochs_done, training.steps_done)
        for batch in progress(batches, f"epoch {training.epochs_done}"):
            data_time = time.perf_counter() - start
            done, accepted = self.step(batch)
            bad_steps = 0 if accepted else bad_steps + 1
            if bad_steps == BAD_STEPS:
                raise UserError(
                    f"the last {BAD_STEPS} steps were not finite (see the warnings above): lower the learning rate, or "
                    "leave the layer named there in float with --quant-config; the last good checkpoint is kept"
                )
            if self.profile is not None:
                self.profile.add(data_time, start, done.inputs)
            loss = done.loss.detach()
            figures = (time.perf_counter() - start, data_time, loss, *done.figures)
            for meter, figure in zip(meters, figures, strict=True):
                meter.add(figure, done.count)
            step = training.steps_done - 1
            if step % self.print_freq == 0 or step == steps - 1:
                LOG.info("Epoch: [%d][%d/%d] %s", training.epochs_done, step, steps, " ".join(map(str, meters)))
                place = training.epochs_done * steps + step
                self.board.add(place, train__loss=float(loss), train__lr=training.lr)
            number = interrupt.arrived(training.steps_done)
            if number:
                return number
            start = time.perf_counter()
        if self.profile is not None:
            LOG.info("--profile-step: %s", self.profile.report(training.model))
            self.profile = None
        return 0

    def step(self, batch: Any) -> tuple[Step, bool]:
        """One step; returns the task's result for the batch, and whether the weights were updated."""
        training = self.training
        with training.precision.autocast():
            done = self.task.step(self.wrapped, batch)
        training.optimizer.zero_grad()
        training.scaler.scale(done.loss).backward()
        whole = not training.scaler.is_enabled()
        accepted = self.guard is None or self.guard.accepts(done.loss, done.inputs, gradients=whole)
        if self.guard is None and not done.loss.isfinite():
            raise UserError(
                "the float model's loss is not finite: lower the learning rate; the last good checkpoint is kept"
            )
        training.step(accepted)
        return done, accepted

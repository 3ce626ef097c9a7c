"""Classification as a task of the training loop."""

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from accuracy import evaluate, ranks_hit
from data import Batch, Loaders
from distillation import Distiller
from fit import Evaluation, Step
from torch import nn
from training import Precision


@dataclass
class Classification:
    """The task of a `Fit`: image classification.

    Args:
        loaders: the images.
        device: device of the model.
        label_smoothing: of the cross entropy.
        distiller: the loss with a teacher, if there is one.
    """

    loaders: Loaders
    device: torch.device
    label_smoothing: float = 0.0
    distiller: Distiller | None = None

    figures = (("Acc@1", ".2f"), ("Acc@5", ".2f"))

    @property
    def steps_per_epoch(self) -> int:
        """The number of batches in an epoch."""
        return self.loaders.steps_per_epoch

    def batches(self, epoch: int, first: int) -> Iterable[Batch]:
        """The batches of an epoch, beginning with number `first`."""
        return self.loaders.train(epoch, first)

    def step(self, model: nn.Module, batch: Batch) -> Step:
        """The loss of a batch."""
        images, target = (part.to(self.device, non_blocking=True) for part in batch)
        with self.distiller.watching() if self.distiller else nullcontext({}) as features:
            output = model(images)
            loss = nn.functional.cross_entropy(output, target, label_smoothing=self.label_smoothing)
            if self.distiller is not None:
                loss = self.distiller.loss(images, output, features, target, loss)
        hits = ranks_hit(output.detach(), target)
        return Step(loss, images, tuple(100 * hit.mean() for hit in hits), len(target))

    def evaluate(self, model: nn.Module, precision: Precision) -> Evaluation:
        """The accuracy on the validation images."""
        accuracy = evaluate(model, self.loaders.val, self.device, precision)
        return Evaluation(accuracy.acc1, str(accuracy), {"acc1": accuracy.acc1, "acc5": accuracy.acc5})

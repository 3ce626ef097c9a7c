"""Detection as a task of the training loop, with its data loaders."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from blocks import Detect
from dataset import Picture
from detection import HEADLINE, Scores, detect, score
from detector import Detector, TorchDetector
from distributed import Process, gather
from fit import Evaluation, Step
from hyperparameters import Hyperparameters
from logs import LOG, progress
from loss import detection_loss, distillation_loss
from pictures import Augmented, Batch, Letterboxed, collate
from torch import nn
from torch.utils.data import DataLoader
from training import Precision


def loader(dataset: Any, batches: Sequence[Sequence[int]], workers: int) -> DataLoader[Batch]:
    """A loader of the given batches of a data set."""
    own = torch.Generator().manual_seed(0)  # keeps the global generator unchanged
    pin = torch.cuda.is_available()
    return DataLoader(
        dataset, batch_sampler=batches, num_workers=workers, collate_fn=collate, pin_memory=pin, generator=own
    )


def in_batches(order: Sequence[int], size: int) -> list[Sequence[int]]:
    """Split into batches of `size`; the last one may be smaller."""
    return [order[first : first + size] for first in range(0, len(order), size)]


def evaluate(
    detector: Detector, pictures: Sequence[Picture], size: int, batch_size: int, workers: int,
    rectangular: bool = True, confidence: float = 0.001, iou: float = 0.6,
) -> Scores:  # fmt: skip
    """Scores of a detector on pictures."""
    letterboxed = Letterboxed(pictures, size, batch_size, rectangular)
    batches = loader(letterboxed, in_batches(letterboxed.order, batch_size), workers)
    found = detect(detector, progress(batches, "evaluate"), pictures, confidence, iou)
    return score(found, pictures, detector.num_classes)


class Detection:
    """The task of a `Fit`: object detection.

    Args:
        pictures: pictures of "train" and "val".
        head: the model's head.
        hyp: hyperparameters of loss and augmentation.
        size: longer side of an image in px.
        batch_size: images in a batch, of all processes together.
        workers: processes that load pictures.
        seed: seed of order and augmentation.
        process: this process.
        teacher: float model in eval mode to learn from, if any.
    """

    figures = (("Box", ".4f"), ("Obj", ".4f"), ("Cls", ".4f"))

    def __init__(
        self, pictures: dict[str, Sequence[Picture]], head: Detect, hyp: Hyperparameters, size: int, batch_size: int,
        workers: int, seed: int, process: Process, teacher: nn.Module | None = None,
    ) -> None:  # fmt: skip
        self.pictures, self.head, self.hyp, self.size, self.batch_size = pictures, head, hyp, size, batch_size
        self.workers, self.seed, self.process, self.teacher = workers, seed, process, teacher

    @property
    def steps_per_epoch(self) -> int:
        """The number of batches in an epoch."""
        return max(1, len(self.pictures["train"]) // self.batch_size)

    def batches(self, epoch: int, first: int) -> Iterable[Batch]:
        """The batches of an epoch, beginning with number `first`; a smaller last one is dropped."""
        pictures, hyp = self.pictures["train"], self.hyp
        order = torch.randperm(len(pictures), generator=torch.Generator().manual_seed(self.seed + epoch)).tolist()
        seed = (self.seed, epoch)
        augmented = Augmented(pictures, self.size, seed, hyp.mosaic, hyp.fliplr, hyp.scale)
        whole = in_batches(order, self.batch_size)[first : self.steps_per_epoch]
        own = [batch[self.process.rank :: self.process.world] for batch in whole]
        return loader(augmented, own, self.workers)

    def calibration(self, count: int) -> Iterable[Batch]:
        """Training pictures without augmentation, for calibration."""
        pictures = self.pictures["train"]
        order = torch.randperm(len(pictures), generator=torch.Generator().manual_seed(self.seed)).tolist()[:count]
        letterboxed = Letterboxed(pictures, self.size, self.batch_size, rectangular=False)
        own = [batch[self.process.rank :: self.process.world] for batch in in_batches(order, self.batch_size)]
        return loader(letterboxed, [batch for batch in own if batch], self.workers)

    def step(self, model: nn.Module, batch: Batch) -> Step:
        """The loss of a batch."""
        device = self.process.device
        images = batch.images.to(device, non_blocking=True).float() / 255
        maps = model(images)
        loss, parts = detection_loss(maps, batch.targets.to(device), self.head, self.hyp.gains)
        if self.teacher is not None:
            with torch.no_grad():
                wanted = self.teacher(images)[1]
            loss = loss + self.hyp.distill * distillation_loss(maps, wanted)
        return Step(loss, images, tuple(parts), len(images))

    def evaluate(self, model: nn.Module, precision: Precision) -> Evaluation:
        """Average precision on the validation pictures."""
        scores = self.measure(model, precision)
        found = {"P": scores.precision, "R": scores.recall, "map50": scores.map50, "map": scores.map}
        return Evaluation(scores.map, f"mAP@.5 {scores.map50:.3f} mAP@.5:.95 {scores.map:.3f}", found)

    def measure(self, model: nn.Module, precision: Precision) -> Scores:
        """Scores on the validation pictures; the first process measures and prints them."""
        scores = None
        if self.process.is_first:
            detector = TorchDetector(model, self.head.outputs - 5, None, self.process.device)
            with precision.autocast():
                scores = evaluate(detector, self.pictures["val"], self.size, self.batch_size, self.workers)
            LOG.info("%s\n%s", HEADLINE, scores)
        return gather(scores)[0]

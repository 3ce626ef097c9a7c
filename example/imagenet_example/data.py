"""Images to train on, calibrate with and validate on: scikit-learn's digits, or an ImageFolder tree."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from errors import UserError
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

Batch = tuple[Tensor, Tensor]
Images: TypeAlias = TensorDataset | ImageFolder | Subset

CALIBRATION_IMAGES = 512
DIGITS_SIZE, DIGITS_MEAN, DIGITS_STD = 32, 0.3053, 0.3760
IMAGENET_SIZE, IMAGENET_MEAN, IMAGENET_STD = 224, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LOADER_WORKERS = 4


@dataclass(frozen=True)
class Data:
    """The images of one task; `calibration` holds training images as validation sees them."""

    train: Images
    calibration: Images
    val: Images
    num_classes: int
    image_size: int
    workers: int


def open_data(root: Path | None, seed: int) -> Data:
    """The ImageFolder tree at `root`, or the embedded digits.

    Args:
        root: folder that holds `train/<class>/*.jpg` and `val/<class>/*.jpg`; None for the digits.
        seed: splits the digits, and picks the images to calibrate with.
    """
    return open_digits(seed) if root is None else open_image_folder(root, seed)


def open_digits(seed: int) -> Data:
    """1797 handwritten digits of 8x8, upscaled to 32 px and three channels; one in five is for validation."""
    digits = load_digits()
    pixels = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
    images = torch.nn.functional.interpolate(pixels, size=DIGITS_SIZE, mode="bilinear", align_corners=False)
    images = ((images - DIGITS_MEAN) / DIGITS_STD).expand(-1, 3, -1, -1).contiguous()
    everything = TensorDataset(images, torch.tensor(digits.target))
    train, val = train_test_split(
        range(len(everything)), test_size=0.2, stratify=digits.target, random_state=seed % 2**32
    )
    train_set = Subset(everything, train)
    return Data(
        train=train_set,
        calibration=random_subset(train_set, CALIBRATION_IMAGES, seed),
        val=Subset(everything, val),
        num_classes=len(digits.target_names),
        image_size=DIGITS_SIZE,
        workers=0,
    )


def open_image_folder(root: Path, seed: int) -> Data:
    """An ImageFolder tree with the usual ImageNet transforms at 224 px."""
    finish = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(IMAGENET_MEAN, IMAGENET_STD)]
    augment = v2.Compose([v2.RandomResizedCrop(IMAGENET_SIZE), v2.RandomHorizontalFlip(), *finish])
    plain = v2.Compose([v2.Resize(256), v2.CenterCrop(IMAGENET_SIZE), *finish])
    train, as_val, val = (
        open_folder(root / part, transform)
        for part, transform in (("train", augment), ("train", plain), ("val", plain))
    )
    if train.classes != val.classes:
        odd = sorted(set(train.classes) ^ set(val.classes))
        raise UserError(f"{root}: train/ and val/ do not hold the same classes; only one of them has {odd[0]!r}")
    return Data(
        train=train,
        calibration=random_subset(as_val, CALIBRATION_IMAGES, seed),
        val=val,
        num_classes=len(train.classes),
        image_size=IMAGENET_SIZE,
        workers=min(LOADER_WORKERS, os.cpu_count() or 1),
    )


def open_folder(folder: Path, transform: v2.Transform) -> ImageFolder:
    """One side of the tree, `<folder>/<class>/<image>`."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not there: --data takes a folder that holds train/<class>/ and val/<class>/")
    try:
        return ImageFolder(folder, transform)
    except FileNotFoundError as error:  # no class folder, or one without images
        raise UserError(f"{folder}: {' '.join(str(error).split())}") from error


def random_subset(dataset: Images, count: int, seed: int) -> Subset:
    """`count` items of the data set (all, if it has fewer), in an order given by the seed."""
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed))
    return Subset(dataset, order[:count].tolist())


class Loaders:
    """The batches of a task.

    Args:
        data: the images.
        batch_size: images per batch.
        seed: order of the training images; that of an epoch depends on the seed and its number alone, so that a
            resumed training sees what the uninterrupted one would have.
    """

    def __init__(self, data: Data, batch_size: int, seed: int) -> None:
        self.data, self.batch_size, self.seed = data, batch_size, seed
        self.calibration = self._loader(data.calibration)
        self.val = self._loader(data.val)

    def train(self, epoch: int) -> DataLoader[Batch]:
        """The training batches of one epoch, shuffled; what does not fill the last batch is left out."""
        generator = torch.Generator().manual_seed(self.seed + epoch)
        drop_last = len(self.data.train) > self.batch_size
        return self._loader(self.data.train, shuffle=True, generator=generator, drop_last=drop_last)

    @property
    def steps_per_epoch(self) -> int:
        """How many training batches an epoch has."""
        return len(self.train(0))

    def example(self, count: int, device: torch.device) -> Tensor:
        """`count` validation images, shape (count, 3, size, size); repeated if there are fewer."""
        images = torch.stack([self.data.val[i % len(self.data.val)][0] for i in range(count)])
        return images.to(device)

    def _loader(self, dataset: Images, **options: Any) -> DataLoader[Batch]:
        pin_memory = torch.cuda.is_available()
        return DataLoader(dataset, self.batch_size, num_workers=self.data.workers, pin_memory=pin_memory, **options)

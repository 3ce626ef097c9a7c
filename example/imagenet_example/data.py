"""Images to train on, calibrate with and validate on: scikit-learn's digits, or an ImageFolder tree."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from errors import UserError
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

Batch = tuple[Tensor, Tensor]
Images: TypeAlias = TensorDataset | ImageFolder | Subset

CALIBRATION_IMAGES = 512
DIGITS_SIZE, DIGITS_MEAN, DIGITS_STD = 32, 0.3053, 0.3760
IMAGENET_SIZE, IMAGENET_MEAN, IMAGENET_STD = 224, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SMALL = 64  # images up to here are shifted, not cropped, as is usual on CIFAR
LOADER_WORKERS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True)
class Data:
    """The images of one task; `as_val` holds the training images as validation sees them, to calibrate with."""

    train: Images
    as_val: Images
    val: Images
    num_classes: int
    image_size: int
    workers: int


def open_data(root: Path | None, seed: int, image_size: int | None, workers: int | None) -> Data:
    """The ImageFolder tree at `root`, or the embedded digits.

    Args:
        root: folder that holds `train/<class>/*.jpg` and `val/<class>/*.jpg`; None for the digits.
        seed: splits the digits.
        image_size, workers: pixels of a side, processes that load images; None for the usual number.
    """
    if root is None:
        return open_digits(seed, image_size or DIGITS_SIZE, workers or 0)
    return open_image_folder(root, image_size or IMAGENET_SIZE, LOADER_WORKERS if workers is None else workers)


def open_digits(seed: int, image_size: int, workers: int) -> Data:
    """1797 handwritten digits of 8x8, upscaled and with three channels; one in five is for validation."""
    digits = load_digits()
    pixels = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
    images = torch.nn.functional.interpolate(pixels, size=image_size, mode="bilinear", align_corners=False)
    images = ((images - DIGITS_MEAN) / DIGITS_STD).expand(-1, 3, -1, -1).contiguous()
    everything = TensorDataset(images, torch.tensor(digits.target))
    places = range(len(everything))
    train, val = train_test_split(places, test_size=0.2, stratify=digits.target, random_state=seed % 2**32)
    train_set = Subset(everything, train)
    return Data(train_set, train_set, Subset(everything, val), len(digits.target_names), image_size, workers)


def open_image_folder(root: Path, image_size: int, workers: int) -> Data:
    """An ImageFolder tree with the usual transforms of ImageNet, or with those of CIFAR for small images."""
    finish = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(IMAGENET_MEAN, IMAGENET_STD)]
    crop: list[v2.Transform] = [v2.RandomResizedCrop(image_size)]
    plain: list[v2.Transform] = [v2.Resize(image_size * 256 // 224), v2.CenterCrop(image_size)]
    if image_size <= SMALL:
        plain = [v2.Resize(image_size), v2.CenterCrop(image_size)]
        crop = [*plain, v2.RandomCrop(image_size, padding=image_size // 8)]
    augment = v2.Compose([*crop, v2.RandomHorizontalFlip(), *finish])
    train, as_val, val = (
        open_folder(root / part, transform)
        for part, transform in (
            ("train", augment),
            ("train", v2.Compose([*plain, *finish])),
            ("val", v2.Compose([*plain, *finish])),
        )
    )
    if train.classes != val.classes:
        odd = sorted(set(train.classes) ^ set(val.classes))
        raise UserError(f"{root}: train/ and val/ do not hold the same classes; only one of them has {odd[0]!r}")
    return Data(train, as_val, val, len(train.classes), image_size, workers)


def open_folder(folder: Path, transform: v2.Transform) -> ImageFolder:
    """One side of the tree, `<folder>/<class>/<image>`."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not there: --data takes a folder that holds train/<class>/ and val/<class>/")
    try:
        images = ImageFolder(folder, transform, loader=read_image, allow_empty=True)
    except FileNotFoundError as error:  # no class folder
        raise UserError(f"{folder}: {' '.join(str(error).split())}") from error
    if not len(images):
        raise UserError(f"{folder} holds no images of its classes")
    return images


def read_image(path: str) -> Image.Image:
    """One file as RGB."""
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except OSError as error:
        raise UserError(f"{path} is not an image that can be read ({error}): remove or replace it") from error


class Seeded(Dataset[tuple[Any, Any]]):
    """A data set whose random transforms depend on the seed and the item alone, not on who loads it and when."""

    def __init__(self, dataset: Images, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(self.seed * len(self) + index)
            return self.dataset[index]


class Batches:
    """The batches of one process: of each batch of all processes, every `world`-th image from its own on.

    Args:
        order: the images of all processes.
        size: of a batch of all processes.
        rank: this process.
        world: how many there are.
        first: how many batches are left out, because a resumed training has them behind it.
    """

    def __init__(self, order: Sequence[int], size: int, rank: int, world: int, first: int = 0) -> None:
        self.order, self.size, self.rank, self.world, self.first = order, size, rank, world, first

    def __len__(self) -> int:
        return max(0, -(-len(self.order) // self.size) - self.first)

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(self.first * self.size, len(self.order), self.size):
            part = list(self.order[start : start + self.size][self.rank :: self.world])
            if part:  # the last batch may have none for the last processes
                yield part


class Loaders:
    """The batches of a task, of this process.

    Args:
        data: the images.
        batch_size: images of a batch of all processes together.
        seed: of order and augmentation; those of an epoch depend on the seed and its number alone, also when resumed.
        rank: this process.
        world: how many processes there are.
    """

    def __init__(self, data: Data, batch_size: int, seed: int, rank: int = 0, world: int = 1) -> None:
        self.data, self.batch_size, self.seed, self.rank, self.world = data, batch_size, seed, rank, world
        self.val = self._loader(data.val, range(len(data.val)))

    def train(self, epoch: int, first: int = 0) -> DataLoader[Batch]:
        """The training batches of one epoch, shuffled, from one of them on; the last, smaller one is left out."""
        generator = torch.Generator().manual_seed(self.seed + epoch)
        order = torch.randperm(len(self.data.train), generator=generator).tolist()
        whole = self.steps_per_epoch * self.batch_size if len(order) > self.batch_size else len(order)
        images = self.data.train  # the digits are not augmented
        seeded = Seeded(images, self.seed + epoch) if isinstance(images, ImageFolder) else images
        return self._loader(seeded, order[:whole], first)

    def calibration(self, batches: int | None) -> DataLoader[Batch]:
        """Training images as validation sees them: so many batches, or 512 images."""
        generator = torch.Generator().manual_seed(self.seed)
        order = torch.randperm(len(self.data.as_val), generator=generator).tolist()
        return self._loader(self.data.as_val, order[: batches * self.batch_size if batches else CALIBRATION_IMAGES])

    @property
    def steps_per_epoch(self) -> int:
        """How many training batches an epoch has."""
        return max(1, len(self.data.train) // self.batch_size)

    def alone(self) -> "Loaders":
        """All images, for what one process does by itself."""
        return Loaders(self.data, self.batch_size, self.seed)

    def example(self, count: int, device: torch.device) -> Tensor:
        """`count` validation images, shape (count, 3, size, size); repeated if there are fewer."""
        images = torch.stack([self.data.val[i % len(self.data.val)][0] for i in range(count)])
        return images.to(device)

    def _loader(self, dataset: Any, order: Sequence[int], first: int = 0) -> DataLoader[Batch]:
        batches = Batches(order, self.batch_size, self.rank, self.world, first)
        pin = torch.cuda.is_available()
        own = torch.Generator().manual_seed(self.seed)  # it leaves the model's random numbers alone, also when resumed
        return DataLoader(dataset, batch_sampler=batches, num_workers=self.data.workers, pin_memory=pin, generator=own)

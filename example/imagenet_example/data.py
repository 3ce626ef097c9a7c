"""Images for training, calibration and validation: scikit-learn's digits, or an ImageFolder tree."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from errors import UserError
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

Batch = tuple[Tensor, Tensor]
Images: TypeAlias = TensorDataset | ImageFolder | Subset

CALIBRATION_IMAGES = 512
DIGITS_SIZE, DIGITS_MEAN, DIGITS_STD = 32, 0.3053, 0.3760
IMAGENET_SIZE, IMAGENET_MEAN, IMAGENET_STD = 224, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SMALL = 64  # px; images up to this size are shifted, not cropped, as is usual on CIFAR
LOADER_WORKERS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True)
class Data:
    """The images of a task; `as_val` has the training images with the transforms of validation, for calibration."""

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
        image_size: pixels of a side; None for 224, or 32 for the digits.
        workers: processes that load images; None for up to 4, or none for the digits.
    """
    if root is None:
        return open_digits(seed, image_size or DIGITS_SIZE, workers or 0)
    return open_image_folder(root, image_size or IMAGENET_SIZE, LOADER_WORKERS if workers is None else workers)


def open_digits(seed: int, image_size: int, workers: int) -> Data:
    """1797 handwritten digits of 8x8 pixels, upscaled, with three channels; one in five is for validation."""
    from sklearn.datasets import load_digits  # a second of imports that --data does without
    from sklearn.model_selection import train_test_split

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
    """An ImageFolder tree with the usual transforms of ImageNet, or of CIFAR for small images.

    Raises:
        UserError: a folder is missing or empty, or the two have different classes.
    """
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
        raise UserError(f"{root}: train/ and val/ have different classes; only one of them has {odd[0]!r}")
    return Data(train, as_val, val, len(train.classes), image_size, workers)


def open_folder(folder: Path, transform: v2.Transform) -> ImageFolder:
    """One half of the tree, `<folder>/<class>/<image>`."""
    if not folder.is_dir():
        raise UserError(f"{folder} does not exist: --data takes a folder with train/<class>/ and val/<class>/")
    try:
        images = ImageFolder(folder, transform, loader=read_image, allow_empty=True)
    except FileNotFoundError as error:  # no class folder
        raise UserError(f"{folder}: {' '.join(str(error).split())}") from error
    if not len(images):
        raise UserError(f"{folder} has no images in its class folders")
    return images


def read_image(path: str) -> Image.Image:
    """The image in a file, as RGB.

    Raises:
        UserError: the file cannot be read as an image.
    """
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except OSError as error:
        raise UserError(f"{path} cannot be read as an image ({error}): remove or replace it") from error


class Seeded(Dataset[tuple[Any, Any]]):
    """A data set whose random transforms depend only on the seed and the item, not on the process that loads it."""

    def __init__(self, dataset: Images, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(self.seed * len(self) + index)
            return self.dataset[index]


class Batches:
    """The batches of one process: every `world`-th image of each global batch, beginning with number `rank`.

    Args:
        order: the images of all processes.
        size: images in a global batch.
        rank: number of this process.
        world: number of processes.
        first: number of batches to skip, which a resumed training has done already.
    """

    def __init__(self, order: Sequence[int], size: int, rank: int, world: int, first: int = 0) -> None:
        self.order, self.size, self.rank, self.world, self.first = order, size, rank, world, first

    def __len__(self) -> int:
        return max(0, -(-len(self.order) // self.size) - self.first)

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(self.first * self.size, len(self.order), self.size):
            part = list(self.order[start : start + self.size][self.rank :: self.world])
            if part:  # the last batch may be too small for all processes
                yield part


class Loaders:
    """The batches of this process.

    Args:
        data: the images.
        batch_size: images in a batch, of all processes together.
        seed: seed of order and augmentation; in each epoch they depend only on the seed and the epoch's number.
        rank: number of this process.
        world: number of processes.
    """

    def __init__(self, data: Data, batch_size: int, seed: int, rank: int = 0, world: int = 1) -> None:
        self.data, self.batch_size, self.seed, self.rank, self.world = data, batch_size, seed, rank, world
        self.val = self._loader(data.val, range(len(data.val)))

    def train(self, epoch: int, first: int = 0) -> DataLoader[Batch]:
        """The shuffled training batches of an epoch, beginning with number `first`; a smaller last one is dropped."""
        generator = torch.Generator().manual_seed(self.seed + epoch)
        order = torch.randperm(len(self.data.train), generator=generator).tolist()
        whole = self.steps_per_epoch * self.batch_size if len(order) > self.batch_size else len(order)
        images = self.data.train  # the digits are not augmented
        seeded = Seeded(images, self.seed + epoch) if isinstance(images, ImageFolder) else images
        return self._loader(seeded, order[:whole], first)

    def calibration(self, batches: int | None) -> DataLoader[Batch]:
        """Training images with the transforms of validation: the given number of batches, or 512 images."""
        generator = torch.Generator().manual_seed(self.seed)
        order = torch.randperm(len(self.data.as_val), generator=generator).tolist()
        return self._loader(self.data.as_val, order[: batches * self.batch_size if batches else CALIBRATION_IMAGES])

    @property
    def steps_per_epoch(self) -> int:
        """The number of training batches in an epoch."""
        return max(1, len(self.data.train) // self.batch_size)

    def alone(self) -> "Loaders":
        """Loaders of all images, for work that one process does alone."""
        return Loaders(self.data, self.batch_size, self.seed)

    def example(self, count: int, device: torch.device) -> Tensor:
        """`count` validation images (count, 3, size, size), repeated if there are fewer."""
        images = torch.stack([self.data.val[i % len(self.data.val)][0] for i in range(count)])
        return images.to(device)

    def _loader(self, dataset: Any, order: Sequence[int], first: int = 0) -> DataLoader[Batch]:
        batches = Batches(order, self.batch_size, self.rank, self.world, first)
        pin = torch.cuda.is_available()
        own = torch.Generator().manual_seed(self.seed)  # keeps the global generator, which dropout uses, unchanged
        return DataLoader(dataset, batch_sampler=batches, num_workers=self.data.workers, pin_memory=pin, generator=own)

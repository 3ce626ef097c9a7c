"""From pictures to the model's input: letterbox, mosaic, flip, batches."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from dataset import Picture
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

GREY = 114
MULTIPLE = 32  # height and width are multiples of the largest stride
LEAST_SIDE, LEAST_SHARE = 2.0, 0.1  # a box cut to less than this (side in px, share of its area) is dropped


@dataclass(frozen=True)
class Sample:
    """The model's input for one picture.

    Args:
        image: (3, height, width), uint8.
        boxes: (objects, 5): class, then left, top, right and bottom in px of `image`.
        index: number of the picture.
        scale: px of `image` per px of the picture.
        offset: x and y of the picture's corner in `image`, in px.
    """

    image: Tensor
    boxes: Tensor
    index: int
    scale: float = 1.0
    offset: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Batch:
    """Samples of one size.

    Args:
        images: (batch, 3, height, width), uint8.
        targets: (objects, 6): image in the batch, class, left, top, right, bottom in px.
        samples: the samples themselves.
    """

    images: Tensor
    targets: Tensor
    samples: Sequence[Sample]

    def pin_memory(self) -> "Batch":
        """The batch in pinned memory."""
        return Batch(self.images.pin_memory(), self.targets.pin_memory(), self.samples)


def collate(samples: Sequence[Sample]) -> Batch:
    """Make a batch of samples."""
    targets = [torch.cat((torch.full((len(s.boxes), 1), float(i)), s.boxes), 1) for i, s in enumerate(samples)]
    return Batch(torch.stack([s.image for s in samples]), torch.cat(targets), samples)


def corners(labels: np.ndarray, width: float, height: float, left: float = 0.0, top: float = 0.0) -> np.ndarray:
    """Labels (objects, 5) as boxes in px, for a picture of this size with its corner at (left, top)."""
    kind, x, y, w, h = labels.T
    sides = ((x - w / 2) * width + left, (y - h / 2) * height + top, (x + w / 2) * width + left)
    return np.stack((kind, *sides, (y + h / 2) * height + top), 1)


def as_tensor(canvas: np.ndarray) -> Tensor:
    """Convert an image (height, width, 3) to a tensor (3, height, width)."""
    return torch.from_numpy(np.ascontiguousarray(canvas.transpose(2, 0, 1)))


def letterbox(picture: Picture, index: int, size: int, shape: tuple[int, int]) -> Sample:
    """The picture scaled to a longer side of `size`, in the middle of a grey image of shape (height, width)."""
    scale = size / max(picture.size)
    width, height = (max(1, round(side * scale)) for side in picture.size)
    left, top = (shape[1] - width) // 2, (shape[0] - height) // 2
    canvas = np.full((*shape, 3), GREY, np.uint8)
    image = picture.load()
    resized = image if image.size == (width, height) else image.resize((width, height), Image.Resampling.BILINEAR)
    canvas[top : top + height, left : left + width] = np.asarray(resized)
    boxes = corners(picture.labels, width, height, left, top)
    return Sample(as_tensor(canvas), torch.from_numpy(boxes).float(), index, scale, (left, top))


def mosaic(pictures: Sequence[Picture], size: int, rescale: float, random: np.random.Generator) -> Sample:
    """Four pictures around a random point (Bochkovskiy et al. 2020, YOLOv4, arXiv:2004.10934, section 3.3).

    Each is scaled to a longer side of `size`, times a random factor from 1 - `rescale` to 1 + `rescale`, and cut off at
    the border of the square.
    """
    canvas = np.full((size, size, 3), GREY, np.uint8)
    x, y = (int(random.integers(size // 4, size - size // 4)) for _ in range(2))
    kept = []
    for i, picture in enumerate(pictures):
        scale = size / max(picture.size) * random.uniform(1 - rescale, 1 + rescale)
        width, height = (max(1, round(side * scale)) for side in picture.size)
        left, top = (x if i % 2 else x - width), (y if i // 2 else y - height)
        resized = np.asarray(picture.load().resize((width, height), Image.Resampling.BILINEAR))
        rows, columns = slice(max(0, top), min(size, top + height)), slice(max(0, left), min(size, left + width))
        canvas[rows, columns] = resized[rows.start - top : rows.stop - top, columns.start - left : columns.stop - left]
        kept.append(cut(corners(picture.labels, width, height, left, top), (columns, rows)))
    return Sample(as_tensor(canvas), torch.from_numpy(np.concatenate(kept)).float(), -1)


def cut(boxes: np.ndarray, window: tuple[slice, slice]) -> np.ndarray:
    """Cut boxes (objects, 5) to a window of columns and rows; drop those of which little is left."""
    clipped = boxes.copy()
    for axis, bounds in enumerate(window):
        clipped[:, [1 + axis, 3 + axis]] = clipped[:, [1 + axis, 3 + axis]].clip(bounds.start, bounds.stop)
    before, after = ((b[:, 3:] - b[:, 1:3]) for b in (boxes, clipped))
    large = (after > LEAST_SIDE).all(1) & (after.prod(1) > LEAST_SHARE * before.prod(1))
    return clipped[large]


def flip(sample: Sample) -> Sample:
    """The sample mirrored left to right."""
    boxes = sample.boxes.clone()
    boxes[:, [1, 3]] = sample.image.shape[2] - sample.boxes[:, [3, 1]]
    return Sample(sample.image.flip(2), boxes, sample.index)


class Augmented(Dataset[Sample]):
    """Augmented training pictures; the randomness of each depends only on the seed (with the epoch) and its number."""

    def __init__(
        self, pictures: Sequence[Picture], size: int, seed: Sequence[int], mosaics: float, flips: float, rescale: float
    ) -> None:
        self.pictures, self.size, self.seed = pictures, size, seed
        self.mosaics, self.flips, self.rescale = mosaics, flips, rescale

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> Sample:
        random = np.random.default_rng((*self.seed, index))
        if random.random() < self.mosaics:
            others = random.integers(len(self.pictures), size=3)
            sample = mosaic([self.pictures[i] for i in (index, *others)], self.size, self.rescale, random)
        else:
            sample = letterbox(self.pictures[index], index, self.size, (self.size, self.size))
        return flip(sample) if random.random() < self.flips else sample


class Letterboxed(Dataset[Sample]):
    """Pictures for evaluation, each with the shape of its batch; `order` is their order."""

    def __init__(self, pictures: Sequence[Picture], size: int, batch_size: int, rectangular: bool) -> None:
        self.pictures, self.size = pictures, size
        self.order = list(range(len(pictures)))
        if rectangular:
            self.order.sort(key=lambda i: pictures[i].size[1] / pictures[i].size[0])
        self.shapes: dict[int, tuple[int, int]] = {}
        for first in range(0, len(pictures), batch_size):
            batch = self.order[first : first + batch_size]
            self.shapes |= dict.fromkeys(batch, self._shape(batch) if rectangular else (size, size))

    def _shape(self, batch: Sequence[int]) -> tuple[int, int]:
        """The smallest height and width that fit all pictures of a batch."""
        sizes = np.array([self.pictures[i].size[::-1] for i in batch])
        needed = (sizes * self.size / sizes.max(1, keepdims=True)).max(0)
        height, width = (int(np.ceil(side / MULTIPLE) * MULTIPLE) for side in needed)
        return height, width

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> Sample:
        return letterbox(self.pictures[index], index, self.size, self.shapes[index])

"""How an image becomes the input of a model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fxqat.errors import ConfigError


@dataclass(frozen=True)
class Preprocessing:
    """Resize the shorter side, crop the centre, scale to 0..1, subtract the mean and divide by the standard deviation.

    Args:
        resize: length of the shorter side in pixels; 0 leaves the image as it is.
        crop: height and width in pixels; 0 for none.
        mean: for each channel, or one for all.
        std: the same.
        interpolation: ``"bilinear"``, ``"bicubic"`` or ``"nearest"``.
    """

    resize: int = 0
    crop: int = 0
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    interpolation: str = "bilinear"

    def __post_init__(self) -> None:
        if not all(std > 0 for std in self.std):
            raise ConfigError(f"--std: expected positive numbers, got {self.std}")
        if self.interpolation not in MODES:
            raise ConfigError(f"interpolation {self.interpolation!r}: expected {', '.join(MODES)}")

    def changed(self, **given: Any) -> Preprocessing:
        """With the values that are given; None keeps what is there."""
        return replace(self, **{name: value for name, value in given.items() if value is not None})

    def image(self, image: Any) -> Tensor:
        """The input that a PIL image gives, of shape (channels, height, width)."""
        from PIL import Image

        image = image.convert("L" if len(self.mean) == 1 and image.mode == "L" else "RGB")
        if self.resize:
            short = min(image.size)
            size = tuple(max(self.crop, round(side * self.resize / short)) for side in image.size)
            image = image.resize(size, getattr(Image.Resampling, MODES[self.interpolation]))
        if self.crop:
            left, top = ((side - self.crop) // 2 for side in image.size)
            if left < 0 or top < 0:
                raise ConfigError(f"an image of {image.size} is smaller than --crop {self.crop}; give --resize")
            image = image.crop((left, top, left + self.crop, top + self.crop))
        pixels = np.asarray(image, dtype=np.uint8)
        return self.pixels(torch.from_numpy(pixels.reshape(*pixels.shape[:2], -1).copy()).permute(2, 0, 1))

    def pixels(self, pixels: Tensor) -> Tensor:
        """The input that raw values from 0 to 255 give, of shape (..., channels, height, width)."""
        mean, std = (torch.tensor(values).reshape(-1, 1, 1) for values in (self.mean, self.std))
        return (pixels.float() / 255 - mean) / std


MODES = {"bilinear": "BILINEAR", "bicubic": "BICUBIC", "nearest": "NEAREST"}

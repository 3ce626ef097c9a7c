"""Default epochs, batch sizes and learning rates."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """The defaults of one kind of training; `lr` by optimizer."""

    epochs: int
    batch_size: int
    lr: Mapping[str, float]


# The embedded digits take minutes on two cores.
DIGITS_FLOAT = Recipe(epochs=6, batch_size=32, lr={"sgd": 0.01, "adam": 1e-3})
DIGITS_QAT = Recipe(epochs=3, batch_size=32, lr={"sgd": 1e-3, "adam": 1e-4})
IMAGE_FOLDER = Recipe(epochs=90, batch_size=256, lr={"sgd": 0.1, "adam": 0.1})

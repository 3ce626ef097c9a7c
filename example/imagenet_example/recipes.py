"""Default numbers of training."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """Defaults of one kind of training; `lr` is by optimizer."""

    epochs: int
    batch_size: int
    lr: Mapping[str, float]


# The embedded digits are small: minutes on two cores. Everything else has the guide's defaults.
DIGITS_FLOAT = Recipe(epochs=6, batch_size=32, lr={"sgd": 0.01, "adam": 1e-3})
DIGITS_QAT = Recipe(epochs=3, batch_size=32, lr={"sgd": 1e-3, "adam": 1e-4})
GUIDE = Recipe(epochs=90, batch_size=256, lr={"sgd": 0.1, "adam": 0.1})

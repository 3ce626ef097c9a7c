"""Default numbers of training, and how the learning rate goes."""

import math
from collections.abc import Callable, Mapping
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

# Factor of the learning rate at `epoch` (with its fraction) of `epochs`.
SCHEDULES: dict[str, Callable[[float, int], float]] = {
    "cosine": lambda epoch, epochs: 0.5 * (1 + math.cos(math.pi * min(epoch / epochs, 1.0))),
    "step": lambda epoch, epochs: 0.1 ** (epoch // 30),
    "constant": lambda epoch, epochs: 1.0,
}


def lr_factor(schedule: str, warmup_epochs: float, epoch: float, epochs: int) -> float:
    """The factor of the learning rate, which rises to the schedule's in a line over the first epochs."""
    rising = min(1.0, epoch / warmup_epochs) if warmup_epochs else 1.0
    return rising * SCHEDULES[schedule](epoch, epochs)

"""Learning rate schedules."""

import math
from collections.abc import Callable

# Factor of the learning rate at `epoch`, a real number, of `epochs`.
SCHEDULES: dict[str, Callable[[float, int], float]] = {
    "cosine": lambda epoch, epochs: 0.5 * (1 + math.cos(math.pi * min(epoch / max(epochs, 1), 1.0))),
    "step": lambda epoch, epochs: 0.1 ** (epoch // 30),
    "constant": lambda epoch, epochs: 1.0,
}


def lr_factor(schedule: str, warmup_epochs: float, epoch: float, epochs: int, final: float) -> float:
    """The factor of the learning rate: it rises linearly in the warmup; the schedule falls to `final` instead of 0."""
    rising = min(1.0, epoch / warmup_epochs) if warmup_epochs else 1.0
    return rising * (final + (1 - final) * SCHEDULES[schedule](epoch, epochs))

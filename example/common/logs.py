"""Output of a run: log lines, progress bars, running averages, TensorBoard."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from errors import UserError
from torch import Tensor
from tqdm import tqdm

LOG = logging.getLogger("example")
LOG_LEVELS = {0: "debug", 1: "info", 2: "warning", 3: "error"}


class ThroughBars(logging.Handler):
    """Prints log lines above the progress bars."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one line."""
        tqdm.write(self.format(record))


def set_up_logging(level: int, first: bool) -> None:
    """Print log lines of the example and of fxqat from a level on; processes other than the first print only errors."""
    for name in (LOG.name, "fxqat"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [ThroughBars()]
        logger.setLevel(getattr(logging, LOG_LEVELS[level if first else 3].upper()))
        logger.propagate = False


def shows_progress() -> bool:
    """Whether the log level allows progress bars."""
    return LOG.getEffectiveLevel() <= logging.INFO


def progress(items: Iterable[Any], title: str, unit: str = "batch") -> "tqdm[Any]":
    """A progress bar over items, erased at the end; hidden if the output is no terminal."""
    return tqdm(items, desc=title, leave=False, unit=unit, disable=None if shows_progress() else True)


class Meter:
    """The latest value of a figure and its weighted average; tensors are read only when they are printed."""

    def __init__(self, name: str, form: str) -> None:
        self.name, self.form = name, form
        self.value: float | Tensor = 0.0
        self.total: float | Tensor = 0.0
        self.count = 0

    def add(self, value: float | Tensor, count: int = 1) -> None:
        """Add the average value of `count` items."""
        self.value = value
        self.total = self.total + value * count
        self.count += count

    @property
    def average(self) -> float:
        """The average over all items."""
        return float(self.total) / max(self.count, 1)

    def __str__(self) -> str:
        return f"{self.name} {float(self.value):{self.form}} ({self.average:{self.form}})"


class Board:
    """Writes TensorBoard files to a folder; does nothing without a folder."""

    def __init__(self, folder: Path | None) -> None:
        self.writer: Any = None
        if folder is not None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise UserError("--tensorboard needs the package tensorboard: pip install tensorboard") from error
            try:
                self.writer = SummaryWriter(str(folder))
            except OSError as error:
                raise UserError(f"--tensorboard {folder} cannot be written: {error.strerror}") from error

    def add(self, step: int, **values: float) -> None:
        """Add one point to each curve; `__` in a name stands for `/`."""
        if self.writer is not None:
            for name, value in values.items():
                self.writer.add_scalar(name.replace("__", "/"), value, step)

    def close(self) -> None:
        """Write buffered points."""
        if self.writer is not None:
            self.writer.close()

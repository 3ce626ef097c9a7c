"""The base of the histogram observers: counts of all values seen, in cells that grow with the data."""

from __future__ import annotations

import torch
from torch import Tensor

from fxqat.errors import ConfigError
from fxqat.numerics import valid_scale
from fxqat.observer.base import weighted_samples
from fxqat.observer.summary import SummaryObserver
from fxqat.scheme import QuantizeScheme

MAX_SAMPLES = 2**23
"""Largest ``max_samples``: the counts of one tensor, at most twice this, are exact in float32."""


class HistogramObserver(SummaryObserver):
    """Counts values in ``bins`` cells on either side of 0, up to a limit that is a power of two.

    The limit is the smallest power of two that no magnitude exceeds. When it grows, every new cell is a whole number of
    old ones, so counts are moved and never split. The histogram is therefore the same for every order of the batches
    and every distribution over ranks.
    Cell k on the right holds ``k * width < x <= (k + 1) * width``, cell 0 also holds 0; the left half mirrors it.

    Args:
        scheme: the scheme the range is for.
        axis: channel axis, None per tensor.
        num_channels: number of channels when ``axis`` is given; each has its own histogram.
        bins: number of cells on either side of 0, a power of two; the data fills more than half of them.
        max_samples: a histogram per tensor counts about this many values of each tensor, which stand for all.

    Attributes:
        histogram: number of values in each cell, ``(1 or channels, 2 * bins)``.

    Raises:
        ConfigError: an argument is out of its range.
    """

    histogram: Tensor

    def __init__(
        self,
        scheme: QuantizeScheme,
        axis: int | None = None,
        num_channels: int | None = None,
        bins: int = 2048,
        max_samples: int = 2**20,
    ) -> None:
        super().__init__(scheme, axis, num_channels)
        if bins < 2 or bins & (bins - 1):
            raise ConfigError(f"{self.name}: bins must be a power of two and at least 2, got {bins}")
        if not 1 <= max_samples <= MAX_SAMPLES:
            raise ConfigError(f"{self.name}: max_samples must be 1 to {MAX_SAMPLES}, got {max_samples}")
        self.bins = bins
        self.max_samples = max_samples
        self.register_buffer("histogram", torch.zeros(self.min_val.numel(), 2 * bins))

    def counts(self) -> tuple[Tensor, ...]:
        """The histogram."""
        return (self.histogram,)

    def limit(self) -> Tensor:
        """Where the histogram ends on either side, ``(rows, 1)``."""
        reach = torch.maximum(-self.lowest, self.highest).clamp(min=0.0)  # minus infinity before the first data
        return valid_scale(reach.reshape(-1, 1), bits=1, up=True)

    def cell_width(self) -> Tensor:
        """Width of a cell, ``(rows, 1)``."""
        return self.limit() / self.bins

    def data_range(self) -> tuple[Tensor, Tensor]:
        """The extremes, widened to contain 0, each ``(rows, 1)``."""
        return self.lowest.reshape(-1, 1).clamp(max=0.0), self.highest.reshape(-1, 1).clamp(min=0.0)

    def widen(self, lowest: Tensor, highest: Tensor) -> None:
        """Move the counts to their cells under the new limit."""
        before = self.limit()
        super().widen(lowest, highest)
        middles = torch.arange(-self.bins, self.bins, dtype=torch.float32, device=lowest.device) + 0.5
        # after NaN the limit is the smallest one: the range is not used, but the cells must exist
        cells = torch.floor(middles * (before / self.limit())).clamp_(-self.bins, self.bins - 1).long() + self.bins
        self.histogram.copy_(torch.zeros_like(self.histogram).scatter_add_(1, cells, self.histogram))

    def count(self, x: Tensor, low: Tensor, high: Tensor) -> None:
        """Count the values of one tensor."""
        values, weights = weighted_samples(x, self.axis, self.max_samples)
        # the extremes record a value that is not finite; here it may be in any cell
        cell = (values.abs() / self.cell_width()).nan_to_num_(nan=0.0).ceil_().sub_(1).clamp_(0, self.bins - 1)
        index = torch.where(values < 0, self.bins - 1 - cell, self.bins + cell).long()
        weights = torch.ones_like(values) if weights is None else weights
        self.histogram.add_(torch.zeros_like(self.histogram).scatter_add_(1, index, weights))

"""KL: the range that loses least information, by entropy calibration."""

from __future__ import annotations

import torch
from torch import Tensor

from fxqat.errors import ConfigError
from fxqat.observer.histogram import HistogramObserver
from fxqat.scheme import QuantizeScheme

CACHED_VALUES = 2**19

EQUAL = 1e-9
"""Divergences below this many nats are rounding."""


class KLObserver(HistogramObserver):
    """Chooses the range whose quantized distribution diverges least from that of all data seen.

    For each window of ``i`` cells, P is the part of the histogram inside, with what is outside added to the window's
    last cell, and Q is the part inside in as many groups as there are integers, each group spread evenly over those of
    its cells where P is not 0. The window of least ``KL(P || Q) = sum p * log(p / q)`` is taken, and its range ends
    half a cell outside of it, but never outside of the data. Of equally good windows the widest is taken.
    Windows of a symmetric scheme are on the magnitudes, from 0. Those of an asymmetric scheme keep the proportion of
    the data's two ends, and what is outside is added to the cells at both ends.
    Source: Migacz, "8-bit inference with TensorRT", GTC 2017, S7310, slides "Entropy calibration - pseudocode".
    Where the number of cells is no multiple of the number of integers, groups differ by one cell.

    Args:
        scheme: the scheme the range is for.
        axis: channel axis, None per tensor.
        num_channels: number of channels when ``axis`` is given; each has a histogram of its own.
        bins: number of cells on either side of 0, a power of two; more than half of them are within the data.
        max_samples: a histogram per tensor counts about this many evenly spaced values of each tensor.

    Raises:
        ConfigError: an argument is out of its range, or there are fewer than two cells for each integer.
    """

    def __init__(
        self,
        scheme: QuantizeScheme,
        axis: int | None = None,
        num_channels: int | None = None,
        bins: int = 2048,
        max_samples: int = 2**20,
    ) -> None:
        super().__init__(scheme, axis, num_channels, bins, max_samples)
        first = scheme.symmetric_zero_point if scheme.symmetric else scheme.quant_min
        self.levels = scheme.quant_max - first + 1
        if bins < 2 * self.levels:
            raise ConfigError(
                f"KL: {scheme} has {self.levels} levels and needs at least {2 * self.levels} bins, got bins={bins}. "
                "Set more bins, or take MSE, which is as good for many bits."
            )

    def choose(self) -> tuple[Tensor, Tensor]:
        """The range of least divergence."""
        low, high = self.data_range()
        histogram, below, above = self._windows(low, high)
        zero = histogram.shape[1] - self.bins  # the first cell on the right
        start, end = (zero - below).clamp(min=0), zero + above  # all of the magnitudes begin at 0
        rows = max(1, CACHED_VALUES // (self.levels * self.bins))
        parts = zip(histogram.split(rows), start.split(rows), end.split(rows), strict=True)
        divergence = torch.cat([self._divergence(*part) for part in parts])
        pick = self.bins - 1 - divergence.clamp(min=EQUAL).flip(1).argmin(1, keepdim=True)
        width, shape = self.cell_width(), self.min_val.shape
        low = torch.maximum(low, (below.gather(1, pick) + 0.5) * -width)
        high = torch.minimum(high, (above.gather(1, pick) + 0.5) * width)
        return low.reshape(shape), high.reshape(shape)

    def _windows(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The histogram to look at, and how many cells each window has below and above 0, ``(rows, bins)``."""
        cells = torch.arange(1, self.bins + 1, device=low.device)
        if self.scheme.symmetric:
            magnitudes = self.histogram[:, self.bins :] + self.histogram[:, : self.bins].flip(1)
            reach = cells.expand(len(low), -1)
            return magnitudes, reach, reach
        # a share that is not a number gives a range that is not used
        shares = [(end / self.limit()).nan_to_num().clamp(0.0, 1.0) for end in (-low, high)]
        below, above = (torch.ceil(cells * share).long() for share in shares)
        return self.histogram, below, above

    def _divergence(self, histogram: Tensor, start: Tensor, end: Tensor) -> Tensor:
        """``KL(P || Q)`` in nats of every window ``[start, end)``, ``(rows, bins)``; infinite where there is none.

        Sums over cells are differences of cumulative sums, in float64 because the tails are small beside the whole. All
        cells of P that are not 0 add ``p log p``; a group of Q has one log q, so it adds ``sum(p) * log q``.
        """
        levels, mass = self.levels, histogram.double()
        total, filled = _cumulated(mass), _cumulated(mass > 0)
        parts = torch.arange(levels + 1, device=start.device, dtype=torch.float64)
        bounds = start.unsqueeze(-1) + torch.ceil(parts * (end - start).unsqueeze(-1) / levels).long()
        inside = total.gather(1, bounds.flatten(1)).reshape(bounds.shape).diff(dim=-1)
        nonzero = filled.gather(1, bounds.flatten(1)).reshape(bounds.shape).diff(dim=-1)
        entropy = _cumulated(torch.xlogy(mass, mass))
        plogp = entropy.gather(1, end) - entropy.gather(1, start)
        spread = inside.clone()
        outliers = (
            (0, start, total.gather(1, start)),
            (-1, (end - 1).clamp(min=0), total[:, -1:] - total.gather(1, end)),
        )
        for group, cell, outside in outliers:
            there = mass.gather(1, cell)
            plogp = plogp + torch.xlogy(there + outside, there + outside) - torch.xlogy(there, there)
            spread[..., group] += outside
            nonzero[..., group] += ((there == 0) & (outside > 0)).to(nonzero.dtype)
        cross = torch.xlogy(spread, inside / nonzero.clamp(min=1)).sum(-1)
        divergence = (plogp - cross) / total[:, -1:] + torch.log(inside.sum(-1) / total[:, -1:])
        return divergence.nan_to_num(nan=torch.inf).masked_fill(end - start < levels, torch.inf)


def _cumulated(values: Tensor) -> Tensor:
    """Sums of the first 0, 1, ... values of each row, in float64."""
    return torch.nn.functional.pad(values.double().cumsum(1), (1, 0))

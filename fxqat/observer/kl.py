"""KL: the range that loses the least information (entropy calibration)."""

from __future__ import annotations

import torch
from torch import Tensor

from fxqat.errors import ConfigError
from fxqat.observer.histogram import HistogramObserver
from fxqat.scheme import QuantizeScheme

CACHED_VALUES = 2**19
"""Values of a temporary tensor that fit into the cache."""

EQUAL = 1e-9
"""Divergences below this, in nats, are rounding errors and count as equal."""


class KLObserver(HistogramObserver):
    """Chooses the range whose quantized distribution diverges least from the distribution of all data seen.

    For each window of ``i`` cells, P is the histogram inside the window; the counts outside are added to its last cell.
    Q splits the histogram inside into one group for each integer and spreads each group evenly over those of its cells
    where P is not 0. The window with the least ``KL(P || Q) = sum p * log(p / q)`` wins; of equal ones, the widest. Its
    range ends half a cell outside the window, but never outside the data.
    For a symmetric scheme the histogram is that of the magnitudes, and windows start at 0. For an asymmetric scheme
    windows keep the ratio of the data's two ends, and the counts outside are added to the cells at both ends.
    Source: Migacz, "8-bit inference with TensorRT", GTC 2017, S7310, slides "Entropy calibration - pseudocode".
    If the number of cells is no multiple of the number of integers, groups differ by one cell.

    Args:
        scheme: the scheme the range is for.
        axis: channel axis, None per tensor.
        num_channels: number of channels when ``axis`` is given; each has its own histogram.
        bins: number of cells on either side of 0, a power of two; the data fills more than half of them.
        max_samples: a histogram per tensor counts about this many values of each tensor, which stand for all.

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
                "Set more bins, or use MSE, which is as good for many bits."
            )

    def choose(self) -> tuple[Tensor, Tensor]:
        """The range of least divergence."""
        low, high = self.data_range()
        histogram, below, above = self._windows(low, high)
        zero = histogram.shape[1] - self.bins  # the first cell on the right
        start, end = (zero - below).clamp(min=0), zero + above  # windows of magnitudes start at 0
        rows = max(1, CACHED_VALUES // (self.levels * self.bins))
        parts = zip(histogram.split(rows), start.split(rows), end.split(rows), strict=True)
        divergence = torch.cat([self._divergence(*part) for part in parts])
        pick = self.bins - 1 - divergence.clamp(min=EQUAL).flip(1).argmin(1, keepdim=True)
        width, shape = self.cell_width(), self.min_val.shape
        low = torch.maximum(low, (below.gather(1, pick).to(width) + 0.5) * -width)
        high = torch.minimum(high, (above.gather(1, pick).to(width) + 0.5) * width)
        return low.reshape(shape), high.reshape(shape)

    def _windows(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The histogram, and the number of cells of each window below and above 0, ``(rows, bins)``."""
        cells = torch.arange(1, self.bins + 1, device=low.device)
        if self.scheme.symmetric:
            magnitudes = self.histogram[:, self.bins :] + self.histogram[:, : self.bins].flip(1)
            reach = cells.expand(len(low), -1)
            return magnitudes, reach, reach
        # a share that is NaN gives a range that is not used
        shares = [(end / self.limit()).nan_to_num().clamp(0.0, 1.0) for end in (-low, high)]
        below, above = (torch.ceil(cells * share).long() for share in shares)
        return self.histogram, below, above

    def _divergence(self, histogram: Tensor, start: Tensor, end: Tensor) -> Tensor:
        """``KL(P || Q)`` in nats of every window ``[start, end)``, ``(rows, bins)``; infinite for windows too small.

        Sums over cells are differences of cumulative sums, in float64 because the tails are small compared with the
        whole. Every cell of P that is not 0 adds ``p log p``; a group of Q has one log q and adds ``sum(p) * log q``.
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

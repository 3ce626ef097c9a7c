"""HistogramL2: the range of least expected squared error over a histogram of all data."""

from __future__ import annotations

import torch
from torch import Tensor

from fxqat.numerics import choose_qparams
from fxqat.observer.histogram import HistogramObserver

COARSE = 16
"""Number of ratios in the first search, each smaller than the one before by the factor ``sqrt(2)``."""

FINER_STEPS = (0.125, 0.03125)
"""Later searches try the exponents around the best one in these steps, three to either side."""

CACHED_VALUES = 2**21
"""Values of a temporary tensor that fit into the cache."""


class HistogramL2Observer(HistogramObserver):
    """Chooses the range with the smallest squared quantization error over all data seen.

    Formula: ``argmin over (a, b) of sum over cells of count * E[(t - fake_quantize(t; a * min, b * max))**2]`` with t
    uniform in its cell and ratios a, b in (0, 1]; ``a = b`` for symmetric schemes. The expectation is exact: with ``v =
    t / scale`` and n the nearest integer within the range, ``(v - n)**2`` has the antiderivative ``n / 12 +
    (v - n)**3 / 3``, which is continuous, inside the range and beyond it.
    Source: Banner et al. 2019 (arXiv:1810.05723), section 2.1, with the histogram instead of a model of the density.

    Args:
        scheme: the scheme the range is for.
        axis: channel axis, None per tensor.
        num_channels: number of channels when ``axis`` is given; each has its own histogram.
        bins: number of cells on either side of 0, a power of two; the data fills more than half of them.
        max_samples: a histogram per tensor counts about this many values of each tensor, which stand for all.

    Raises:
        ConfigError: an argument is out of its range.
    """

    def choose(self) -> tuple[Tensor, Tensor]:
        """The range of least error."""
        ends = (1 if self.scheme.symmetric else 2) * (COARSE,)
        rows = max(1, CACHED_VALUES // (self.histogram.shape[1] * COARSE ** len(ends)))
        whole = (self.histogram, self.cell_width(), *self.data_range())
        parts = [self._search(*part) for part in zip(*(values.split(rows) for values in whole), strict=True)]
        low, high = torch.cat(parts).reshape(*self.min_val.shape, 2).unbind(-1)
        return low, high

    def _search(self, histogram: Tensor, width: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """The best range of each row, ``(rows, 2)``. The search is over the exponents of the ratios ``2**exponent``."""
        device = histogram.device
        coarse = torch.arange(COARSE, dtype=torch.float32, device=device) / -2
        exponents = self._pairs(coarse).unsqueeze(0).expand(len(low), -1, -1)
        around = self._pairs(torch.arange(-3, 4, device=device))
        for step in FINER_STEPS:
            best = self._best(exponents, histogram, width, low, high)
            exponents = (best + step * around).clamp(max=0.0)
        best = self._best(exponents, histogram, width, low, high)
        return torch.cat([low, high], 1) * best.squeeze(1).exp2()

    def _pairs(self, values: Tensor) -> Tensor:
        """All pairs of values for the two ends of the range, ``(pairs, 2)``; equal ones if the scheme is symmetric."""
        if self.scheme.symmetric:
            return values.unsqueeze(1).expand(-1, 2)
        return torch.cartesian_prod(values, values)

    def _best(self, exponents: Tensor, histogram: Tensor, width: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """The pair of exponents of least error in each row: from ``(rows, k, 2)``, ``(rows, 1, 2)``."""
        ratios = exponents.exp2()
        error = self._expected_error(histogram, width, low * ratios[..., 0], high * ratios[..., 1])
        pick = error.argmin(1).reshape(-1, 1, 1).expand(-1, 1, 2)
        return exponents.gather(1, pick)

    def _expected_error(self, histogram: Tensor, width: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """The sum of squared errors of each range, ``(rows, k)``; comparable within a row."""
        scale, zero_point = (values.unsqueeze(-1) for values in choose_qparams(low, high, self.scheme))
        edges = torch.arange(-self.bins, self.bins + 1, device=width.device)
        in_steps = width.unsqueeze(-1) * edges / scale
        nearest = in_steps.round().clamp(self.scheme.quant_min - zero_point, self.scheme.quant_max - zero_point)
        antiderivative = nearest / 12 + (in_steps - nearest) ** 3 / 3
        in_cells = (antiderivative.diff(dim=-1) * histogram.unsqueeze(1)).sum(-1)
        return in_cells * (scale.squeeze(-1) / width) ** 3

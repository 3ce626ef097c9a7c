"""Percentile: the range without the rarest values at its ends."""

from __future__ import annotations

import torch
from torch import Tensor

from fxqat.errors import ConfigError
from fxqat.numerics import min_max_of
from fxqat.observer.base import ObserverBase, samples_of
from fxqat.scheme import QuantizeScheme


class PercentileObserver(ObserverBase):
    """Clips the rarest values at both ends of each batch, and averages the range over batches.

    Formula: ``[percentile(x, 100 - p), percentile(x, p)]``, interpolated linearly (numpy's default). A symmetric
    scheme covers the wider of the two ends.
    Source: McKinstry et al. 2018 (arXiv:1809.04191); Wu et al. 2020 (arXiv:2004.09602), section 3.4, "Percentile".

    Args:
        scheme: the scheme the range is for.
        axis: channel axis, None per tensor.
        num_channels: number of channels when ``axis`` is given.
        percentile: p, in (50, 100]; 100 is the range of the extremes.
        ema_ratio: weight of the past in a moving average over batches, in [0, 1); None takes their union.
        max_samples: a per-tensor range uses about this many evenly spaced values.

    Raises:
        ConfigError: an argument is out of its range.

    Example:
        >>> observer = PercentileObserver(QuantizeScheme(), percentile=75)
        >>> _ = observer(torch.tensor([0.0, 1.0, 2.0, 3.0, 100.0]))
        >>> observer.min_val.item(), observer.max_val.item()
        (1.0, 3.0)
    """

    def __init__(
        self,
        scheme: QuantizeScheme,
        axis: int | None = None,
        num_channels: int | None = None,
        percentile: float = 99.99,
        ema_ratio: float | None = 0.9,
        max_samples: int = 2**20,
    ) -> None:
        super().__init__(scheme, axis, num_channels, ema_ratio)
        if not 50.0 < percentile <= 100.0 or max_samples < 1:
            raise ConfigError(
                f"{self.name}: needs a percentile in (50, 100] and max_samples >= 1, got percentile={percentile}, "
                f"max_samples={max_samples}"
            )
        self.percentile = percentile
        self.max_samples = max_samples

    def range_of(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The percentiles of one tensor."""
        samples = samples_of(x, self.axis, self.max_samples)
        low, high = (self._tail(samples, largest).reshape(self.min_val.shape) for largest in (False, True))
        # NaN and infinity must show in the range, also when they are among the clipped values
        lowest, highest = min_max_of(x, self.axis)
        return torch.where(lowest.isfinite(), low, lowest), torch.where(highest.isfinite(), high, highest)

    def _tail(self, rows: Tensor, largest: bool) -> Tensor:
        """The percentile at which the largest, or the smallest, values of each row begin; ``rows`` is ``(rows, n)``."""
        last = rows.shape[1] - 1
        position = last * (self.percentile / 100)
        tail = rows.topk(last - int(position) + 1, dim=1, largest=largest).values
        return torch.lerp(tail[:, -1], tail[:, max(tail.shape[1] - 2, 0)], position - int(position))

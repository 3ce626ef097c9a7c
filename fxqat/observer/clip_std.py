"""ClipStd: the mean plus and minus some standard deviations."""

from __future__ import annotations

import torch
from torch import Tensor

from fxqat.errors import ConfigError
from fxqat.numerics import min_max_of, rows_of
from fxqat.observer.base import ObserverBase
from fxqat.scheme import QuantizeScheme


class ClipStdObserver(ObserverBase):
    """Clips each batch at some standard deviations from its mean, and averages the range over batches.

    Formula: ``[max(min(x), mean - k * std), min(max(x), mean + k * std)]`` with ``k = std_scale`` and the standard
    deviation of the values themselves (divided by n).
    Source: name and k are those of MQBench (Li et al. 2021, arXiv:2111.03759). Its code takes the wider of the two
    bounds at each end and so never clips; here the narrower one is taken.

    Args:
        scheme: the scheme the range is for.
        axis: channel axis, None per tensor.
        num_channels: number of channels when ``axis`` is given.
        std_scale: k, positive.
        ema_ratio: weight of the past in a moving average over batches, in [0, 1); None takes their union.

    Raises:
        ConfigError: an argument is out of its range.
    """

    def __init__(
        self,
        scheme: QuantizeScheme,
        axis: int | None = None,
        num_channels: int | None = None,
        std_scale: float = 2.6,
        ema_ratio: float | None = 0.9,
    ) -> None:
        super().__init__(scheme, axis, num_channels, ema_ratio)
        if not std_scale > 0:
            raise ConfigError(f"{self.name}: std_scale must be positive, got {std_scale}")
        self.std_scale = std_scale

    def range_of(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The clipped range of one tensor."""
        low, high = min_max_of(x, self.axis)
        std, mean = (moment.reshape(low.shape) for moment in std_mean(x, self.axis))
        reach = self.std_scale * std
        return (mean - reach).clamp(low, high), (mean + reach).clamp(low, high)


def std_mean(x: Tensor, axis: int | None) -> tuple[Tensor, Tensor]:
    """Standard deviation (divided by n) and mean of each row of :func:`~fxqat.numerics.rows_of`: (rows,)."""
    std, mean = torch.std_mean(rows_of(x, axis), 1, correction=0)
    return std, mean

"""Average: the mean over all batches of minimum and maximum."""

from __future__ import annotations

import torch
from torch import Tensor

from fxqat.observer.base import ObserverBase, share_over_ranks
from fxqat.scheme import QuantizeScheme


class AverageObserver(ObserverBase):
    """Keeps the mean of the batch minima and of the batch maxima; all batches have the same weight.

    Formula: ``m = (1 / n) * sum over n batches of m_batch``, computed as a running mean. Each rank is weighted by
    its number of batches, so the result is the mean over all batches of all ranks.
    Source: Jacob et al. 2018 (arXiv:1712.05877), section 3.1, which averages with a moving average instead.

    Args:
        scheme: the scheme the range is for.
        axis: channel axis, None per tensor.
        num_channels: number of channels when ``axis`` is given.

    Attributes:
        count: number of batches in the mean, ``()``.
    """

    count: Tensor

    def __init__(self, scheme: QuantizeScheme, axis: int | None = None, num_channels: int | None = None) -> None:
        super().__init__(scheme, axis, num_channels)
        self.register_buffer("count", torch.zeros(()))

    def merge(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """The mean after one more batch."""
        past = self.count / (self.count + 1)
        self.count.add_(1)
        return self.averaged(low, high, past)

    def reset(self) -> None:
        """Forget all data."""
        super().reset()
        self.count.zero_()

    def unite_ranks(self) -> None:
        """Take the mean over the batches of all ranks; without any batch the range stays as it is."""
        nothing = self.count == 0
        sums = [torch.where(nothing, 0.0, mean * self.count) for mean in (self.min_val, self.max_val)]
        for shared in (self.count, *sums):
            share_over_ranks(shared)
        for mean, total in zip((self.min_val, self.max_val), sums, strict=True):
            mean.copy_(torch.where(self.count == 0, mean, total / self.count))

"""The base of observers that choose the range from a summary of all data instead of merging batches."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from fxqat.numerics import min_max_of
from fxqat.observer.base import ObserverBase, share_over_ranks, union_over_ranks
from fxqat.scheme import QuantizeScheme


class SummaryObserver(ObserverBase):
    """Keeps a summary of all data and chooses the range from it after every tensor.

    The summary consists of the extremes of the data and of the counts of the subclass. It depends neither on the order
    of the batches nor on their distribution over ranks, and it is part of the state dict.

    Args: as :class:`~fxqat.observer.base.ObserverBase`, without ``ema_ratio``.

    Attributes:
        lowest: smallest value seen, ``()`` or ``(channels,)``; infinity before any data.
        highest: largest value seen, of the same shape; minus infinity before any data.
    """

    lowest: Tensor
    highest: Tensor

    def __init__(self, scheme: QuantizeScheme, axis: int | None = None, num_channels: int | None = None) -> None:
        super().__init__(scheme, axis, num_channels)
        self.register_buffer("lowest", self.min_val.clone())
        self.register_buffer("highest", self.max_val.clone())

    @abstractmethod
    def choose(self) -> tuple[Tensor, Tensor]:
        """The range for the data of the summary: ``(low, high)``, of the shape of ``lowest``.

        The result is not used before any data, nor after NaN or infinity.
        """

    def counts(self) -> tuple[Tensor, ...]:
        """The buffers that are sums over the data."""
        return ()

    def count(self, x: Tensor, low: Tensor, high: Tensor) -> None:  # noqa: B027  not every subclass counts
        """Add one tensor, whose extremes are ``low`` and ``high``, to :meth:`counts`."""

    def widen(self, lowest: Tensor, highest: Tensor) -> None:
        """Set new extremes, which include the old ones."""
        self.lowest.copy_(lowest)
        self.highest.copy_(highest)

    def reset(self) -> None:
        """Forget all data."""
        super().reset()
        self.lowest.copy_(self.min_val)
        self.highest.copy_(self.max_val)
        for sums in self.counts():
            sums.zero_()

    def watch(self, x: Tensor) -> None:
        """Add one tensor to the summary and choose the range anew."""
        low, high = min_max_of(x, self.axis)
        self.widen(torch.minimum(self.lowest, low), torch.maximum(self.highest, high))
        self.count(x, low, high)
        self._update_range()

    def unite_ranks(self) -> None:
        """Choose the range from the data of all ranks."""
        lowest, highest = self.lowest.clone(), self.highest.clone()
        union_over_ranks(lowest, highest)
        self.widen(lowest, highest)
        for sums in self.counts():
            share_over_ranks(sums)
        self._update_range()

    def _update_range(self) -> None:
        """Set the range: the chosen one, or the extremes if they are not finite; before any data it stays."""
        fresh = self.lowest > self.highest
        finite = self.lowest.isfinite() & self.highest.isfinite()
        low, high = self.choose()
        for value, chosen, extreme in ((self.min_val, low, self.lowest), (self.max_val, high, self.highest)):
            value.copy_(torch.where(fresh, value, torch.where(finite, chosen, extreme)))

"""What observers share whose range is chosen from a summary of all data, not merged batch by batch."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from fxqat.observer.base import ObserverBase, min_max_of, share_over_ranks, union_over_ranks
from fxqat.scheme import QuantizeScheme


class SummaryObserver(ObserverBase):
    """Keeps a summary of all data and chooses the range from it after every tensor.

    The summary is the extremes of the data, and what a kind counts. It does not depend on the order of the batches, nor
    on which rank saw which, and is part of the state dict.

    Args: as :class:`~fxqat.observer.base.ObserverBase`, without an average.

    Attributes:
        lowest: smallest value seen, ``()`` or ``(channels,)``; infinity before.
        highest: largest value seen, likewise.
    """

    lowest: Tensor
    highest: Tensor

    def __init__(self, scheme: QuantizeScheme, axis: int | None = None, num_channels: int | None = None) -> None:
        super().__init__(scheme, axis, num_channels)
        self.register_buffer("lowest", self.min_val.clone())
        self.register_buffer("highest", self.max_val.clone())

    @abstractmethod
    def choose(self) -> tuple[Tensor, Tensor]:
        """The range for the data that the summary stands for: ``(low, high)``, of the shape of ``lowest``.

        What it gives before any data, or after a value that is not finite, is not used.
        """

    def counts(self) -> tuple[Tensor, ...]:
        """The buffers that are sums over the data."""
        return ()

    def count(self, x: Tensor, low: Tensor, high: Tensor) -> None:  # noqa: B027  nothing to count is a choice
        """Add one tensor, whose extremes are ``low`` and ``high``, to :meth:`counts`."""

    def widen(self, lowest: Tensor, highest: Tensor) -> None:
        """Take new extremes, which include the old ones."""
        self.lowest.copy_(lowest)
        self.highest.copy_(highest)

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
        """The chosen range; extremes that are not finite as they are; and nothing changes before the first data."""
        fresh = self.lowest > self.highest
        finite = self.lowest.isfinite() & self.highest.isfinite()
        low, high = self.choose()
        for value, chosen, extreme in ((self.min_val, low, self.lowest), (self.max_val, high, self.highest)):
            value.copy_(torch.where(fresh, value, torch.where(finite, chosen, extreme)))

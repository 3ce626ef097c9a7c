"""Compare two tensors: cosine, signal to noise, largest error, and the channels that are lost."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

MOST_DB = 120.0
"""The signal to noise ratio if there is no noise, so that all ratios are finite."""

LARGEST = torch.finfo(torch.float32).max

CONSTANT = 1e-12
"""A channel is constant if its variance relative to its mean square is smaller: that is float32 rounding."""


@dataclass(frozen=True)
class Difference:
    """Difference between a tensor x and its approximation x'.

    Args:
        cosine: ``x . x' / (|x| |x'|)``.
        sqnr: signal to quantization noise ratio in dB, ``10 log10(|x|^2 / |x - x'|^2)``, within +-120.
        max_error: largest ``|x - x'|``, in the tensor's unit.
    """

    cosine: float
    sqnr: float
    max_error: float


@dataclass(frozen=True)
class Channels:
    """The channels of a tensor x, and which of them an approximation x' loses.

    Args:
        count: number of channels.
        dead: channels that are constant in x, in order.
        lost: channels that vary in x, but less than their error ``x - x'`` does.
        ranges: largest ``|x|`` of each channel.
    """

    count: int
    dead: tuple[int, ...]
    lost: tuple[int, ...]
    ranges: tuple[float, ...]

    @property
    def lost_share(self) -> float:
        """Fraction (0 to 1) of the channels that vary which are lost."""
        return len(self.lost) / max(1, self.count - len(self.dead))

    @property
    def widest(self) -> int:
        """The channel with the largest range."""
        return max(range(self.count), key=self.ranges.__getitem__)

    @property
    def outlier(self) -> float:
        """Largest range over the median range of the channels that are not all 0; 1 if there are none."""
        ranges = sorted(value for value in self.ranges if value > 0)
        return ranges[-1] / ranges[(len(ranges) - 1) // 2] if ranges else 1.0


class Comparison:
    """Compares pairs of tensors, added one by one; nothing is read back from the device before the result.

    Args:
        axis: the channel axis; None: no results per channel.
    """

    def __init__(self, axis: int | None = None) -> None:
        self.axis = axis
        self._sums: Tensor | None = None
        self._moments: Tensor | None = None
        self._largest: Tensor | None = None
        self._ranges: Tensor | None = None

    @torch.no_grad()
    def add(self, exact: Tensor, found: Tensor) -> None:
        """Add a pair of tensors of the same shape; the number of channels is the same for all pairs.

        Values that are not finite in ``exact`` count as 0 in both; where only ``found`` is not finite, it counts as the
        largest float32 number.
        """
        finite = exact.isfinite()
        x = exact.double().where(finite, 0.0)
        error = x - found.double().where(finite, 0.0).nan_to_num(LARGEST, LARGEST, -LARGEST)
        sums = torch.stack([x.square().sum(), error.square().sum(), (x * error).sum()])
        self._sums = sums if self._sums is None else self._sums + sums
        self._largest = _larger(self._largest, error.abs().amax())
        if self.axis is not None:
            rows, errors = (t.movedim(self.axis, 0).flatten(1) for t in (x, error))
            moments = [torch.full_like(rows[:, 0], rows.shape[1]), rows.sum(1), rows.square().sum(1)]
            table = torch.stack([*moments, errors.sum(1), errors.square().sum(1)])
            self._moments = table if self._moments is None else self._moments + table
            self._ranges = _larger(self._ranges, rows.abs().amax(1))

    def difference(self) -> Difference:
        """The difference over all values of all pairs.

        Raises:
            ValueError: no pair was added.
        """
        if self._sums is None or self._largest is None:
            raise ValueError("Comparison.difference: no tensors were compared; add some first")
        signal, noise, product = self._sums.tolist()
        size = math.sqrt(signal * max(signal - 2 * product + noise, 0.0))  # |x| |x - error|
        cosine = max(-1.0, min(1.0, (signal - product) / size)) if size else float(noise == 0)
        return Difference(cosine, decibels(signal, noise), float(self._largest))

    def channels(self) -> Channels:
        """The result per channel.

        Raises:
            ValueError: no pair was added, or there is no axis.
        """
        if self._moments is None or self._ranges is None:
            raise ValueError("Comparison.channels: no tensors were compared along a channel axis")
        count, total, squares, errors, error_squares = self._moments
        variance = squares / count - (total / count).square()
        noise = error_squares / count - (errors / count).square()
        dead = variance <= CONSTANT * (squares / count)
        lost = ~dead & (noise >= variance)
        dead_places, lost_places = (tuple(mask.nonzero().flatten().tolist()) for mask in (dead, lost))
        return Channels(len(dead), dead_places, lost_places, tuple(self._ranges.tolist()))


def decibels(signal: float, noise: float) -> float:
    """``10 log10(signal / noise)``, within +-120; 120 if there is no noise."""
    if noise == 0:
        return MOST_DB
    return max(-MOST_DB, min(MOST_DB, 10 * math.log10(signal / noise))) if signal else -MOST_DB


def _larger(a: Tensor | None, b: Tensor) -> Tensor:
    return b if a is None else torch.maximum(a, b)

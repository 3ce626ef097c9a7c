"""Compare two tensors: cosine, signal to noise, largest error, and the channels that are lost."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

MOST_DB = 120.0
"""The signal to noise ratio if there is no noise, so that all ratios are finite."""

LARGEST = torch.finfo(torch.float32).max

CONSTANT = 1e-12
"""A channel is constant if its variance relative to its mean square is smaller: that is float32 rounding."""

CPU_BLOCK = 2**16
"""So many values are compared at a time on a CPU: their double precision copies stay in its cache."""

BLOCK = 2**24
"""The same for other devices, where each operation has a fixed cost."""


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
        dead: channels whose values are all 0 in x, in order.
        lost: channels that vary in x, but less than their error ``x - x'`` does, in order.
        ranges: largest ``|x|`` of each channel.
    """

    count: int
    dead: tuple[int, ...]
    lost: tuple[int, ...]
    ranges: tuple[float, ...]

    @property
    def lost_share(self) -> float:
        """Fraction (0 to 1) of the channels that are not dead which are lost."""
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
        axis: the channel axis; None: the whole tensor is one channel.
    """

    def __init__(self, axis: int | None = None) -> None:
        self.axis = axis
        self._sums: Tensor | None = None
        self._largest: Tensor | None = None

    @torch.no_grad()
    def add(self, exact: Tensor, found: Tensor) -> None:
        """Add a pair of tensors of the same shape; the number of channels is the same for all pairs.

        Values that are not finite in ``exact`` count as 0 in both; where only ``found`` is not finite, it counts as the
        largest float32 number.
        """
        for whole, other in zip(self._pieces(exact), self._pieces(found), strict=True):
            measured = [_measured(*pair) for pair in zip(_blocks(whole), _blocks(other), strict=True)]
            sums, largest = (torch.cat(tables, 1) for tables in zip(*measured, strict=True))
            self._sums = sums if self._sums is None else self._sums + sums
            self._largest = largest if self._largest is None else torch.maximum(self._largest, largest)

    def _pieces(self, x: Tensor) -> Iterator[Tensor]:
        """Parts of a tensor as ``(channels, values)``, without a copy if it is contiguous: whole samples, as a rule."""
        if self.axis is None:
            yield from (piece[None] for piece in x.reshape(-1).split(_block(x)))
        elif self.axis % x.dim() == 0:
            yield x.flatten(1)
        else:
            for piece in x.split(max(1, _block(x) * len(x) // max(1, x.numel()))):
                yield piece.movedim(self.axis, 0).flatten(1)

    def difference(self) -> Difference:
        """The difference over all values of all pairs.

        Raises:
            ValueError: no pair was added.
        """
        if self._sums is None or self._largest is None:
            raise ValueError("Comparison.difference: no tensors were compared; add some first")
        _, _, signal, noise, product, _ = self._sums.sum(1).tolist()
        size = math.sqrt(signal * max(signal - 2 * product + noise, 0.0))  # |x| |x - error|
        cosine = max(-1.0, min(1.0, (signal - product) / size)) if size else float(noise == 0)
        return Difference(cosine, decibels(signal, noise), float(self._largest[1].max()))

    def channels(self) -> Channels:
        """The result per channel.

        Raises:
            ValueError: no pair was added.
        """
        if self._sums is None or self._largest is None:
            raise ValueError("Comparison.channels: no tensors were compared; add some first")
        total, errors, squares, error_squares, _, count = self._sums
        variance = squares / count - (total / count).square()
        noise = error_squares / count - (errors / count).square()
        ranges = self._largest[0]
        lost = (variance > CONSTANT * (squares / count)) & (noise >= variance)
        dead_places, lost_places = (tuple(mask.nonzero().flatten().tolist()) for mask in (ranges == 0, lost))
        return Channels(len(ranges), dead_places, lost_places, tuple(ranges.tolist()))


def decibels(signal: float, noise: float) -> float:
    """``10 log10(signal / noise)``, within +-120; 120 if there is no noise."""
    if noise == 0:
        return MOST_DB
    return max(-MOST_DB, min(MOST_DB, 10 * math.log10(signal / noise))) if signal else -MOST_DB


def _block(x: Tensor) -> int:
    return CPU_BLOCK if x.device.type == "cpu" else BLOCK


def _blocks(rows: Tensor) -> list[Tensor]:
    """Groups of whole rows."""
    return list(rows.split(max(1, _block(rows) // max(1, rows.shape[1]))))


def _measured(exact: Tensor, found: Tensor) -> tuple[Tensor, Tensor]:
    """The sums and the largest values of rows.

    Returns:
        ``(6, rows)``: sums of x, e, x^2, e^2, x e and 1, with the error e = x - x'; ``(2, rows)``: largest |x| and |e|.
    """
    finite = exact.isfinite()
    x = exact.double().where(finite, 0.0)
    e = x - found.double().where(finite, 0.0).nan_to_num(LARGEST, LARGEST, -LARGEST)
    sums = [x.sum(1), e.sum(1), x.square().sum(1), e.square().sum(1), (x * e).sum(1)]
    count = torch.full_like(sums[0], x.shape[1])
    return torch.stack([*sums, count]), torch.stack([x.abs().amax(1), e.abs().amax(1)])

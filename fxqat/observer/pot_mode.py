"""PoTMode: the power-of-two scale that fits the most batches."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fxqat.numerics import SCALE_MAX, SCALE_MIN, choose_qparams
from fxqat.observer.power_of_two import PowerOfTwoObserver
from fxqat.scheme import QuantizeScheme

SCALES = [2.0**exponent for exponent in range(int(math.log2(SCALE_MIN)), int(math.log2(SCALE_MAX)) + 1)]
"""Every power of two that is a valid scale."""


class PoTModeObserver(PowerOfTwoObserver):
    """Each batch votes for the smallest power-of-two scale that covers it; the scale with the most votes is taken.

    Formula: ``scale = 2**mode(ceil(log2(s_batch)))`` with ``s_batch`` the scale that covers a batch exactly; of scales
    with equal votes, the largest. A batch with an outlier has one vote, however large the outlier.
    Source: the scale of a batch as in Jain et al. 2020, TQT (arXiv:1903.08066); the mode over batches is the ``modal``
    statistic of Vitis AI's quantizer for power-of-two scales (AMD, user guide UG1414, ``calib_statistic_method``).

    Args:
        scheme: the scheme the range is for, with ``scale_bits=1``.
        axis: channel axis, None per tensor.
        num_channels: number of channels when ``axis`` is given.

    Attributes:
        votes: number of batches for each scale of ``SCALES``, ``(1 or channels, scales)``.

    Raises:
        ConfigError: the scheme's scales are not powers of two.
    """

    votes: Tensor
    scales: Tensor

    def __init__(self, scheme: QuantizeScheme, axis: int | None = None, num_channels: int | None = None) -> None:
        super().__init__(scheme, axis, num_channels)
        self.register_buffer("votes", torch.zeros(self.min_val.numel(), len(SCALES)))
        self.register_buffer("scales", torch.tensor(SCALES), persistent=False)

    def counts(self) -> tuple[Tensor, ...]:
        """The votes."""
        return (self.votes,)

    def count(self, x: Tensor, low: Tensor, high: Tensor) -> None:
        """Let one batch vote."""
        scale = choose_qparams(low, high, self.scheme)[0].reshape(-1, 1)
        self.votes.scatter_add_(1, torch.bucketize(scale, self.scales), torch.ones_like(scale))

    def choose(self) -> tuple[Tensor, Tensor]:
        """The range of the scale with the most votes."""
        winner = len(SCALES) - 1 - self.votes.flip(1).argmax(1)
        return self.range_of_scale(self.scales[winner].reshape(self.min_val.shape))

"""PoTFloor: the power of two at or below the scale that covers the data."""

from __future__ import annotations

import torch
from torch import Tensor

from fxqat.numerics import choose_qparams
from fxqat.observer.power_of_two import PowerOfTwoObserver


class PoTFloorObserver(PowerOfTwoObserver):
    """Rounds the power-of-two scale down instead of up: finer steps, but the largest values are clipped.

    Formula: ``scale = 2**floor(log2(s))`` with s the scale that covers all data exactly. It clips up to half of the
    range, and nothing if s is a power of two.
    Source: the power-of-two scale of Jain et al. 2020, TQT (arXiv:1903.08066), with floor instead of ceiling, as in
    MQBench's ``MinMaxFloorObserver``.

    Args:
        scheme: the scheme the range is for, with ``scale_bits=1``.
        axis: channel axis, None per tensor.
        num_channels: number of channels when ``axis`` is given.

    Raises:
        ConfigError: the scheme's scales are not powers of two.

    Example:
        >>> from fxqat.scheme import QuantizeScheme
        >>> observer = PoTFloorObserver(QuantizeScheme(scale_bits=1))
        >>> _ = observer(torch.tensor([-1.0, 1.5]))  # 1.5 / 127 is between 1/128 and 1/64
        >>> observer.max_val.item() == 127 / 128
        True
    """

    def choose(self) -> tuple[Tensor, Tensor]:
        """The range that the rounded-down scale covers."""
        above, exact = (choose_qparams(self.lowest, self.highest, s)[0] for s in (self.scheme, self.any_scale))
        return self.range_of_scale(torch.where(above > exact, above / 2, above))

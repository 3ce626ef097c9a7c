"""LSQPlus: the initial scale and zero point of LSQ+."""

from __future__ import annotations

import torch
from torch import Tensor

from fxqat.numerics import covered_range
from fxqat.observer.clip_std import std_mean
from fxqat.observer.mse import MSEObserver
from fxqat.scheme import QuantizeScheme


class LSQPlusObserver(MSEObserver):
    """Gives the range of LSQ+'s initial scale and zero point, as the start of a ``Learnable`` fake-quant.

    Formula, symmetric schemes (the paper's weights): ``scale = max(|mean - 3 std|, |mean + 3 std|) / 2**(bits - 1)``.
    Asymmetric schemes (the paper's activations): the scale and zero point with the least ``sum (x -
    fake_quantize(x))**2``, found by the search of :class:`~fxqat.observer.mse.MSEObserver`.
    Source: Bhalgat et al. 2020 (arXiv:2004.09576), section 3.2, initialization of weight and activation quantizers.

    Args:
        scheme: the scheme the range is for.
        axis: channel axis, None per tensor.
        num_channels: number of channels when ``axis`` is given.
        ema_ratio: weight of the past in a moving average over batches, in [0, 1); None takes their union.

    Raises:
        ConfigError: ``ema_ratio`` is outside [0, 1).
    """

    def __init__(
        self,
        scheme: QuantizeScheme,
        axis: int | None = None,
        num_channels: int | None = None,
        ema_ratio: float | None = 0.9,
    ) -> None:
        super().__init__(scheme, axis, num_channels, p=2.0, ema_ratio=ema_ratio)

    def range_of(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The range that LSQ+'s initial scale and zero point cover."""
        scheme = self.scheme
        if not scheme.symmetric:
            return super().range_of(x)
        std, mean = (moment.reshape(self.min_val.shape) for moment in std_mean(x, self.axis))
        scale = torch.maximum((mean - 3 * std).abs(), (mean + 3 * std).abs()) / 2 ** (scheme.bit_width - 1)
        return covered_range(scale, torch.full_like(scale, scheme.symmetric_zero_point), scheme)

"""LSQ: the initial step size of LSQ, from the mean magnitude."""

from __future__ import annotations

from torch import Tensor

from fxqat.numerics import choose_qparams, covered_range, min_max_of, rows_of
from fxqat.observer.ema_min_max import EMAMinMaxObserver


class LSQObserver(EMAMinMaxObserver):
    """Gives the range whose scale is LSQ's initial step size, as the start of a ``Learnable`` fake-quant.

    Formula: ``scale = 2 * mean(|x|) / sqrt(Q)`` with Q the largest integer, counted from the zero point: 127 for int8,
    255 for uint8. For asymmetric schemes, which the paper does not have, Q is the length of the whole range, and the
    zero point follows from minimum and maximum. The range may be wider than the data. Ranges are averaged over batches.
    Source: Esser et al. 2020 (arXiv:1902.08153), section 2.1, which uses the first batch only.

    Args:
        scheme: the scheme the range is for.
        axis: channel axis, None per tensor.
        num_channels: number of channels when ``axis`` is given.
        ema_ratio: weight of the past in a moving average over batches, in [0, 1); None takes their union.

    Raises:
        ConfigError: ``ema_ratio`` is outside [0, 1).
    """

    def range_of(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The range that LSQ's step size covers."""
        scheme = self.scheme
        largest = scheme.quant_max - (scheme.symmetric_zero_point if scheme.symmetric else scheme.quant_min)
        scale = rows_of(x, self.axis).abs().mean(1).reshape(self.min_val.shape) * (2 / largest**0.5)
        zero_point = choose_qparams(*min_max_of(x, self.axis), scheme)[1]
        return covered_range(scale, zero_point, scheme)

"""EMAMinMax: a moving average of the minimum and maximum of the batches."""

from __future__ import annotations

from fxqat.observer.base import ObserverBase
from fxqat.scheme import QuantizeScheme


class EMAMinMaxObserver(ObserverBase):
    """Keeps an exponential moving average of the batch minimum and maximum.

    Formula: ``m <- ema_ratio * m + (1 - ema_ratio) * m_batch``; the first batch sets it.
    Source: Jacob et al. 2018 (arXiv:1712.05877), section 3.1, for activations.

    Args:
        scheme: the scheme the range is for.
        axis: channel axis, None per tensor.
        num_channels: number of channels when ``axis`` is given.
        ema_ratio: weight of the past, in [0, 1); None takes the union, as MinMax does.

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
        super().__init__(scheme, axis, num_channels, ema_ratio)

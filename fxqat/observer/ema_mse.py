"""EMAMSE: a moving average of the ranges of least error."""

from __future__ import annotations

from typing import Any

from fxqat.observer.mse import MSEObserver
from fxqat.scheme import QuantizeScheme


class EMAMSEObserver(MSEObserver):
    """The range of :class:`~fxqat.observer.mse.MSEObserver`, averaged over batches.

    Formula: ``r <- ema_ratio * r + (1 - ema_ratio) * argmin sum |x - fake_quantize(x; r_batch)|**p`` for both ends of
    the range; the first batch sets it. A batch with an outlier changes the range by its weight only.
    Source: for the range, as MSE; for the average, Jacob et al. 2018 (arXiv:1712.05877), section 3.1.

    Args:
        scheme: the scheme the range is for.
        axis: channel axis, None per tensor.
        num_channels: number of channels when ``axis`` is given.
        ema_ratio: weight of the past, in [0, 1); None takes the union, as MSE does.
        search: further arguments of MSE: ``num_candidates``, ``p``, ``max_samples``.

    Raises:
        ConfigError: as for MSE.
    """

    def __init__(
        self,
        scheme: QuantizeScheme,
        axis: int | None = None,
        num_channels: int | None = None,
        ema_ratio: float | None = 0.9,
        **search: Any,
    ) -> None:
        super().__init__(scheme, axis, num_channels, ema_ratio=ema_ratio, **search)

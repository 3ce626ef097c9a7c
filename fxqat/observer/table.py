"""The observers by the names that backends and users write."""

from __future__ import annotations

from fxqat.observer.base import ObserverBase
from fxqat.observer.ema_min_max import EMAMinMaxObserver
from fxqat.observer.min_max import MinMaxObserver
from fxqat.observer.mse import MSEObserver

OBSERVERS: dict[str, type[ObserverBase]] = {
    "MinMax": MinMaxObserver,
    "EMAMinMax": EMAMinMaxObserver,
    "MSE": MSEObserver,
}

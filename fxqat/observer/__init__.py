"""Observers watch tensors and keep the range that quantization should cover."""

from fxqat.observer.base import ObserverBase
from fxqat.observer.ema_min_max import EMAMinMaxObserver
from fxqat.observer.min_max import MinMaxObserver
from fxqat.observer.mse import MSEObserver

__all__ = ["EMAMinMaxObserver", "MSEObserver", "MinMaxObserver", "ObserverBase"]

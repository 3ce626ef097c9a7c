"""Observers watch tensors during calibration and give the range that quantization should cover."""

from fxqat.observer.average import AverageObserver
from fxqat.observer.base import ObserverBase
from fxqat.observer.clip_std import ClipStdObserver
from fxqat.observer.ema_min_max import EMAMinMaxObserver
from fxqat.observer.ema_mse import EMAMSEObserver
from fxqat.observer.histogram_l2 import HistogramL2Observer
from fxqat.observer.kl import KLObserver
from fxqat.observer.lsq import LSQObserver
from fxqat.observer.lsq_plus import LSQPlusObserver
from fxqat.observer.min_max import MinMaxObserver
from fxqat.observer.mse import MSEObserver
from fxqat.observer.percentile import PercentileObserver
from fxqat.observer.pot_floor import PoTFloorObserver
from fxqat.observer.pot_mode import PoTModeObserver

__all__ = [
    "AverageObserver",
    "ClipStdObserver",
    "EMAMSEObserver",
    "EMAMinMaxObserver",
    "HistogramL2Observer",
    "KLObserver",
    "LSQObserver",
    "LSQPlusObserver",
    "MSEObserver",
    "MinMaxObserver",
    "ObserverBase",
    "PercentileObserver",
    "PoTFloorObserver",
    "PoTModeObserver",
]

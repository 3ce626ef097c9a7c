"""The table of observers, by the names that backends and users write."""

from __future__ import annotations

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

OBSERVERS: dict[str, type[ObserverBase]] = {
    "MinMax": MinMaxObserver,
    "EMAMinMax": EMAMinMaxObserver,
    "Average": AverageObserver,
    "Percentile": PercentileObserver,
    "MSE": MSEObserver,
    "EMAMSE": EMAMSEObserver,
    "KL": KLObserver,
    "HistogramL2": HistogramL2Observer,
    "ClipStd": ClipStdObserver,
    "LSQ": LSQObserver,
    "LSQPlus": LSQPlusObserver,
    "PoTFloor": PoTFloorObserver,
    "PoTMode": PoTModeObserver,
}

ALIASES: dict[str, str] = {
    "AverageMinMax": "Average",
    "EMAPercentile": "Percentile",
    "EMAQuantile": "Percentile",
    "KLD": "KL",
    "MinMaxFloor": "PoTFloor",
    "ModeMinMaxFloor": "PoTMode",
}
"""Names in MQBench and other libraries, without ``Observer`` at the end, and the same observer here.

The arguments are those of our observer.
"""

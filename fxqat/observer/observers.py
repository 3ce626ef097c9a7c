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
    "AVG": "Average",
    "AverageMinMax": "Average",
    "EMAPercentile": "Percentile",
    "EMAQuantile": "Percentile",
    "Hist": "Percentile",
    "Histogram": "HistogramL2",
    "KLD": "KL",
    "MinMaxFloor": "PoTFloor",
    "ModeMinMaxFloor": "PoTMode",
    "MovingAverageMinMax": "EMAMinMax",
}
"""Names in MQBench, torch and Paddle, without ``Observer`` at the end, and the same observer here.

The arguments are those of our observer.
"""

_PER_CHANNEL = "with per_channel: true in the scheme (w_qscheme)"

HINTS: dict[str, str] = {
    "abs_max": "use 'MinMax' with symmetry: true in the scheme; a symmetric range is that of the largest magnitude",
    "channel_wise_abs_max": f"use 'MinMax' {_PER_CHANNEL} and symmetry: true",
    "range_abs_max": "use 'MinMax' with symmetry: true; it takes all batches instead of a window of them",
    "moving_average_abs_max": "use 'EMAMinMax' with symmetry: true in the scheme",
    "FakeQuanterWithAbsMax": "it is observer and fake-quant in one: use observer 'EMAMinMax' and fake-quant 'Fixed'",
    "EMD": "no observer compares distributions so; the nearest is 'MSE', or 'KL'",
    "PTF": "no observer has powers of two per channel; the nearest is 'PoTFloor'",
    "PerChannelMinMax": f"use 'MinMax' {_PER_CHANNEL}",
    "MovingAveragePerChannelMinMax": f"use 'EMAMinMax' {_PER_CHANNEL}",
    "EMAMinMaxFloor": "use 'EMAMinMax' with pot_scale: true in the scheme, or 'PoTFloor', which has no moving average",
    "Placeholder": "it observes nothing; to leave a tensor float, use overrides with activation: null",
    "Noop": "it observes nothing; to leave a tensor float, use overrides with activation: null",
}
"""Names in other libraries of what is spelled in another way here, and how."""

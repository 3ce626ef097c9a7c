"""Recipes and analysis on prepared models."""

from fxqat.tools.coverage import Coverage, coverage
from fxqat.tools.mixed_precision.bank import WidthBank
from fxqat.tools.mixed_precision.choose import Choice, solve
from fxqat.tools.mixed_precision.costs import average_weight_bits, file_bytes, weight_bytes
from fxqat.tools.mixed_precision.graph_costs import activation_peak, bit_operations
from fxqat.tools.mixed_precision.latency import layer_latency
from fxqat.tools.mixed_precision.pareto import Pareto, sweep
from fxqat.tools.mixed_precision.sensitivity import Sensitivity, read_sensitivity, sensitivity
from fxqat.tools.mixed_precision.skip_until import Skipped, skip_until
from fxqat.tools.post_training.correct_bias import correct_bias
from fxqat.tools.post_training.equalize import equalize
from fxqat.tools.post_training.ptq import ptq
from fxqat.tools.post_training.reconstruct import Reconstruction, reconstruct
from fxqat.tools.post_training.smooth import smooth
from fxqat.tools.profile import Profile, profile
from fxqat.tools.to_float import to_float
from fxqat.tools.training.accumulation import round_weights_once
from fxqat.tools.training.batch_norm import reestimate_batch_norm
from fxqat.tools.training.dampening import dampening_loss
from fxqat.tools.training.nan_guard import NaNGuard, first_not_finite
from fxqat.tools.training.trained_rounding import TrainedRounding, train_rounding

__all__ = [
    "Choice",
    "Coverage",
    "NaNGuard",
    "Pareto",
    "Profile",
    "Reconstruction",
    "Sensitivity",
    "Skipped",
    "TrainedRounding",
    "WidthBank",
    "activation_peak",
    "average_weight_bits",
    "bit_operations",
    "correct_bias",
    "coverage",
    "dampening_loss",
    "equalize",
    "file_bytes",
    "first_not_finite",
    "layer_latency",
    "profile",
    "ptq",
    "read_sensitivity",
    "reconstruct",
    "reestimate_batch_norm",
    "round_weights_once",
    "sensitivity",
    "skip_until",
    "smooth",
    "solve",
    "sweep",
    "to_float",
    "train_rounding",
    "weight_bytes",
]

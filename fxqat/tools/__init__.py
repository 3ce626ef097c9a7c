"""Recipes and analysis on prepared models."""

from fxqat.tools.batch_norm import reestimate_batch_norm
from fxqat.tools.correct_bias import correct_bias
from fxqat.tools.equalize import equalize
from fxqat.tools.nan_guard import NaNGuard, first_not_finite
from fxqat.tools.profile import Profile, profile
from fxqat.tools.ptq import ptq
from fxqat.tools.reconstruct import reconstruct
from fxqat.tools.rounding import Reconstruction
from fxqat.tools.to_float import to_float

__all__ = [
    "NaNGuard",
    "Profile",
    "Reconstruction",
    "correct_bias",
    "equalize",
    "first_not_finite",
    "profile",
    "ptq",
    "reconstruct",
    "reestimate_batch_norm",
    "to_float",
]

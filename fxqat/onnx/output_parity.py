"""Compare one output of the file with that of the model: do all values agree, in direction and in scale?

1. integers and booleans are compared exactly;
2. NaN, and values of at least ``HUGE`` (infinities and masks), must be at the same places, with the same sign;
3. of all other values, ``|found - expected| / |expected|`` (L2 norms) is at most ``MAX_ERROR``.

The error covers direction and scale: with an error of r the cosine similarity is at least ``sqrt(1 - r**2)``, which is
.9999 for ``MAX_ERROR``. The cosine alone does not see a wrong factor.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MAX_ERROR = 0.014
HUGE = 1e30


@dataclass(frozen=True)
class Difference:
    """The difference of two arrays of one shape.

    Args:
        error: ``|found - expected| / |expected|`` of the values of rule 3; 1 if only ``expected`` is all zeros.
        mismatches: how many values break rules 1 and 2.
        cosine: cosine similarity of the values of rule 3; 1 if both are all zeros.
        max_abs: their largest absolute difference.
    """

    error: float
    mismatches: int
    cosine: float
    max_abs: float


@dataclass(frozen=True)
class OutputParity:
    """One output of the model.

    Args:
        name: its name.
        step_error: relative error step by step, see :class:`Difference`.
        step_mismatches: step by step: integers, booleans, NaN and infinities that differ.
        step_cosine: cosine similarity step by step, for information; 1 if both outputs are all zeros.
        cosine: cosine similarity end to end, for information.
        max_abs_error: largest absolute difference end to end.
        cosine_optimized: cosine similarity end to end with ONNX Runtime's full optimizations, for information (but
            those of ``optimized_without`` of the certificate); None if ONNX Runtime
            cannot optimize the file.
        optimized_change: cosine similarity of the file's outputs with and without these optimizations; None if ONNX
            Runtime cannot optimize the file, and for integers and booleans.
    """

    name: str
    step_error: float
    step_mismatches: int
    step_cosine: float
    cosine: float
    max_abs_error: float
    cosine_optimized: float | None
    optimized_change: float | None

    @property
    def passed(self) -> bool:
        """Rule 3 of :mod:`fxqat.onnx.verify`."""
        return self.step_mismatches == 0 and self.step_error <= MAX_ERROR


def compare(found: np.ndarray, expected: np.ndarray) -> Difference:
    """Compare two arrays of one shape."""
    is_exact = all(array.dtype.kind in "biu" for array in (found, expected))
    a, b = found.astype(np.float64).ravel(), expected.astype(np.float64).ravel()
    kinds = [np.select([np.isnan(x), x >= HUGE, x <= -HUGE], [1, 2, 3], 0) for x in (a, b)]
    wrong = found.ravel() != expected.ravel() if is_exact else kinds[0] != kinds[1]
    normal = (kinds[0] == 0) & (kinds[1] == 0)
    a, b = a[normal], b[normal]
    size_a, size_b, distance = (float(np.linalg.norm(x)) for x in (a, b, a - b))
    if size_a == 0.0 or size_b == 0.0:
        cosine, error = (1.0, 0.0) if size_a == size_b else (0.0, 1.0)
    else:
        cosine, error = float(a @ b) / (size_a * size_b), distance / size_b
    return Difference(error, int(wrong.sum()), cosine, float(np.abs(a - b).max(initial=0.0)))

"""How far the drop of a metric on a sample can be below that on all data."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist

import torch
from torch import Tensor

from fxqat.errors import ConfigError


def read_scores(found: object) -> Tensor:
    """What an ``evaluate`` function returned, as float64: a scalar, or one score for each sample.

    Raises:
        ConfigError: it returned something else than finite numbers.
    """
    try:
        scores = torch.as_tensor(found, dtype=torch.float64, device="cpu").squeeze()
    except (TypeError, ValueError, RuntimeError) as cause:
        raise ConfigError(
            f"quantize: evaluate returned {found!r}; expected a finite number, or one for each sample"
        ) from cause
    if scores.dim() > 1 or not scores.numel() or not scores.isfinite().all():
        raise ConfigError(
            f"quantize: evaluate returned {scores.tolist()}; expected a finite number, or one for each sample, "
            "larger is better"
        )
    return scores


def margin_of(before: Tensor, after: Tensor, confidence: float, times: float = 1.0) -> float:
    """Upper confidence bound of the drop of a mean score, less the drop that was measured.

    With ``d`` the difference of each of ``n`` samples and ``z`` the quantile of the normal distribution:

    1. Scores of two values, such as right and wrong, or equal ones: the largest difference of two shares that the score
       test of matched pairs does not reject. Where no sample differs, it is ``z^2 / (n + z^2)`` of the span of the
       scores, or of the score and 0.
    2. Others: ``t`` standard errors of the mean of ``d``, with the quantile of Student's distribution.

    Args:
        before: scores of n samples in the float model.
        after: scores of the same samples in the quantized model.
        confidence: of the one-sided bound, between 0.5 and 1.
        times: as if there were so many times as many samples, with the same scores.

    Source: 1, Tango 1998, Statistics in Medicine 17:891-908. 2, the paired t interval; its quantile by Abramowitz and
    Stegun 26.7.5.

    Example:
        >>> hits = 100.0 * torch.ones(997)  # of 997 samples, none is lost
        >>> round(margin_of(hits, hits, 0.95), 2)
        0.27
    """
    difference, count = before - after, len(before) * times
    z = NormalDist().inv_cdf(confidence)
    values = torch.cat([before, after]).unique()
    if len(values) > 2 and difference.any():
        return _student(z, count - 1) * float(difference.std()) / math.sqrt(count)
    span = float(values[-1] - values[0]) or abs(float(values[0]))
    lost, won = (times * int((sign * difference > 0).sum()) for sign in (1, -1))
    return span * (_largest_loss(lost, won, count, z) - (lost - won) / count)


def _largest_loss(lost: float, won: float, count: float, z: float) -> float:
    """The largest difference of two shares whose score test does not reject the counts of pairs (Tango 1998)."""

    def is_rejected(share: float) -> bool:
        half = (2 * count - lost + won) * share - lost - won
        least = (math.sqrt(half**2 + 8 * count * won * share * (1 - share)) - half) / (4 * count)
        return count * share - (lost - won) >= z * math.sqrt(count * (2 * least + share * (1 - share)))

    low, high = max(0.0, (lost - won) / count), 1.0
    if lost < won and is_rejected(0.0):
        low, high = (lost - won) / count, 0.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_rejected(middle) else (middle, high)
    return high


BISECTIONS = 50


def _student(z: float, degrees: float) -> float:
    """The quantile of Student's distribution at the probability where that of the normal distribution is z."""
    second = (z**3 + z) / 4
    third = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    fourth = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + second / degrees + third / degrees**2 + fourth / degrees**3


def is_enough(drop: float, margin: float, max_drop: float) -> bool:
    """Whether the ladder ends at a recipe: its drop with its margin, of which half of the budget counts at most."""
    return drop + min(margin, max_drop / 2) <= max_drop


def jackknife_scores(metric: Callable[[list[int]], float], samples: int, groups: int = 16) -> Tensor:
    """Scores of groups of samples whose mean is a metric that is no mean, such as the mAP: for ``evaluate``.

    The score of group ``g`` is ``m + (G - 1) (mean of all m_h - m_g)``, with ``m`` the metric of all samples and
    ``m_g`` that without the group. Their spread is that of the metric with the choice of the samples.

    Args:
        metric: metric of the samples of given numbers.
        samples: number of samples; those of number ``g``, ``g + G``, ... are group ``g``.
        groups: number ``G`` of groups, from 2 to ``samples``.

    Returns:
        (groups,) float64 scores.

    Raises:
        ConfigError: fewer than two groups, or more than samples.

    Source: the delete-a-group jackknife, Efron and Tibshirani 1993, An Introduction to the Bootstrap, chapter 11.

    Example:
        >>> x = [1.0, 2.0, 6.0, 7.0]
        >>> jackknife_scores(lambda chosen: sum(x[i] for i in chosen) / len(chosen), 4, 4).round().tolist()
        [1.0, 2.0, 6.0, 7.0]
    """
    if not 2 <= groups <= samples:
        raise ConfigError(f"jackknife_scores: expected 2 to {samples} groups, one sample or more in each, got {groups}")
    rest = [metric([i for i in range(samples) if i % groups != group]) for group in range(groups)]
    without = torch.tensor(rest, dtype=torch.float64)
    return metric(list(range(samples))) + (groups - 1) * (without.mean() - without)

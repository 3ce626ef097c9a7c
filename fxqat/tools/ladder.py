"""Quantize a trained model within an accuracy budget: cheap steps first, each measured, until the budget is met."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import torch
from prettytable import PrettyTable
from torch import Tensor, nn

from fxqat.config.yaml_file import read_yaml
from fxqat.custom_quantizer.backend_type import BackendType, backend_spec
from fxqat.custom_quantizer.spec import BackendSpec
from fxqat.errors import ConfigError
from fxqat.quantization.compare_with_float import compare_if_possible
from fxqat.quantization.graph_module import QuantGraphModule
from fxqat.tools.mixed_precision.units import Unit, find_units, quant_at
from fxqat.tools.post_training.ptq import ptq
from fxqat.tools.profile import profile
from fxqat.utils.batches import check_batches, read_batch
from fxqat.utils.contexts import eval_mode

WIDE = 8
"""Bits of a tensor with fewer bits that is widened; one that has as many is left float."""


@dataclass(frozen=True)
class Recipe:
    """How a model is quantized: the arguments of :func:`fxqat.tools.ptq` that the ladder chooses.

    Args:
        w_observer: observer of weights; empty for that of the backend or the configuration.
        a_observer: observer of activations; the same.
        equalize: equalize consecutive layers.
        correct_bias: correct the bias of every layer.
        reconstruct: ``"GPTQ"``, ``"QDrop"``, or empty.
        overrides: rules for single tensors, after those of the configuration.
    """

    w_observer: str = ""
    a_observer: str = ""
    equalize: bool = False
    correct_bias: bool = False
    reconstruct: str = ""
    overrides: tuple[Mapping[str, Any], ...] = ()

    def __str__(self) -> str:
        words = [f"{name} {value}" for name in ("w_observer", "a_observer") if (value := getattr(self, name))]
        words += [name for name in ("equalize", "correct_bias") if getattr(self, name)]
        words += [self.reconstruct] if self.reconstruct else []
        words += [f"{len(self.overrides)} tensors wider or float"] if self.overrides else []
        return ", ".join(words) or "calibration"


STEPS: tuple[tuple[str, tuple[Mapping[str, Any], ...]], ...] = (
    ("calibration", ({},)),
    ("observers", ({"w_observer": "MSE"}, {"a_observer": "MSE"}, {"a_observer": "Percentile"})),
    ("biases and ranges", ({"correct_bias": True}, {"equalize": True}, {"equalize": True, "correct_bias": True})),
    ("rounding", ({"reconstruct": "GPTQ", "correct_bias": True}, {"reconstruct": "QDrop", "correct_bias": False})),
)
"""The steps in order of their cost, with the changes of the best recipe so far that each of them tries."""


@dataclass(frozen=True)
class Trial:
    """One measured recipe.

    Args:
        step: the step of the ladder.
        recipe: the recipe.
        metric: what ``evaluate`` gave; NaN if the recipe is not possible.
        seconds: time to quantize and to evaluate.
        margin: of the drop for the size of the sample, see :func:`margin_of`; 0 without scores of samples.
        note: why it is not possible; empty if it is.
    """

    step: str
    recipe: Recipe
    metric: float
    seconds: float
    margin: float = 0.0
    note: str = ""


@dataclass(frozen=True)
class Result:
    """What :func:`quantize` found; prints as a table.

    Args:
        model: the quantized model with the best metric, calibrated, in eval mode: evaluate, finetune or export it.
        recipe: how it was made.
        float_metric: metric of the float model; None without ``evaluate``.
        metric: metric of the quantized model; None without ``evaluate``.
        max_drop: the budget; None for none.
        margin: of the drop, for the size of the sample; 0 if ``evaluate`` gives one number.
        samples: number of scores that ``evaluate`` gives; 1 for one number.
        confidence: with which the drop is at most the measured one plus the margin.
        samples_needed: about how many samples would show that this model is within the budget, if they lose as much;
            None: no number of them.
        trials: what was tried, in order.
        worst: if the budget is not reached, or tensors were widened: the tensors whose rounding changes the outputs
            most.
    """

    model: QuantGraphModule
    recipe: Recipe
    float_metric: float | None
    metric: float | None
    max_drop: float | None
    margin: float
    samples: int
    confidence: float
    samples_needed: int | None
    trials: tuple[Trial, ...]
    worst: tuple[str, ...] = ()

    @property
    def reached(self) -> bool:
        """Whether the drop and its margin are within the budget; True without one."""
        return self.room is None or self.margin <= self.room

    @property
    def room(self) -> float | None:
        """The budget less the measured drop; below 0 if it is not met on the samples; None without a budget."""
        if self.max_drop is None or self.metric is None or self.float_metric is None:
            return None
        return self.max_drop - (self.float_metric - self.metric)

    def __str__(self) -> str:
        if self.metric is None or self.float_metric is None:
            return f"{self.recipe}; not evaluated\n{self.model.quantization_noise}"
        table = PrettyTable(["step", "recipe", "metric", "to float", "margin", "seconds", ""], align="l")
        for trial in self.trials:
            failed = math.isnan(trial.metric)
            metric, drop = ("", "") if failed else (f"{trial.metric:.6g}", f"{trial.metric - self.float_metric:+.4g}")
            margin = f"{trial.margin:.3g}" if trial.margin else ""
            mark = trial.note or ("taken" if trial.recipe == self.recipe else "")
            table.add_row([trial.step, trial.recipe, metric, drop, margin, f"{trial.seconds:.1f}", mark])
        table.max_width = 60
        head = f"float {self.float_metric:.6g}, quantized {self.metric:.6g} by {self.recipe}"
        lines = [f"{head}{self._verdict()}", str(table)]
        if not self.reached:
            lines.append(f"The rounding of these tensors changes the outputs most: {', '.join(self.worst)}.")
            lines.append("To go on, finetune result.model: its fake-quants are on.")
        return "\n".join(lines)

    def _verdict(self) -> str:
        """How the drop compares with the budget."""
        if self.room is None:
            return ""
        budget = f"the budget of {self.max_drop:g}"
        if self.room < 0:
            return f": NOT within {budget}"
        if self.reached:
            margin = f", with a margin of {self.margin:.3g} for the size of the sample" if self.margin else ""
            return f": within {budget}{margin}"
        needed = f"about {self.samples_needed} would" if self.samples_needed else "no number of them would"
        return (
            f": within {budget} on these {self.samples} samples, by {self.room:.3g}. They cannot show it for other "
            f"data: the margin is {self.margin:.3g} with confidence {self.confidence:.4g}; {needed}, with the same loss"
        )


Evaluate = Callable[[nn.Module], "float | Tensor | Sequence[float]"]
"""Measures a model: a number, or the score of each sample, whose mean is the metric."""


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


def quantize(
    model: nn.Module,
    calib: Iterable[Any],
    backend: BackendType | BackendSpec | str = BackendType.TSQAT,
    evaluate: Evaluate | None = None,
    max_drop: float | None = None,
    *,
    confidence: float = 0.95,
    steps: Sequence[tuple[str, Sequence[Mapping[str, Any]]]] = STEPS,
    prepare_custom_config_dict: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Result:
    """Quantize a trained model, and try better and better recipes until its metric is close enough to the float one.

    The steps, the cheapest first: calibration; other observers; bias correction and equalization; GPTQ and QDrop; at
    last, a few tensors with more bits or left float, those whose rounding changes the outputs most. Each step starts
    from the best recipe so far and keeps a change only if the metric is better. The ladder ends at the first recipe
    within the budget.

    Args:
        model: a float model; not changed.
        calib: batches of inputs, see :func:`fxqat.calibrate`; all are kept in memory.
        backend: as for :func:`fxqat.prepare_by_platform`.
        evaluate: a function of a model, float or quantized, in eval mode. Its result is the score of each sample,
            larger is better, as a tensor or sequence: the metric is their mean. Or one number, such as the mAP: the
            ladder then cannot know how far it holds for other data, and adds no margin;
            :func:`fxqat.tools.ladder.jackknife_scores` makes scores of it.
        max_drop: the largest acceptable ``evaluate(model) - evaluate(quantized)``. None: only calibration.
        confidence: a recipe is within the budget if, with this probability, the drop is for data of which the samples
            are a random choice: the measured drop plus a margin (:func:`margin_of`) must be at most ``max_drop``. As
            each recipe that is tried is one more chance to be lucky, the k-th is held to
            ``1 - (1 - confidence) / (k (k + 1))``. 0 for no margin: the samples are all that matters. The ladder also
            ends at a recipe whose margin is more than half of the budget if its drop is at most the other half: then
            not the recipe, but the number of samples is what is not enough, and ``samples_needed`` of the result says
            how many would be.
        steps: names of steps, and the changes of a :class:`Recipe` that each tries; to leave out what takes too long.
        prepare_custom_config_dict: as for :func:`fxqat.prepare_by_platform`. What it sets, the steps leave as it is.
        progress: log each step to the logger ``fxqat``, and show progress bars if the output is a terminal.

    Returns:
        The quantized model, how it was made, and what each step gave and took.

    Raises:
        ConfigError: no batches, ``max_drop`` without ``evaluate``, negative or NaN, ``confidence`` is out of range,
            steps without changes or with one that no recipe has, a metric that is not a finite number, or as
            ``prepare_by_platform``.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 2))
        >>> x = torch.arange(12.0).reshape(3, 4)
        >>> error = lambda m: -float((m(x) - net(x)).abs().max())
        >>> result = quantize(net, [x], evaluate=error, max_drop=1.0, progress=False)
        >>> result.reached
        True
    """
    if max_drop is not None and (evaluate is None or not max_drop >= 0):
        what = (
            "needs evaluate, the function that measures it"
            if evaluate is None
            else f"must be at least 0, got {max_drop}"
        )
        raise ConfigError(f"quantize: max_drop {what}")
    known = {field.name for field in fields(Recipe)} - {"overrides"}
    if not steps or not all(changes and set().union(*changes) <= known for _, changes in steps):
        raise ConfigError(f"quantize: steps must be names with changes of {', '.join(sorted(known))}, got {steps}")
    if confidence != 0 and not 0.5 <= confidence < 1:
        raise ConfigError(f"quantize: confidence must be 0, or at least 0.5 and below 1, got {confidence}")
    check_batches(calib, "quantize")
    ladder = _Ladder(model, list(calib), backend, evaluate, max_drop, confidence, prepare_custom_config_dict, progress)
    return ladder.climb(steps)


class _Ladder:
    """The trials so far, and the best of them."""

    def __init__(
        self,
        model: nn.Module,
        calib: list[Any],
        backend: BackendType | BackendSpec | str,
        evaluate: Evaluate | None,
        max_drop: float | None,
        confidence: float,
        config: Mapping[str, Any] | str | os.PathLike[str] | None,
        progress: bool,
    ) -> None:
        self.model, self.calib, self.backend, self.evaluate = model, calib, backend, evaluate
        self.spec = backend_spec(backend)
        self.max_drop, self.confidence, self.progress = max_drop, confidence, progress
        self.config: dict[str, Any] = dict(
            (config if isinstance(config, Mapping) else config and read_yaml(Path(config))) or {}
        )
        self.trials: list[Trial] = []
        self.best: tuple[Recipe, QuantGraphModule, Tensor, float] | None = None
        self.float_metric = math.nan
        self.float_scores: Tensor | None = None
        self.worst: tuple[str, ...] = ()

    def climb(self, steps: Sequence[tuple[str, Sequence[Mapping[str, Any]]]]) -> Result:
        """Try step after step until the budget is met."""
        if self.evaluate is not None:
            self.float_scores = self.scores(self.model)
            self.float_metric = float(self.float_scores.mean())
            self.log(f"float: {self.float_metric:.6g}")
        for step, changes in steps:
            for change in changes:
                if self.is_new(change) and self.try_recipe(step, replace(self.recipe(), **change)):
                    return self.result()
        self.widen()
        return self.result()

    def given(self) -> set[str]:
        """The parts of a recipe that the configuration has set."""
        return set(self.config.get("extra_qconfig_dict") or {})

    def is_new(self, change: Mapping[str, Any]) -> bool:
        """Whether a change is one: the configuration does not set it, and the backend does not have it."""
        own = {"w_observer": self.spec.weight.observer, "a_observer": self.spec.activation.observer}
        return not set(change) & self.given() and all(own.get(name) != value for name, value in change.items())

    def recipe(self) -> Recipe:
        """The best recipe so far."""
        return Recipe() if self.best is None else self.best[0]

    def is_enough(self, metric: float, margin: float) -> bool:
        """Whether the ladder ends here: with its margin, of which half of the budget counts at most."""
        return self.max_drop is None or self.float_metric - metric + min(margin, self.max_drop / 2) <= self.max_drop

    def margin(self, scores: Tensor) -> float:
        """The margin of the next trial."""
        if self.max_drop is None or self.float_scores is None or not scores.dim() or not self.confidence:
            return 0.0
        if scores.shape != self.float_scores.shape:
            raise ConfigError(
                f"quantize: evaluate returned {len(self.float_scores)} scores for the float model and "
                f"{len(scores)} for a quantized one"
            )
        return margin_of(self.float_scores, scores, self.confidence_of(len(self.possible())))

    def possible(self) -> list[Trial]:
        """The trials that gave a metric."""
        return [trial for trial in self.trials if not math.isnan(trial.metric)]

    def confidence_of(self, before: int) -> float:
        """What a trial is held to after so many others."""
        return 1 - (1 - self.confidence) / ((before + 1) * (before + 2)) if self.confidence else 0.0

    def try_recipe(self, step: str, recipe: Recipe) -> bool:
        """Quantize by a recipe and measure it; it is the best if the ladder ends with it, or it has a better metric.

        Returns:
            Whether the ladder ends here.
        """
        if any(trial.recipe == recipe for trial in self.trials):
            return False
        began = time.perf_counter()
        metric, scores, margin, note, gm = math.nan, torch.tensor(math.nan), 0.0, "", None
        try:
            gm = self.quantized(recipe)
            scores = self.scores(gm)
            metric, margin = float(scores.mean()), self.margin(scores)
        except ConfigError as error:
            if self.best is None:
                raise
            note = f"not possible: {error}"
        self.trials.append(Trial(step, recipe, metric, time.perf_counter() - began, margin, note))
        told = [step, str(recipe), note or ("" if math.isnan(metric) else f"{metric:.6g}")]
        self.log(f"{': '.join(filter(None, told))}, {self.trials[-1].seconds:.1f} s")
        enough = gm is not None and self.is_enough(metric, margin)
        if self.best is None:
            better = True
        else:
            before, least = float(self.best[2].mean()), self.best[3]
            better = enough or metric > before and not self.is_enough(before, least)
        if gm is not None and better:
            self.best = recipe, gm, scores, margin
        return enough

    def samples_needed(self, scores: Tensor, confidence: float) -> int | None:
        """About how many samples with such scores would show the budget."""
        if self.max_drop is None or self.float_scores is None or not scores.dim() or not confidence:
            return scores.numel()
        room = self.max_drop - (self.float_metric - float(scores.mean()))
        high = 1.0
        while room > 0 and margin_of(self.float_scores, scores, confidence, high) > room:
            high *= 2
        low = high / 2
        for _ in range(BISECTIONS if high > 1 else 0):
            middle = (low + high) / 2
            enough = margin_of(self.float_scores, scores, confidence, middle) <= room
            low, high = (low, middle) if enough else (middle, high)
        return math.ceil(len(scores) * high) if room > 0 else None

    def quantized(self, recipe: Recipe) -> QuantGraphModule:
        """The model, quantized by a recipe."""
        observers = {name: value for name in ("w_observer", "a_observer") if (value := getattr(recipe, name))}
        config = dict(self.config)
        if observers:
            config["extra_qconfig_dict"] = {**(config.get("extra_qconfig_dict") or {}), **observers}
        if recipe.overrides:
            config["overrides"] = [*(config.get("overrides") or []), *recipe.overrides]
        return ptq(
            self.model, self.calib, self.backend, config,
            equalize=recipe.equalize, correct_bias=recipe.correct_bias,
            reconstruct=recipe.reconstruct or None, compare=False, progress=self.progress,
        )  # fmt: skip

    def scores(self, model: nn.Module) -> Tensor:
        """What ``evaluate`` says of a model in eval mode: float64, one for each sample or a scalar; NaN without it."""
        if self.evaluate is None:
            return torch.tensor(math.nan)
        with eval_mode(model), torch.no_grad():
            found = torch.as_tensor(self.evaluate(model), dtype=torch.float64, device="cpu").squeeze()
        if found.dim() > 1 or not found.numel() or not found.isfinite().all():
            raise ConfigError(
                f"quantize: evaluate returned {found.tolist()}; expected a finite number, or one for each sample, "
                "larger is better"
            )
        return found

    def worst_units(self) -> tuple[QuantGraphModule, list[Unit]]:
        """The model calibrated by the best recipe, and its tensors, those first whose rounding changes outputs most."""
        plain = self.quantized(replace(self.recipe(), correct_bias=False, reconstruct="", overrides=()))
        units = find_units(plain)
        unit_of = {name: unit for unit in units.values() for name in unit.tensors}
        order = [tensor.name for tensor in profile(plain, self.calib[:1], worst=0, progress=self.progress)]
        return plain, list({unit_of[name].name: unit_of[name] for name in order if name in unit_of}.values())

    def widen(self) -> None:
        """Give more bits to the tensors whose rounding changes the outputs most.

        Those with few bits get 8, and if that is not enough, tensors are left float. The number of rules is doubled
        until the budget is met, and then reduced again by halving.
        """
        recipe = self.recipe()
        plain, worst = self.worst_units()
        self.worst = tuple(unit.name for unit in worst[:WORST])
        rules = [self.wide(unit) for unit in worst if quant_at(plain, unit.path).scheme.bit_width < WIDE]
        rules += [unit.rule(WIDE) | {"weight" if unit.is_weight else "value": None} for unit in worst]

        def is_enough(count: int) -> bool:
            return self.try_recipe("wider tensors", replace(recipe, overrides=tuple(rules[:count])))

        low, high = 0, 1
        while not is_enough(high):
            if high == len(rules):
                return
            low, high = high, min(2 * high, len(rules))
        while high - low > max(1, high // 8):
            middle = (low + high) // 2
            low, high = (low, middle) if is_enough(middle) else (middle, high)

    def wide(self, unit: Unit) -> dict[str, Any]:
        """The rule that gives a tensor more bits, with the backend's observer: that of the recipe is for few bits."""
        config = self.spec.weight if unit.is_weight else self.spec.activation
        part, name = ("weight", "w_observer") if unit.is_weight else ("value", "a_observer")
        rule = unit.rule(WIDE)
        if name not in self.given():
            rule[part] |= {"observer": config.observer, "observer_args": dict(config.observer_args)}
        return rule

    def log(self, text: str) -> None:
        """Tell what was found."""
        if self.progress:
            logging.getLogger("fxqat").info("quantize: %s", text)

    def result(self) -> Result:
        """What was found."""
        assert self.best is not None
        recipe, gm, scores, margin = self.best
        compare_if_possible(gm, read_batch(gm, self.calib[0], "quantize"), "quantize")
        before = next(i for i, trial in enumerate(self.possible()) if trial.recipe == recipe) if self.possible() else 0
        known = self.evaluate is not None
        confidence = self.confidence_of(before)
        result = Result(
            gm, recipe, self.float_metric if known else None, float(scores.mean()) if known else None, self.max_drop,
            margin, scores.numel(), confidence, self.samples_needed(scores, confidence), tuple(self.trials), self.worst,
        )  # fmt: skip
        if result.reached or result.worst:
            return result
        return replace(result, worst=tuple(unit.name for unit in self.worst_units()[1][:WORST]))


WORST = 8
"""Tensors that are named when the budget is not reached."""

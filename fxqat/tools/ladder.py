"""Quantize a trained model within an accuracy budget: cheap steps first, each measured, until the budget is met."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
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
from fxqat.tools.margin import BISECTIONS, is_enough, margin_of, read_scores
from fxqat.tools.mixed_precision.graph_costs import FLOAT_BITS, bit_products
from fxqat.tools.mixed_precision.units import Widths, find_units
from fxqat.tools.post_training.ptq import ptq
from fxqat.tools.post_training.smooth import can_smooth
from fxqat.tools.profile import profile
from fxqat.tools.recipe import STEPS, Recipe
from fxqat.tools.widening import Place, doubled, first, halve, uniform_choices
from fxqat.utils.batches import check_batches, read_batch
from fxqat.utils.contexts import eval_mode
from fxqat.utils.flags import check_flags


@dataclass(frozen=True)
class Trial:
    """One measured recipe.

    Args:
        step: the step of the ladder.
        recipe: the recipe.
        metric: what ``evaluate`` gave; NaN if the recipe is not possible.
        seconds: time to quantize and to evaluate.
        margin: of the drop for the size of the sample, see :func:`fxqat.tools.margin.margin_of`; 0
            without scores of samples.
        note: why it is not possible; empty if it is.
        cost: bit operations (:func:`fxqat.tools.bit_operations`), in those of the first recipe; a float tensor counts
            as one of 32 bits.
    """

    step: str
    recipe: Recipe
    metric: float
    seconds: float
    margin: float = 0.0
    note: str = ""
    cost: float = 1.0


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
        samples: number of scores that ``evaluate`` gives: samples, or groups of them, as of
            :func:`fxqat.tools.margin.jackknife_scores`; 1 for one number.
        confidence: with which the drop is at most the measured one plus the margin.
        samples_needed: about how many scores, of samples or of such groups, would show that this model is within the
            budget, if they lose as much; None: no number of them.
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

    @property
    def against_float(self) -> str:
        """The model against the float model on calibration data, or why they were not compared."""
        noise, tool = self.model.quantization_noise, self.model.provenance.fitted_by
        if noise is None and tool:
            return f"not compared: {tool} changed the model, which without its fake-quants is no longer the float model"
        return "not compared" if noise is None else str(noise)

    def __str__(self) -> str:
        if self.metric is None or self.float_metric is None:
            return f"{self.recipe}; not evaluated\n{self.against_float}"
        table = PrettyTable(["step", "recipe", "cost", "metric", "to float", "margin", "seconds", ""], align="l")
        for trial in self.trials:
            failed = math.isnan(trial.metric)
            metric, drop = ("", "") if failed else (f"{trial.metric:.6g}", f"{trial.metric - self.float_metric:+.4g}")
            margin = f"{trial.margin:.3g}" if trial.margin else ""
            mark = trial.note or ("taken" if trial.recipe == self.recipe else "")
            cost = f"{trial.cost:.2f}"
            table.add_row([trial.step, trial.recipe, cost, metric, drop, margin, f"{trial.seconds:.1f}", mark])
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
        needed = f"about {self.samples_needed} scores would" if self.samples_needed else "no number of scores would"
        return (
            f": within {budget} on this sample of {self.samples} scores, by {self.room:.3g}. For other data the sample "
            f"is too small to show it: the margin is {self.margin:.3g} with confidence {self.confidence:.4g}; {needed} "
            "show it, with the same loss"
        )


Evaluate = Callable[[nn.Module], "float | Tensor | Sequence[float]"]
"""Measures a model: a number, or the score of each sample, whose mean is the metric."""


def quantize(
    model: nn.Module,
    calib: Iterable[Any],
    backend: BackendType | BackendSpec | str = BackendType.TSQAT,
    evaluate: Evaluate | None = None,
    max_drop: float | None = None,
    *,
    confidence: float = 0.95,
    steps: Sequence[tuple[str, Sequence[Mapping[str, Any]]]] | None = None,
    prepare_custom_config_dict: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Result:
    """Quantize a trained model, and try better and better recipes until its metric is close enough to the float one.

    The steps, the cheapest first: calibration; other observers; bias correction, equalization and, where there is
    something to smooth, SmoothQuant; GPTQ and QDrop; at last, tensors with more bits or left float. Each step starts
    from the best recipe so far and keeps a change only if the metric is better. The ladder ends at the first recipe
    within the budget.

    The last step tries more bits, in the order of their bit operations: for a few tensors, those whose rounding changes
    the outputs most; and uniform choices of a width for weights and at least as many bits for activations, calibrated
    only and by the best recipe. So what is taken is not dearer than such a choice that is enough. Then tensors are left
    float. If nothing is enough, the result is the recipe with the best metric.

    Args:
        model: a float model; not changed.
        calib: batches of inputs, see :func:`fxqat.calibrate`; all are kept in memory.
        backend: as for :func:`fxqat.prepare_by_platform`.
        evaluate: a function of a model, float or quantized, in eval mode. Its result is the score of each sample,
            larger is better, as a tensor or sequence: the metric is their mean. Or one number, such as the mAP: the
            ladder then cannot know how far it holds for other data, and adds no margin;
            :func:`fxqat.tools.margin.jackknife_scores` makes scores of it.
        max_drop: the largest acceptable ``evaluate(model) - evaluate(quantized)``. None: only calibration.
        confidence: a recipe is within the budget if, with this probability, the drop is for data of which the samples
            are a random choice: the measured drop plus a margin (:func:`fxqat.tools.margin.margin_of`)
            must be at most ``max_drop``. As
            each recipe that is tried is one more chance to be lucky, the k-th is held to
            ``1 - (1 - confidence) / (k (k + 1))``. 0 for no margin: the samples are all that matters. The ladder also
            ends at a recipe whose margin is more than half of the budget if its drop is at most the other half: then
            not the recipe, but the number of samples is what is not enough: ``reached`` of the result is False, and its
            ``samples_needed`` says how many would be.
        steps: names of steps, and the changes of a :class:`Recipe` that each tries, to leave out what takes too long;
            only with ``max_drop``. None: all of ``STEPS``.
        prepare_custom_config_dict: as for :func:`fxqat.prepare_by_platform`. What it sets, the steps leave as it is.
        progress: log each step to the logger ``fxqat``, and show progress bars if the output is a terminal.

    Returns:
        The quantized model, how it was made, and what each step gave and took.

    Raises:
        ConfigError: no batches, ``max_drop`` without ``evaluate``, negative or NaN, ``confidence`` is out of
            range, ``steps`` without ``max_drop``, without changes or with one that no recipe has, a metric that is
            not a finite number, or as ``prepare_by_platform``.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 2))
        >>> x = torch.arange(12.0).reshape(3, 4)
        >>> error = lambda m: -float((m(x) - net(x)).abs().max())
        >>> result = quantize(net, [x], evaluate=error, max_drop=1.0, progress=False)
        >>> result.reached
        True
    """
    check_flags(ConfigError, "quantize", progress=progress)
    if max_drop is not None and (evaluate is None or not max_drop >= 0):
        what = (
            "needs evaluate, the function that measures it"
            if evaluate is None
            else f"must be at least 0, got {max_drop}"
        )
        raise ConfigError(f"quantize: max_drop {what}")
    if steps is not None and max_drop is None:
        raise ConfigError("quantize: steps need max_drop: without a budget there is only the calibration")
    steps = STEPS if steps is None else steps
    known = {each.name for each in fields(Recipe)} - {"overrides"}
    if not steps or not all(changes and set().union(*changes) <= known for _, changes in steps):
        raise ConfigError(f"quantize: steps must be names with changes of {', '.join(sorted(known))}, got {steps}")
    [Recipe(**change) for _, changes in steps for change in changes]  # a wrong value is told before the first trial
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
        """Whether a change is one: it is not of the configuration or the backend, and the model can take it."""
        own = {"w_observer": self.spec.weight.observer, "a_observer": self.spec.activation.observer}
        if change.get("smooth") and self.best is not None and not can_smooth(self.best[1]):
            self.log("smooth: not tried, because no normalization of the model can take part")
            return False
        return not set(change) & self.given() and all(own.get(name) != value for name, value in change.items())

    def recipe(self) -> Recipe:
        """The best recipe so far."""
        return Recipe() if self.best is None else self.best[0]

    def is_enough(self, metric: float, margin: float) -> bool:
        """Whether the ladder ends here."""
        return self.max_drop is None or is_enough(self.float_metric - metric, margin, self.max_drop)

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

    def try_recipe(self, step: str, recipe: Recipe, cost: float = 1.0) -> bool:
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
            note = f"not possible: {str(error).splitlines()[0]}"
        self.trials.append(Trial(step, recipe, metric, time.perf_counter() - began, margin, note, cost))
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
        """About how many samples with such scores would show the budget; None if ``MOST`` times as many would not."""
        if self.max_drop is None or self.float_scores is None or not scores.dim() or not confidence:
            return scores.numel()
        room = self.max_drop - (self.float_metric - float(scores.mean()))
        high = 1.0
        while margin_of(self.float_scores, scores, confidence, high) > room:
            high *= 2
            if high > MOST:
                return None
        low = high / 2
        for _ in range(BISECTIONS if high > 1 else 0):
            middle = (low + high) / 2
            enough = margin_of(self.float_scores, scores, confidence, middle) <= room
            low, high = (low, middle) if enough else (middle, high)
        return math.ceil(len(scores) * high)

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
            equalize=recipe.equalize, smooth=recipe.smooth, correct_bias=recipe.correct_bias,
            reconstruct=recipe.reconstruct or None, compare=False, progress=self.progress,
        )  # fmt: skip

    def scores(self, model: nn.Module) -> Tensor:
        """What ``evaluate`` says of a model in eval mode: float64, one for each sample or a scalar; NaN without it."""
        if self.evaluate is None:
            return torch.tensor(math.nan)
        with eval_mode(model), torch.no_grad():
            return read_scores(self.evaluate(model))

    def worst_tensors(self) -> tuple[QuantGraphModule, dict[str, Place]]:
        """The model calibrated by the best recipe, and its tensors, those first whose rounding changes outputs most."""
        plain = self.quantized(replace(self.recipe(), correct_bias=False, reconstruct="", overrides=()))
        unit_of = {name: unit for unit in find_units(plain).values() for name in unit.tensors}
        places: dict[str, Place] = {}
        for tensor in profile(plain, self.calib[:1], worst=0, progress=self.progress):
            unit = unit_of.get(tensor.name)
            if unit is not None:
                place = places.setdefault(unit.name, Place(unit, unit.scheme(plain)))
                place.float_rules.extend(rule for rule in tensor.overrides if rule not in place.float_rules)
        return plain, places

    def widen(self) -> None:
        """Give more bits to a few tensors or to all, in the order of the cost; if nothing is enough, leave some float.

        The number of tensors is doubled until the budget is met, and then reduced again by halving.
        """
        recipe = self.recipe()
        plain, places = self.worst_tensors()
        self.worst = tuple(places)[:WORST]
        own = {name: place.scheme.bit_width for name, place in places.items()}
        cost = bit_products(plain, self.calib[0])
        least = cost(own) or 1.0

        def cost_of(widths: Widths) -> float:
            return cost({**own, **widths}) / least

        def rules_of(widths: Widths) -> tuple[Mapping[str, Any], ...]:
            return tuple(
                rule for name, bits in widths.items() for rule in places[name].rules(bits, self.spec, self.given())
            )

        def is_enough(widths: Widths, base: Recipe, step: str = "wider tensors") -> bool:
            return self.try_recipe(step, replace(base, overrides=rules_of(widths)), cost_of(widths))

        wide = {name: max(levels) for name, place in places.items() if (levels := place.levels(self.spec))}
        uniform = uniform_choices(places, self.spec)
        few = [first(wide, number) for number in doubled(len(wide))[:-1]]
        for widths in sorted([*few, *uniform], key=cost_of):
            if widths in uniform:
                if any(is_enough(widths, base, "wider, uniform") for base in (Recipe(), recipe)):
                    return
            elif is_enough(widths, recipe):
                halve(len(widths), lambda number: is_enough(first(wide, number), recipe))
                return
        widest = [trial for trial in self.possible() if trial.recipe.overrides == rules_of(wide)]
        base = max(widest, key=lambda trial: trial.metric).recipe if widest else recipe
        floats = {name: FLOAT_BITS for name, place in places.items() if place.float_rules}
        for number in doubled(len(floats) - 1):  # with all of them, nothing would be quantized
            if is_enough(wide | first(floats, number), base):
                halve(number, lambda number: is_enough(wide | first(floats, number), base))
                return

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
        return replace(result, worst=tuple(self.worst_tensors()[1])[:WORST])


WORST = 8
"""Tensors that are named when the budget is not reached."""

MOST = 2.0**20
"""With so many times as many samples, a budget that is not shown never will be."""

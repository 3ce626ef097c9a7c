"""How much a model loses by each width of each unit."""

from __future__ import annotations

import csv
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from prettytable import PrettyTable
from torch.nn import functional as F
from tqdm import tqdm

from fxqat.errors import ConfigError
from fxqat.fake_quantize.state import disable_all
from fxqat.quantization.graph_module import QuantGraphModule
from fxqat.tools.mixed_precision.bank import WidthBank
from fxqat.tools.mixed_precision.curvature import (
    Loss,
    curvature_scores,
    drawn_cross_entropy,
    own_cross_entropy,
    squared_gradients,
    traces,
)
from fxqat.tools.mixed_precision.units import quant_at
from fxqat.utils.batches import read_batches
from fxqat.utils.files import atomic_path
from fxqat.utils.fx_graph import set_module
from fxqat.utils.tensors import flatten_tensors

Measure = Callable[[Any, Any, Any], float]
"""What is lost: of the quantized model's outputs, the float model's, and the batch's target."""
METHODS = ("alone", "without", "hessian", "fisher")


@dataclass
class Sensitivity:
    """What is lost by the width of each unit; prints as a table.

    Args:
        method: how it was found.
        scores: the loss by the unit's name and bits.
        seconds: that it took.
    """

    method: str
    scores: dict[str, dict[int, float]] = field(default_factory=dict)
    seconds: float = 0.0

    def __str__(self) -> str:
        widths = sorted({bits for losses in self.scores.values() for bits in losses})
        table = PrettyTable(["unit", *(f"{bits} bits" for bits in widths)], align="r")
        table.align["unit"] = "l"
        for name, losses in sorted(self.scores.items(), key=lambda item: -max(item[1].values())):
            table.add_row([name, *(f"{losses[bits]:.3g}" if bits in losses else "" for bits in widths)])
        return f"{self.method}, {self.seconds:.1f} s\n{table}"

    def write_csv(self, path: str | os.PathLike[str]) -> None:
        """One row for each unit and width.

        Raises:
            ConfigError: the file cannot be written.
        """
        with atomic_path(path, ConfigError) as target, target.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["unit", "bits", "loss"])
            writer.writerows(
                [name, bits, loss] for name, losses in self.scores.items() for bits, loss in losses.items()
            )

    def write_json(self, path: str | os.PathLike[str]) -> None:
        """All of it, to be read by :func:`read_sensitivity`.

        Raises:
            ConfigError: the file cannot be written.
        """
        with atomic_path(path, ConfigError) as target:
            target.write_text(json.dumps(vars(self), indent=1), encoding="utf-8")


def read_sensitivity(path: str | os.PathLike[str]) -> Sensitivity:
    """What :meth:`Sensitivity.write_json` wrote.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        scores = {
            name: {int(bits): float(loss) for bits, loss in losses.items()}
            for name, losses in content["scores"].items()
        }
        return Sensitivity(str(content["method"]), scores, float(content["seconds"]))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"{path} is not a file of Sensitivity.write_json: {error}") from error


def divergence(found: Any, expected: Any, target: Any) -> float:
    """Kullback-Leibler divergence of the class probabilities from the float model's, in nats, a mean over samples.

    Of the first output, with classes along dimension 1.
    """
    ours, theirs = (flatten_tensors(outputs)[0].float().log_softmax(1) for outputs in (found, expected))
    return float(F.kl_div(ours, theirs, log_target=True, reduction="none").sum(1).mean())


def squared_error(found: Any, expected: Any, target: Any) -> float:
    """Mean squared error over the mean square, summed over the outputs."""
    pairs = zip(flatten_tensors(found), flatten_tensors(expected), strict=True)
    return sum(float((a - b).square().mean() / b.square().mean().clamp_min(1e-30)) for a, b in pairs)


def sensitivity(
    bank: WidthBank, batches: Iterable[Any], method: str = "alone", measure: Measure = divergence,
    loss: Loss | None = None, targets: Sequence[Any] | None = None, probes: int = 32,
    path: str | os.PathLike[str] | None = None, progress: bool = False,
) -> Sensitivity:  # fmt: skip
    """What is lost by each width of each unit.

    By running the model, once for each width of each unit and batch:

    * ``"alone"``: only this unit is quantized, what is lost then.
    * ``"without"``: everything has this width (or the nearest that it may have), what is won if this unit is float.

    By derivatives of a loss (``fxqat.tools.mixed_precision.curvature``), all units at once:

    * ``"hessian"``: the trace of the Hessian, times the squared error of the rounding.
    * ``"fisher"``: squared gradients times squared errors; one backward pass for each batch.

    Args:
        bank: the model with its fake-quants.
        batches: inputs of the model.
        method: one of these.
        measure: of the first two, what counts as lost; it gets the outputs, the float model's outputs, and the target.
        loss: of the last two, a mean over samples, of the outputs and the target; by default the cross entropy to the
            model's own probabilities.
        targets: labels, or whatever ``measure`` or ``loss`` compares with, of each batch; by default they get None.
        probes: of ``"hessian"``, random signs for each batch; what is left of chance falls with the root of the number.
        path: a JSON file for what is found, of the first two unit by unit; if it is there, what it has is not measured
            again.
        progress: show a progress bar.

    Raises:
        ConfigError: no batches, not a target for each, an unknown method, or a file that belongs to something else.
    """
    inputs = read_batches(bank.model, batches, "sensitivity")
    given = [None] * len(inputs) if targets is None else targets
    if len(given) != len(inputs):
        raise ConfigError(f"sensitivity: {len(inputs)} batches, but targets for {len(given)}")
    if method not in METHODS:
        raise ConfigError(f"sensitivity: unknown method {method!r}; known: {', '.join(METHODS)}")
    result = Sensitivity(method)
    if path is not None and Path(path).exists():
        result = read_sensitivity(path)
        if result.method != method or not result.scores.keys() <= bank.units.keys():
            raise ConfigError(f"{path} holds scores of {result.method!r} or of another model; give another path")
    began = time.perf_counter() - result.seconds
    missing = [name for name, widths in bank.widths.items() if set(result.scores.get(name, ())) != set(widths)]
    names = tqdm(missing, desc=method, leave=False, disable=None if progress else True)
    if method in ("alone", "without"):
        parts = _by_running(_Trial(bank, inputs, given, measure), method, names)
    elif not missing:
        return result
    elif method == "hessian":
        parts = iter([curvature_scores(bank, inputs, given, loss or own_cross_entropy, traces(probes))])
    else:
        parts = iter([curvature_scores(bank, inputs, given, loss or drawn_cross_entropy, squared_gradients)])
    for found in parts:
        result.scores |= found
        result.seconds = time.perf_counter() - began
        if path is not None:
            result.write_json(path)
    return result


def _by_running(trial: _Trial, method: str, names: Iterable[str]) -> Iterator[dict[str, dict[int, float]]]:
    """The scores of these units, as they are found."""
    score = trial.alone if method == "alone" else trial.without
    for name in names:
        yield {name: {bits: score(name, bits) for bits in trial.bank.widths[name]}}


class _Trial:
    """Runs of a model with one unit unlike the others."""

    def __init__(
        self, bank: WidthBank, inputs: Sequence[Sequence[Any]], targets: Sequence[Any], measure: Measure
    ) -> None:
        self.bank, self.inputs, self.targets, self.measure = bank, inputs, targets, measure
        with torch.no_grad():
            self.expected = [bank.model(*batch) for batch in inputs]
        self.float = bank.mix({})
        disable_all(self.float)
        self.uniform: dict[int, tuple[QuantGraphModule, float]] = {}

    def lost(self, gm: QuantGraphModule) -> float:
        """What a model loses, a mean over the batches."""
        with torch.no_grad():
            known = zip(self.inputs, self.expected, self.targets, strict=True)
            losses = [self.measure(gm(*batch), expected, target) for batch, expected, target in known]
        return sum(losses) / len(losses)

    def alone(self, name: str, bits: int) -> float:
        """What is lost if only this unit is quantized."""
        path = self.bank.units[name].path
        before = self.float.get_submodule(path)
        set_module(self.float, path, self.bank.quant(name, bits))
        try:
            return self.lost(self.float)
        finally:
            set_module(self.float, path, before)

    def without(self, name: str, bits: int) -> float:
        """What is won if only this unit is float."""
        if bits not in self.uniform:
            near = {other: min(choice, key=lambda b: abs(b - bits)) for other, choice in self.bank.widths.items()}
            gm = self.bank.mix(near)
            self.uniform[bits] = gm, self.lost(gm)
        gm, everything = self.uniform[bits]
        quant = quant_at(gm, self.bank.units[name].path)
        quant.fake_quant_enabled = False
        try:
            return everything - self.lost(gm)
        finally:
            quant.fake_quant_enabled = True

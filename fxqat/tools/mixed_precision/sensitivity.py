"""Measure the loss that each bit width of each unit causes."""

from __future__ import annotations

import csv
import json
import math
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

from fxqat.errors import CalibrationError, ConfigError
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
from fxqat.utils.batches import read_batches
from fxqat.utils.files import atomic_path
from fxqat.utils.flags import check_flags
from fxqat.utils.tensors import flatten_tensors

Measure = Callable[[Any, Any, Any], float]
"""The loss from the quantized model's outputs, the float model's outputs, and the batch's target."""
METHODS = ("alone", "without", "hessian", "fisher")


@dataclass
class Sensitivity:
    """The loss of each bit width of each unit; prints as a table.

    Args:
        method: the method that measured it.
        scores: the loss by unit name and bits.
        seconds: time of the measurement.
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
        """Write one row per unit and width.

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
        """Write a file for :func:`read_sensitivity`.

        Raises:
            ConfigError: the file cannot be written.
        """
        with atomic_path(path, ConfigError) as target:
            target.write_text(json.dumps(vars(self), indent=1), encoding="utf-8")


def read_sensitivity(path: str | os.PathLike[str]) -> Sensitivity:
    """Read the file of :meth:`Sensitivity.write_json`.

    Raises:
        ConfigError: the file cannot be read.
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

    The first output is used, with classes in dimension 1.
    """
    ours, theirs = (flatten_tensors(outputs)[0].float().log_softmax(1) for outputs in (found, expected))
    return float(F.kl_div(ours, theirs, log_target=True, reduction="none").sum(1).mean())


def squared_error(found: Any, expected: Any, target: Any) -> float:
    """Mean squared error relative to the mean square, summed over the outputs."""
    pairs = zip(flatten_tensors(found), flatten_tensors(expected), strict=True)
    return sum(float((a - b).square().mean() / b.square().mean().clamp_min(1e-30)) for a, b in pairs)


def sensitivity(
    bank: WidthBank, batches: Iterable[Any], method: str = "alone", measure: Measure = divergence,
    loss: Loss | None = None, targets: Sequence[Any] | None = None, probes: int = 32,
    path: str | os.PathLike[str] | None = None, progress: bool = False,
) -> Sensitivity:  # fmt: skip
    """Measure the loss that each bit width of each unit causes.

    By running the model, once for each batch and each width of each unit:

    * ``"alone"``: the loss when only this unit is quantized;
    * ``"without"``: everything has this width (or its nearest possible one): the gain when this unit is float.

    From derivatives of a loss (``fxqat.tools.mixed_precision.curvature``), for all units at once:

    * ``"hessian"``: the trace of the Hessian times the squared rounding error;
    * ``"fisher"``: squared gradients times squared rounding errors; one backward pass per batch.

    Args:
        bank: the model with its fake-quants.
        batches: batches of inputs, see :func:`fxqat.calibrate`; labels in them are ignored.
        method: one of the four.
        measure: for the first two, the loss from the outputs, the float model's outputs, and the target.
        loss: for the last two, the loss from the outputs and the target, a mean over samples; by default the cross
            entropy to the model's own probabilities.
        targets: for each batch, the target for ``measure`` or ``loss``, such as its labels; by default None.
        probes: for ``"hessian"``, random sign vectors per batch; the random error falls with the root of their number.
        path: JSON file for the results. The first two methods write it after each unit, and do not measure again the
            units that an existing file has.
        progress: show a progress bar if the output is a terminal.

    Raises:
        CalibrationError: a loss is NaN.
        ConfigError: no batches, a batch that does not fit the model, another number of targets than batches, an unknown
            method, a file with scores of another method or model, or a model without the second derivatives that
            ``"hessian"`` needs.
    """
    check_flags(ConfigError, "sensitivity", progress=progress)
    inputs = read_batches(bank.model, batches, "sensitivity")
    given = [None] * len(inputs) if targets is None else targets
    if len(given) != len(inputs):
        raise ConfigError(f"sensitivity: {len(inputs)} batches, but {len(given)} targets")
    if method not in METHODS:
        raise ConfigError(f"sensitivity: unknown method {method!r}; known: {', '.join(METHODS)}")
    result = Sensitivity(method)
    if path is not None and Path(path).exists():
        result = read_sensitivity(path)
        if result.method != method or not result.scores.keys() <= bank.units.keys():
            raise ConfigError(f"{path} has scores of {result.method!r} or of another model; give another path")
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
        undefined = [name for name, losses in found.items() if any(map(math.isnan, losses.values()))]
        if undefined:
            raise CalibrationError(
                f"sensitivity: the loss of {undefined[0]} is NaN. Look for NaN in the batches, and for what the "
                "measure or loss returns"
            )
        result.scores |= found
        result.seconds = time.perf_counter() - began
        if path is not None:
            result.write_json(path)
    return result


def _by_running(trial: _Trial, method: str, names: Iterable[str]) -> Iterator[dict[str, dict[int, float]]]:
    """The scores of these units, one by one."""
    score = trial.alone if method == "alone" else trial.without
    for name in names:
        yield {name: {bits: score(name, bits) for bits in trial.bank.widths[name]}}


class _Trial:
    """Runs a model in which one unit differs from the others."""

    def __init__(
        self, bank: WidthBank, inputs: Sequence[Sequence[Any]], targets: Sequence[Any], measure: Measure
    ) -> None:
        self.bank, self.inputs, self.targets, self.measure = bank, inputs, targets, measure
        with torch.no_grad():
            self.expected = [bank.model(*batch) for batch in inputs]
        self.float = bank.mix({})
        disable_all(self.float)
        self.uniform: dict[int, tuple[QuantGraphModule, float]] = {}

    def loss(self, gm: QuantGraphModule) -> float:
        """The loss of a model, a mean over the batches."""
        with torch.no_grad():
            known = zip(self.inputs, self.expected, self.targets, strict=True)
            losses = [self.measure(gm(*batch), expected, target) for batch, expected, target in known]
        return sum(losses) / len(losses)

    def alone(self, name: str, bits: int) -> float:
        """The loss when only this unit is quantized."""
        unit = self.bank.units[name]
        before = unit.quants(self.float)
        unit.set_quants(self.float, self.bank.quants(name, bits))
        try:
            return self.loss(self.float)
        finally:
            unit.set_quants(self.float, before)

    def without(self, name: str, bits: int) -> float:
        """The gain when only this unit is float."""
        if bits not in self.uniform:
            near = {other: min(choice, key=lambda b: abs(b - bits)) for other, choice in self.bank.widths.items()}
            gm = self.bank.mix(near)
            self.uniform[bits] = gm, self.loss(gm)
        gm, everything = self.uniform[bits]
        quants = self.bank.units[name].quants(gm)
        for quant in quants:
            quant.fake_quant_enabled = False
        try:
            return everything - self.loss(gm)
        finally:
            for quant in quants:
                quant.fake_quant_enabled = True

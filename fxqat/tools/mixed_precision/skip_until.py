"""Raise the bit widths of the units that need it most, until a target metric is reached."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from prettytable import PrettyTable

from fxqat.errors import ConfigError
from fxqat.quantization.graph_module import QuantGraphModule
from fxqat.tools.mixed_precision.bank import WidthBank
from fxqat.tools.mixed_precision.choose import Scores


@dataclass(frozen=True)
class Step:
    """One raised unit.

    Args:
        unit: name of the unit; empty for the start.
        bits: its new bit width.
        metric: metric of the model afterwards.
    """

    unit: str
    bits: int
    metric: float


@dataclass(frozen=True)
class Skipped:
    """The result of :func:`skip_until`; prints as a table.

    Args:
        reached: whether the target was reached.
        widths: final bits by unit name.
        overrides: the rules for ``prepare_custom_config_dict`` that set these widths.
        curve: the steps in order, with the start first.
    """

    reached: bool
    widths: Mapping[str, int]
    overrides: list[dict[str, Any]]
    curve: tuple[Step, ...]

    def __str__(self) -> str:
        table = PrettyTable(["step", "unit", "bits", "metric"], align="l")
        for i, step in enumerate(self.curve):
            table.add_row([i, step.unit, step.bits or "", f"{step.metric:.6g}"])
        return f"target {'reached' if self.reached else 'not reached'} after {len(self.curve) - 1} steps\n{table}"


def skip_until(
    bank: WidthBank, metric: Callable[[QuantGraphModule], float], target: float, scores: Scores,
    widths: Mapping[str, int] | None = None, most_steps: int | None = None,
) -> Skipped:  # fmt: skip
    """Raise widths one by one until ``metric(model) >= target``.

    Each step raises the unit whose next width reduces its loss most; then the metric is measured.

    Args:
        bank: the model with its fake-quants.
        metric: function of a quantized model; larger is better.
        target: least acceptable metric.
        scores: the loss by unit name and bits, see ``sensitivity``.
        widths: start widths; a unit that is not named starts at its smallest width.
        most_steps: largest number of steps; by default until all units have their largest width.

    Raises:
        ConfigError: a name or a width is unknown, or has no score.
    """
    now = {name: choice[0] for name, choice in bank.widths.items()} | dict(widths or {})
    for name, bits in now.items():
        if name not in bank.widths or bits not in bank.widths[name]:
            raise ConfigError(f"skip_until: unknown unit {name!r}, or it cannot have {bits} bits")
        if not set(bank.widths[name]) <= set(scores.get(name, ())):
            raise ConfigError(f"skip_until: {name} has no score at {', '.join(map(str, bank.widths[name]))} bits")
    gm = bank.mix(now)
    curve = [Step("", 0, metric(gm))]
    while curve[-1].metric < target and (most_steps is None or len(curve) <= most_steps):
        wider = {name: next((b for b in bank.widths[name] if b > bits), None) for name, bits in now.items()}
        gains = {name: scores[name][now[name]] - scores[name][bits] for name, bits in wider.items() if bits is not None}
        if not gains:
            break
        best = max(gains, key=gains.__getitem__)
        now[best] = wider[best] or now[best]
        bank.install(gm, now)
        curve.append(Step(best, now[best], metric(gm)))
    rules = [rule for name, bits in now.items() for rule in bank.units[name].rules(bits)]
    return Skipped(curve[-1].metric >= target, now, rules, tuple(curve))

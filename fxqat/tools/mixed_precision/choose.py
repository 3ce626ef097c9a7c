"""Choose the bit widths with the least loss within budgets, by an integer linear program.

Source: Yao et al. 2021, HAWQ-V3 (arXiv:2011.10680), section 3.4: minimize the sum of the sensitivities under linear
constraints. Products of two choices (bit operations of a layer) become linear with a variable for each pair of widths
(McCormick's lower bound). The solver is CBC, which comes with pulp.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from fxqat.config.yaml_file import write_yaml
from fxqat.errors import ConfigError
from fxqat.tools.mixed_precision.costs import Cost
from fxqat.tools.mixed_precision.units import Unit

Scores = Mapping[str, Mapping[int, float]]
"""The loss of each bit width of each unit, by name and bits."""
Budget = tuple[Cost, float]


@dataclass(frozen=True)
class Choice:
    """A bit width for each unit.

    Args:
        widths: bits by unit name.
        score: sum of the losses.
        costs: value of each cost, by the cost's name.
    """

    widths: Mapping[str, int]
    score: float
    costs: Mapping[str, float]

    def overrides(self, units: Mapping[str, Unit]) -> list[dict[str, Any]]:
        """These widths as rules for ``prepare_custom_config_dict["overrides"]``."""
        return [rule for name, bits in self.widths.items() for rule in units[name].rules(bits)]

    def write_yaml(self, units: Mapping[str, Unit], path: str | os.PathLike[str]) -> None:
        """Write these rules to a configuration file for ``prepare_by_platform``.

        Raises:
            ConfigError: the file cannot be written.
        """
        costs = "; ".join(f"{name} {cost:g}" for name, cost in self.costs.items())
        write_yaml({"overrides": self.overrides(units)}, path, f"Widths of least loss, {self.score:.4g}: {costs}.")


def solve(scores: Scores, budgets: Sequence[Budget]) -> Choice:
    """Choose the bit widths with the least total loss.

    Args:
        scores: the loss of each unit at each possible width; see ``sensitivity``.
        budgets: pairs of a cost and its largest allowed value.

    Raises:
        ConfigError: no choice is within the budgets (the message has the least possible value of each cost), or a cost
            has other widths than the scores.
    """
    _check(scores, budgets)
    import pulp  # here, because importing it touches the logging of the process

    program = pulp.LpProblem("widths", pulp.LpMinimize)
    chosen = {
        (name, bits): program.add_variable(f"x_{i}_{bits}", cat="Binary")
        for i, (name, losses) in enumerate(scores.items())
        for bits in losses
    }
    for name, losses in scores.items():
        program += pulp.lpSum(chosen[name, bits] for bits in losses) == 1
    largest = max((abs(loss) for losses in scores.values() for loss in losses.values()), default=0.0) or 1.0
    program += pulp.lpSum(scores[name][bits] / largest * variable for (name, bits), variable in chosen.items())
    rows = [(row, limit) for cost, limit in budgets for row in cost.rows]
    pairs = sorted({pair for row, _ in rows for pair in row.pairs})
    both = {}
    for i, (a, b) in enumerate(pairs):
        for one, other in product(scores[a], scores[b]):
            both[a, b, one, other] = y = program.add_variable(f"y_{i}_{one}_{other}", 0)
            program += y >= chosen[a, one] + chosen[b, other] - 1
    for row, limit in rows:
        scale = max(abs(limit), 1e-12)
        single = [
            added[bits] / scale * chosen[name, bits] for name, added in row.single.items() for bits in scores[name]
        ]
        together = [
            added[one, other] / scale * both[a, b, one, other]
            for (a, b), added in row.pairs.items()
            for one, other in product(scores[a], scores[b])
        ]
        program += pulp.lpSum([*single, *together]) <= (limit - row.fixed) / scale
    program.solve(pulp.PULP_CBC_CMD(msg=False))
    if program.status != pulp.LpStatusOptimal:
        raise ConfigError(f"no choice of bit widths fits the budgets: {_least(scores, budgets)}")
    widths = {name: bits for (name, bits), variable in chosen.items() if variable.value() > 0.5}
    return choice_of(widths, scores, [cost for cost, _ in budgets])


def choice_of(widths: Mapping[str, int], scores: Scores, costs: Sequence[Cost]) -> Choice:
    """The choice of these widths, with its loss and costs."""
    score = sum(scores[name][bits] for name, bits in widths.items())
    return Choice(dict(widths), score, {cost.name: cost.of(widths) for cost in costs})


def _check(scores: Scores, budgets: Sequence[Budget]) -> None:
    """Raise if a cost has units that the scores do not have, or fewer widths of a unit."""
    for cost, _ in budgets:
        known: dict[str, set[int]] = {}
        for row in cost.rows:
            for name, added in row.single.items():
                known.setdefault(name, set()).update(added)
            for (a, b), together in row.pairs.items():
                for one, other in together:
                    known.setdefault(a, set()).add(one)
                    known.setdefault(b, set()).add(other)
        for name, widths in known.items():
            if not widths >= set(scores.get(name, {0: 0.0})):
                given = ", ".join(map(str, scores.get(name, ()))) or "none"
                raise ConfigError(
                    f"solve: the cost {cost.name!r} has {name} at {', '.join(map(str, sorted(widths)))} bits, the "
                    f"scores have it at {given}: compute both from the same bank"
                )


def _least(scores: Scores, budgets: Sequence[Budget]) -> str:
    """Each budget and the least possible value of its cost."""
    narrowest = {name: min(losses) for name, losses in scores.items()}
    return "; ".join(
        f"{cost.name}: budget {limit:g} {cost.unit}, at least {cost.of(narrowest):g} needed" for cost, limit in budgets
    )

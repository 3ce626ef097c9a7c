"""Sweep over budgets: the least loss at each, as JSON and as a plot."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass

from fxqat.errors import ConfigError
from fxqat.tools.mixed_precision.choose import Budget, Choice, Scores, solve
from fxqat.tools.mixed_precision.costs import Cost
from fxqat.utils.files import atomic_path


@dataclass(frozen=True)
class Pareto:
    """The Pareto-optimal choices, the cheapest first.

    Args:
        cost: the limited cost.
        choices: one for each budget whose choice is better than that of the budget before.
    """

    cost: Cost
    choices: tuple[Choice, ...]

    def write_json(self, path: str | os.PathLike[str]) -> None:
        """Write cost, loss and widths of each choice.

        Raises:
            ConfigError: the file cannot be written.
        """
        rows = [{"cost": c.costs[self.cost.name], "score": c.score, "widths": dict(c.widths)} for c in self.choices]
        content = {"cost": self.cost.name, "unit": self.cost.unit, "choices": rows}
        with atomic_path(path, ConfigError) as target:
            target.write_text(json.dumps(content, indent=1), encoding="utf-8")

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Plot the loss over the cost; the suffix sets the image format.

        Raises:
            ConfigError: the file cannot be written, or matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ConfigError(f"Pareto.plot draws with matplotlib: pip install matplotlib ({error})") from error
        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.add_subplot()
        axes.step(
            *zip(*((c.costs[self.cost.name], c.score) for c in self.choices), strict=True), where="post", marker="o"
        )
        axes.set(xlabel=f"{self.cost.name}, {self.cost.unit}", ylabel="loss", yscale="log")
        axes.grid(alpha=0.3)
        suffix = os.fspath(path).rpartition(".")[2]
        with atomic_path(path, ConfigError) as target:
            figure.savefig(target, format=suffix)


def sweep(scores: Scores, cost: Cost, count: int = 20, budgets: Sequence[Budget] = ()) -> Pareto:
    """Solve for budgets from the least to the largest value of a cost.

    Args:
        scores: see :func:`fxqat.tools.mixed_precision.choose.solve`.
        cost: the cost to limit.
        count: number of budgets, 2 or more.
        budgets: further budgets, the same for all.

    Raises:
        ConfigError: ``count`` is less than 2, or no choice is within the further budgets.
    """
    if count < 2:
        raise ConfigError(f"sweep: count must be 2 or more, got {count}")
    least, most = (cost.of({name: pick(losses) for name, losses in scores.items()}) for pick in (min, max))
    found: list[Choice] = []
    for i in range(count):
        limit = (least + (most - least) * i / (count - 1)) * (1 + 1e-9)
        choice = solve(scores, [(cost, limit), *budgets])
        if not found or choice.score < found[-1].score:
            found.append(choice)
    return Pareto(cost, tuple(found))

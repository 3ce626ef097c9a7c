"""The noise of quantization: how far the fake-quant model is from the float model, and which nodes cause it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from prettytable import PrettyTable

from fxqat.utils.compare import Difference

VALUE = "value"
OPERATION = "operation"
WEIGHT = "weight"

MIN_COSINE = 0.95
"""An output with a smaller cosine to the float output is warned about; training may cure it."""

EQUALIZING = "fxqat.tools.ptq(model, batches, backend, equalize=True, correct_bias=True)"
"""What helps where the channels of a weight have very different ranges and one scale: Nagel et al. 2019."""

SHOWN = 5
"""The most nodes that a warning names."""


@dataclass(frozen=True)
class NodeNoise:
    """What quantization costs at one node, everything before it being float.

    Args:
        node: name of the node; for a weight, the path of its layer.
        kind: ``"value"``: the float value of the node is compared with the rounded one. ``"operation"``: its
            result is compared with the result of rounded operands. ``"weight"``: the weight of a layer, with BatchNorm
            folded in, is compared with the rounded one.
        error: mean ``|x - x'|`` over mean ``|x|``; for integers and booleans the share of values that change; infinity
            where x is finite and x' is not, or where the operation fails.
        sqnr: signal to noise of a value or weight, ``10 log10(|x|^2 / |x - x'|^2)`` in dB; None for an operation.
        problem: what is wrong, in words; empty if the error is within its limit.
        source: line of the user's code, ``"file.py:12"``, or empty.
        shares_scale: of a weight, whether all its channels have one scale.
    """

    node: str
    kind: str
    error: float
    sqnr: float | None = None
    problem: str = ""
    source: str = ""
    shares_scale: bool = False

    def __str__(self) -> str:
        where = f" ({self.source})" if self.source else ""
        what = self.problem or f"the {self.kind} is off by {self.error:.1%} of its mean size"
        return f"{self.node}: {what}{where}"


@dataclass(frozen=True)
class OutputNoise:
    """One output of the fake-quant model against that of the float model.

    Args:
        name: ``"output"``, or its position or key in a nested output.
        difference: cosine, signal to noise in dB and largest error; None for integers, booleans and empty tensors.
        changed: share of the integers or booleans that differ; 1 if the shape differs, 0 for floats.
    """

    name: str
    difference: Difference | None
    changed: float = 0.0

    @property
    def cosine(self) -> float:
        """The cosine; 1 for integers and booleans."""
        return 1.0 if self.difference is None else self.difference.cosine

    def __str__(self) -> str:
        if self.difference is None:
            return f"{self.name}: {self.changed:.1%} of the values differ"
        d = self.difference
        return f"{self.name}: cosine {d.cosine:.4f}, {d.sqnr:.1f} dB, largest error {d.max_error:.3g}"


@dataclass(frozen=True)
class QuantizationNoise:
    """The fake-quant model compared with the float model; prints as a table.

    Args:
        batches: number of batches that were compared.
        outputs: end to end.
        nodes: every value and weight that is quantized, and every operation that reads rounded values; those with a
            problem first, then by error.
        overrides: entries of the configuration's ``overrides`` that cure the problems; empty if there are none.
        failure: why the fake-quant model does not run where the float model does; empty if it runs.
    """

    batches: int
    outputs: tuple[OutputNoise, ...]
    nodes: tuple[NodeNoise, ...] = field(repr=False)
    overrides: tuple[dict[str, Any], ...] = ()
    failure: str = ""

    def __iter__(self) -> Iterator[NodeNoise]:
        return iter(self.nodes)

    @property
    def problems(self) -> tuple[NodeNoise, ...]:
        """The nodes that lose more than they may."""
        return tuple(node for node in self.nodes if node.problem)

    @property
    def cosine(self) -> float:
        """The smallest cosine of an output; 1 if none is a float."""
        return min((output.cosine for output in self.outputs), default=1.0)

    def table(self, rows: int | None = 10) -> str:
        """The worst nodes as text; all of them with None."""
        table = PrettyTable(["node", "kind", "error", "dB", "problem"], align="l")
        for node in self.nodes[:rows]:
            sqnr = "" if node.sqnr is None else f"{node.sqnr:.1f}"
            table.add_row([node.node, node.kind, f"{node.error:.2%}", sqnr, node.problem])
        return str(table)

    def __str__(self) -> str:
        head = f"fake-quant against float, {self.batches} batches, {len(self.problems)} nodes with a problem"
        return "\n".join([head, *self._ends(), self.table()])

    def warn(self, caller: str) -> None:
        """Log one warning if a node has a problem or an output is far from float; it names the worst nodes."""
        if self.problems or self.failure or self.cosine < MIN_COSINE:
            logging.getLogger("fxqat").warning("%s: %s", caller, self.warning())

    def warning(self) -> str:
        """The text of the warning: the worst nodes, the outputs, and the overrides that leave the nodes float."""
        problems = self.problems
        named = (problems or self.nodes)[:SHOWN]
        more = f" and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        lines = ["quantization changes what the model computes. The worst nodes:"]
        lines += [f"  {node}" for node in named]
        lines += [f"  {more.strip()}: see gm.quantization_noise"] if more else []
        lines += ["Fake-quant against float at the outputs:", *(f"  {line}" for line in self._ends())]
        if self.overrides:
            entries, name = len(self.overrides), "gm.quantization_noise.overrides"
            given = list(self.overrides) if entries <= 2 * SHOWN else f"{name} ({entries} entries)"
            lines.append(f'To keep them float, add to prepare_custom_config_dict: "overrides": {given}')
        elif not problems:
            lines.append("No node stands out: train the model, or give more bits to the worst ones.")
            if any(node.shares_scale for node in named):
                lines.append(f"The channels of weights share one scale here: try {EQUALIZING} first.")
        return "\n".join(lines)

    def _ends(self) -> list[str]:
        return [self.failure] if self.failure else [str(output) for output in self.outputs]

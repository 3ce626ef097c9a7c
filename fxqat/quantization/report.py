"""The quantization report: what was decided about every node, and why."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from prettytable import PrettyTable
from torch import fx

from fxqat.ops.families import RECURRENT
from fxqat.ops.identify import identify
from fxqat.quantization.annotation import FLOAT, TOO_COSTLY, annotation_of
from fxqat.utils.fx_graph import called_module
from fxqat.utils.node_meta import FloatLeaf, ForcedNumber
from fxqat.utils.source import line_of_node
from fxqat.utils.weight_hooks import weight_hooks, why_hooks_forbid

ANOTHER_BATCH = "on a batch of another size"
"""Where the prepared model is compared with the model, in words."""

ANY_BATCH = f"equal to the model {ANOTHER_BATCH}"
"""The line of :attr:`QuantReport.sameness` by which the batch size may vary."""

NOTHING_FOR_SIZE = "optimize_for='size' changes nothing: no convolution or linear layer is left float on"

ADVICE = "To change a row, use 'overrides' or 'extra_quantizer_dict' in prepare_custom_config_dict."


@dataclass(frozen=True)
class ReportRow:
    """One node of the graph.

    Args:
        node: name of the node.
        op: its op.
        target: module path or function.
        status: ``"quantized"``, ``"shares"`` or ``"float"``.
        output: scheme of its value, empty if float.
        weight: scheme of its weight, empty if it has none or it stays float.
        group: number of the sharing group of its value, None if float.
        reason: why this node is quantized, shares a scale, or stays float.
        source: file and line in the model's code.
        overridable: ``"activation"`` and ``"output"``, where an override can leave these float.
    """

    node: str
    op: str
    target: str
    status: str
    output: str
    weight: str
    group: int | None
    reason: str
    source: str
    overridable: tuple[str, ...] = ()


@dataclass(frozen=True)
class QuantReport:
    """The decisions of one backend about one model; prints as a table.

    Args:
        backend: the backend's name.
        rows: one row for each node, in execution order.
        unread: tensors of the model that the graph does not read, such as those of a head that is not called.
        leaves: modules that could not be traced and are called as a whole, in float.
        forced: sizes that the model's Python code needed as numbers; the graph holds these numbers and is right only
            for inputs of these sizes.
        eval_only: modules that compute something else in training; the graph has only what they compute in eval mode.
        checkpointed: lines with activation checkpointing, or with a custom ``autograd.Function`` that is traced into;
            the prepared model keeps the values that they may compute again.
        state_changes: what forward changes outside of parameters and buffers, and the prepared model does not.
        sameness: on which inputs the prepared model was compared with the model, and what differed.
        weights_only: the layers that compute in float, with weights that are stored as integers, by their nodes.
        for_size: whether the configuration asks for a small file (``optimize_for``).
        computed: layers that stay float because hooks of torch compute their weights, and how to make them permanent.
    """

    backend: str
    rows: tuple[ReportRow, ...]
    unread: tuple[str, ...] = ()
    leaves: tuple[FloatLeaf, ...] = ()
    forced: tuple[ForcedNumber, ...] = ()
    eval_only: tuple[str, ...] = ()
    checkpointed: tuple[str, ...] = ()
    state_changes: tuple[str, ...] = ()
    sameness: tuple[str, ...] = ()
    weights_only: tuple[str, ...] = ()
    for_size: bool = False
    computed: tuple[str, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantReport:
        return self  # nothing in it can be changed, and copies of a model are made often

    def __iter__(self) -> Iterator[ReportRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def num_quantized(self) -> int:
        """How many nodes have a quantized value or weight."""
        return sum(row.status != FLOAT for row in self.rows)

    @property
    def remarks(self) -> list[str]:
        """What tracing could not keep as it is, with the line of the user's code, and options without effect."""
        return [
            *(f"left float, not traced: {leaf.path}: {leaf.reason} ({leaf.source})" for leaf in self.leaves),
            *(f"fixed at {found.value}: {found.expression} ({found.source})" for found in self.forced),
            *(f"computes in training what it computes in eval mode: {path}" for path in self.eval_only),
            *(f"activations kept in memory, not computed again: {line}" for line in self.checkpointed),
            *(f"left float: {layer}" for layer in self.computed),
            *self.state_changes,
            *([f"{NOTHING_FOR_SIZE} {self.backend}"] if self.for_size and not self.weights_only else []),
        ]

    def row(self, node: str) -> ReportRow:
        """The row of one node, by the node's name or its module path."""
        for row in self.rows:
            if node in (row.node, row.target):
                return row
        raise KeyError(f"no node {node!r} in the report")

    def to_text(self) -> str:
        """One line for each node, without lines of the user's files: for golden files."""
        cells = [
            (
                r.node,
                r.op,
                r.status,
                r.output or "-",
                r.weight or "-",
                "-" if r.group is None else f"g{r.group}",
                r.reason,
            )
            for r in self.rows
        ]
        return "\n".join(" | ".join(row) for row in cells) + "\n"

    def __str__(self) -> str:
        table = PrettyTable(["node", "op", "status", "output", "weight", "group", "reason"], align="l")
        for r in self.rows:
            table.add_row([r.node, r.op, r.status, r.output, r.weight, "" if r.group is None else r.group, r.reason])
        head = f"{self.backend}: {self.num_quantized} of {len(self.rows)} nodes quantized"
        if self.weights_only:
            head += f", {len(self.weights_only)} of them weights only"
        costly = sum(row.status == FLOAT and row.reason.startswith(TOO_COSTLY) for row in self.rows)
        if costly:
            head += f"; {costly} stay float because converting their values costs more than integers save (least_work)"
        if self.unread:
            names = ", ".join(self.unread[:4]) + (" ..." if len(self.unread) > 4 else "")
            head += f"; the graph does not read {len(self.unread)} tensors of the model: {names}"
        sameness = self.sameness or ("not compared with the model yet",)
        return "\n".join([head, *self.remarks, str(table), *sameness, ADVICE])


def build_report(gm: fx.GraphModule, backend: str, **remarks: Any) -> QuantReport:
    """Collect the annotations of a graph, and log the recurrent layers that stay float and the remarks.

    Args:
        gm: an annotated graph module.
        backend: name of the backend.
        remarks: what tracing found and the configuration asks for, by the names of :class:`QuantReport`.
    """
    rows: list[ReportRow] = []
    weights_only: list[str] = []
    computed: dict[str, None] = {}
    for node in gm.graph.nodes:
        found = annotation_of(node)
        if found is None:
            continue
        if found.status == FLOAT and node.op == "call_module" and identify(node).family == RECURRENT:
            logging.getLogger("fxqat").info(
                "%s stays float: %s; its neighbours are quantized", node.target, found.reason
            )
        rows.append(
            ReportRow(
                node=node.name,
                op=found.op,
                target=str(node.target) if isinstance(node.target, str) else node.name,
                status=found.status,
                output=str(found.value.config.scheme) if found.value else "",
                weight=str(found.weight.scheme) if found.weight else "",
                group=found.value.group if found.value else None,
                reason=found.reason,
                source=line_of_node(node),
                overridable=found.overridable,
            )
        )
        if found.status == FLOAT and _has_computed_weights(node, found.reason):
            computed[f"{node.target}: {found.reason}"] = None
        if found.weights_only:
            weights_only.append(node.name)
    report = QuantReport(backend, tuple(rows), weights_only=tuple(weights_only), computed=tuple(computed), **remarks)
    if report.remarks:
        logging.getLogger("fxqat").warning("prepare_by_platform:\n  %s", "\n  ".join(report.remarks))
    return report


def _has_computed_weights(node: fx.Node, reason: str) -> bool:
    """Whether a node stays float for the reason that hooks of torch compute the weights of its layer."""
    module = called_module(node)
    return module is not None and bool(weight_hooks(module)) and why_hooks_forbid(module) in reason

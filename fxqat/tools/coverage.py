"""What of a model computes in integers: before calibration, in shares of its multiply-accumulates and weight bytes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from prettytable import PrettyTable
from torch import Tensor, fx, nn

from fxqat.errors import ConfigError
from fxqat.quantization.annotation import FLOAT
from fxqat.quantization.file_size import float_bytes, stored_tensors
from fxqat.quantization.graph_module import QuantGraphModule, prepared_model
from fxqat.tools.mixed_precision.units import eval_graph, fake_quant_of, products_of
from fxqat.utils.batches import read_batch
from fxqat.utils.contexts import buffers_kept, eval_mode
from fxqat.utils.count_macs import count_macs
from fxqat.utils.tensors import map_tensors

NUMBER = re.compile(r"\b\d+\b")


@dataclass(frozen=True)
class FloatGroup:
    """Nodes that stay float for the same reason.

    Args:
        reason: why.
        ops: their ops, each once.
        nodes: their module paths or names.
        macs: their multiply-accumulates for one sample that are not in integers; an operation of quantized values whose
            result stays float has none.
        sources: lines of the user's code that they come from, each once.
    """

    reason: str
    ops: tuple[str, ...]
    nodes: tuple[str, ...]
    macs: float
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Coverage:
    """What of a model computes in integers on a backend; prints as text.

    Args:
        backend: name of the backend.
        nodes: number of nodes.
        quantized_nodes: number of nodes with a quantized value or weight.
        macs: multiply-accumulates of one sample.
        integer_macs: those whose operands are all quantized.
        weight_bytes: bytes of all parameters and buffers in the float model.
        stored_bytes: their bytes in the exported file; scales and names are not counted.
        float_groups: nodes that stay float, by reason, those with the most multiply-accumulates first.
        remarks: what tracing could not keep as it is, with its line; see ``gm.quant_report``.
        unread: tensors that the graph does not read.
    """

    backend: str
    nodes: int
    quantized_nodes: int
    macs: float
    integer_macs: float
    weight_bytes: int
    stored_bytes: int
    float_groups: tuple[FloatGroup, ...]
    remarks: tuple[str, ...]
    unread: tuple[str, ...]

    @property
    def integer_share(self) -> float:
        """Share of the multiply-accumulates in integers, from 0 to 1; of the nodes in a model without any."""
        return self.integer_macs / self.macs if self.macs else self.quantized_nodes / max(1, self.nodes)

    def as_json(self) -> dict[str, Any]:
        """All fields, and ``integer_share``, as plain values."""
        return asdict(self) | {"integer_share": self.integer_share}

    def __str__(self) -> str:
        lines = [
            f"{self.backend}: {self.quantized_nodes} of {self.nodes} nodes quantized",
            f"  integer multiply-accumulates  {self.integer_share:7.1%} of {_short(self.macs)}",
            f"  parameters                    {_mib(self.weight_bytes)}, {_mib(self.stored_bytes)} in the file",
        ]
        inside = self.macs - self.integer_macs - sum(group.macs for group in self.float_groups)
        if inside > 1e-6 * self.macs:
            lines.insert(2, f"  float inside quantized nodes  {inside / self.macs:7.1%}")
        if self.unread:
            lines.append(f"  not read by the graph         {len(self.unread)} tensors: {_some(self.unread)}")
        lines += [f"  {remark}" for remark in self.remarks]
        if not self.float_groups:
            return "\n".join([*lines, "  no node stays float"])
        table = PrettyTable(["stays float because", "nodes", "of the operations", "which", "line"], align="l")
        table.max_width = 60
        for group in self.float_groups:
            share = f"{group.macs / self.macs:.1%}" if self.macs and group.macs else ""
            which = f"{', '.join(group.ops)}: {_some(group.nodes)}"
            table.add_row([group.reason, len(group.nodes), share, which, _some(group.sources, 1)])
        return "\n".join([*lines, str(table)])


def coverage(gm: nn.Module, inputs: Any) -> Coverage:
    """What of a prepared model computes in integers.

    A multiply-accumulate counts as an integer one if the value and the weight, or both values, are quantized; inside a
    recurrent layer the hidden state is float. The model is run once on the inputs; it need not be calibrated, and is
    not changed.

    Args:
        gm: a prepared model.
        inputs: one batch of inputs, see :func:`fxqat.calibrate`.

    Raises:
        ConfigError: the batch does not fit the model.

    Example:
        >>> from fxqat import prepare_by_platform
        >>> gm = prepare_by_platform(torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Sigmoid()), "TensorRT")
        >>> coverage(gm, torch.zeros(1, 4)).integer_share
        1.0
    """
    gm = prepared_model(gm, ConfigError)
    arguments = read_batch(gm, inputs, "coverage")
    counter = _CountMacs(gm)
    with torch.no_grad(), eval_mode(gm), buffers_kept(gm):
        counter.run(*arguments)
    samples = next((x.shape[0] for x in arguments if isinstance(x, Tensor) and x.dim()), 1) or 1
    macs = {node: count / samples for node, count in counter.macs.items()}
    integer = {node: count * _integer_share(node) for node, count in macs.items()}
    tensors = list(stored_tensors(gm))
    report = gm.quant_report
    return Coverage(
        report.backend,
        len(report),
        report.num_quantized,
        sum(macs.values()),
        sum(integer.values()),
        float_bytes(tensor for tensor, _ in tensors),
        sum(-(-tensor.numel() * (bits or 8 * tensor.element_size()) // 8) for tensor, bits in tensors),
        _float_groups(gm, {node.name: count - integer[node] for node, count in macs.items()}),
        tuple(report.remarks),
        report.unread,
    )


def side_by_side(found: Mapping[str, Coverage | str]) -> str:
    """A table of several backends.

    Args:
        found: the coverage by name of the backend, or the error that it gave.
    """
    table = PrettyTable(["backend", "integer operations", "nodes", "parameters in the file", "stays float"], align="l")
    table.max_width = 70
    for name, each in found.items():
        if isinstance(each, str):
            table.add_row([name, "", "", "", each])
            continue
        ops = sorted({op for group in each.float_groups for op in group.ops})
        nodes = f"{each.quantized_nodes} of {each.nodes}"
        table.add_row([name, f"{each.integer_share:.1%}", nodes, _mib(each.stored_bytes), ", ".join(ops)])
    return str(table)


class _CountMacs(fx.Interpreter):
    """Runs the deployed graph with all fake-quants as they are, and counts.

    Attributes:
        macs: multiply-accumulates of each node that has any, for the batch.
    """

    def __init__(self, gm: QuantGraphModule) -> None:
        super().__init__(gm, graph=eval_graph(gm))
        self.macs: dict[fx.Node, float] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run a node and count."""
        result, macs = count_macs(lambda: super(_CountMacs, self).run_node(n))
        if macs:
            self.macs[n] = macs
        return map_tensors(result, torch.Tensor.detach)  # the counter's hooks fail on a slice of a parameter


def _integer_share(node: fx.Node) -> float:
    """The share of a node's products whose factors are both quantized."""
    products = products_of(node)
    return sum(each.share for each in products if all(fake_quant_of(value) is not None for value in each.values))


def _float_groups(gm: QuantGraphModule, macs: Mapping[str, float]) -> tuple[FloatGroup, ...]:
    rows: dict[str, list[Any]] = {}
    for row in gm.quant_report:
        if row.status == FLOAT:
            rows.setdefault(NUMBER.sub("#", row.reason), []).append(row)
    groups = [
        FloatGroup(
            _common(row.reason for row in found),
            _once(row.op for row in found),
            tuple(row.target for row in found),
            sum(macs.get(row.node, 0.0) for row in found),
            _once(_short_path(row.source) for row in found if row.source),
        )
        for found in rows.values()
    ]
    return tuple(sorted(groups, key=lambda group: (-group.macs, -len(group.nodes))))


def _common(reasons: Iterable[str]) -> str:
    """One reason for several that differ in numbers only, with the least and the largest of each number."""
    every = list(reasons)
    numbers = [sorted(map(int, column)) for column in zip(*map(NUMBER.findall, every), strict=True)]
    found = iter(f"{each[0]} to {each[-1]}" if each[0] != each[-1] else str(each[0]) for each in numbers)
    return NUMBER.sub(lambda _: next(found), every[0])


def _short_path(source: str) -> str:
    """A line of a file, from the working directory or the folder of installed packages on."""
    for folder in (f"{Path.cwd()}/", "site-packages/"):
        source = source.rpartition(folder)[2]
    return source


def _once(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(values))


def _some(values: tuple[str, ...], count: int = 3) -> str:
    return ", ".join(values[:count]) + (f" and {len(values) - count} more" if len(values) > count else "")


def _mib(size: int) -> str:
    return f"{size / 2**20:.2f} MiB"


def _short(number: float) -> str:
    for unit in ("", "k", "M", "G"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}T"

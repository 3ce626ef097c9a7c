"""What widths cost: memory of weights, memory of activations, and bit operations.

Every cost is the largest of some rows, and each row is linear in the choices, or has products of two of them: that is
what an integer program takes (``fxqat.tools.mixed_precision.choose``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.nn.qat import QATLayer
from fxqat.quantization.op_table import IDENTITY, MATMUL, PASS_THROUGH
from fxqat.quantization.ops import identify
from fxqat.tools.mixed_precision.bank import WidthBank
from fxqat.tools.mixed_precision.units import eval_graph
from fxqat.utils.fx_graph import called_module

FLOAT_BITS = 32


@dataclass(frozen=True)
class Row:
    """A sum over units.

    Args:
        linear: what each bit of a unit adds, by its name.
        pairs: what each bit of one times each bit of the other adds.
        fixed: what is added whatever the choice.
    """

    linear: Mapping[str, float] = field(default_factory=dict)
    pairs: Mapping[tuple[str, str], float] = field(default_factory=dict)
    fixed: float = 0.0

    def of(self, widths: Mapping[str, int]) -> float:
        """The sum for some widths."""
        products = sum(factor * widths[a] * widths[b] for (a, b), factor in self.pairs.items())
        return self.fixed + sum(factor * widths[name] for name, factor in self.linear.items()) + products


@dataclass(frozen=True)
class Cost:
    """The largest of its rows.

    Args:
        name: what it is.
        unit: what it is counted in.
        rows: see :class:`Row`.
    """

    name: str
    unit: str
    rows: tuple[Row, ...]

    def of(self, widths: Mapping[str, int]) -> float:
        """What these widths cost."""
        return max(row.of(widths) for row in self.rows)


def weight_bytes(bank: WidthBank) -> Cost:
    """Memory of the weights: elements times bits over 8."""
    return Cost("weights", "bytes", (Row({name: count / 8 for name, count in _elements(bank).items()}),))


def average_weight_bits(bank: WidthBank) -> Cost:
    """Bits of a weight, averaged over all elements."""
    counts = _elements(bank)
    return Cost("average weight", "bits", (Row({name: n / sum(counts.values()) for name, n in counts.items()}),))


def bit_operations(bank: WidthBank, inputs: Sequence[Any]) -> Cost:
    """Multiply-accumulates times the bits of both factors, of one sample (Wang et al. 2019, HAQ, arXiv:1811.08886).

    Args:
        bank: of a model; a factor that stays float counts as 32 bits.
        inputs: of the model.
    """
    linear: dict[str, float] = {}
    pairs: dict[tuple[str, str], float] = {}
    fixed = 0.0
    for factors, macs in _Multiplications(bank, inputs).found:
        known = sorted(name for name in factors if name is not None)
        if len(known) == 2:
            pairs[known[0], known[1]] = pairs.get((known[0], known[1]), 0.0) + macs
        elif known:
            linear[known[0]] = linear.get(known[0], 0.0) + macs * FLOAT_BITS
        else:
            fixed += macs * FLOAT_BITS**2
    return Cost("bit operations", "operations", (Row(linear, pairs, fixed),))


def activation_peak(bank: WidthBank, inputs: Sequence[Any]) -> Cost:
    """The most memory that values take at one time, of one sample, if each is freed after its last reader.

    While an operation runs, its operands, its result and all that is read later are there. What only moves or reshapes
    values reads them in place.

    Args:
        bank: of a model; what stays float counts as 32 bits.
        inputs: of the model.
    """
    return Cost("activations", "bytes", tuple(_undominated(_Sizes(bank, inputs).cuts())))


class _Run(fx.Interpreter):
    """One run of the graph that is deployed, with all fake-quants off."""

    def __init__(self, bank: WidthBank, inputs: Sequence[Any]) -> None:
        super().__init__(bank.model, graph=eval_graph(bank.model))
        self.names = {unit.path: unit.name for unit in bank.units.values()}
        self.samples = next(x.shape[0] for x in inputs if isinstance(x, Tensor) and x.dim())
        with torch.no_grad():
            self.run(*inputs)

    def unit_of(self, value: object) -> str | None:
        """The unit that a value is rounded by, looking through what only moves values; None if it is float."""
        while isinstance(value, fx.Node):
            if isinstance(called_module(value), FakeQuantizeBase):
                return self.names[str(value.target)]
            if not _moves(value):
                return None
            value = value.args[0]
        return None


class _Multiplications(_Run):
    """Counts multiply-accumulates by the units of their factors.

    Attributes:
        found: ``((unit, unit), multiply-accumulates of a sample)`` of each operation that multiplies matrices.
    """

    def __init__(self, bank: WidthBank, inputs: Sequence[Any]) -> None:
        self.found: list[tuple[tuple[str | None, str | None], float]] = []
        super().__init__(bank, inputs)

    def run_node(self, n: fx.Node) -> Any:
        """Run a node and count."""
        from torch.utils.flop_counter import FlopCounterMode  # here, because importing it makes loggers

        is_layer = isinstance(called_module(n), QATLayer)
        if not is_layer and identify(n).family != MATMUL:
            return super().run_node(n)
        with FlopCounterMode(display=False) as counter:
            result = super().run_node(n)
        factors = (f"{n.target}.weight" if is_layer else self.unit_of(n.args[1]), self.unit_of(n.args[0]))
        self.found.append((factors, counter.get_total_flops() / 2 / self.samples))
        return result


class _Sizes(_Run):
    """Notes how many values each node gives for a sample."""

    def __init__(self, bank: WidthBank, inputs: Sequence[Any]) -> None:
        self.sizes: dict[fx.Node, float] = {}
        super().__init__(bank, inputs)

    def run_node(self, n: fx.Node) -> Any:
        """Run a node and note its size."""
        result = super().run_node(n)
        if isinstance(result, Tensor) and n.op != "get_attr":
            self.sizes[n] = result.numel() / self.samples
        return result

    def cuts(self) -> list[Row]:
        """What is in memory while each operation runs."""
        nodes = [node for node in self.graph.nodes if node in self.sizes or node.op == "output"]
        owner: dict[fx.Node, fx.Node] = {}  # whose memory a node's value is in
        last: dict[fx.Node, int] = {}
        rounded: dict[fx.Node, str] = {}
        for i, node in enumerate(nodes):
            source = node.args[0] if _moves(node) and node.args else None
            owner[node] = owner.get(source, node) if isinstance(source, fx.Node) else node
            last[owner[node]] = i
            for read in node.all_input_nodes:
                if read in owner:
                    last[owner[read]] = i
            if isinstance(called_module(node), FakeQuantizeBase):
                rounded.setdefault(owner[node], self.names[str(node.target)])
        rows = []
        for i, node in enumerate(nodes):
            there = [other for other in nodes[: i + 1] if owner[other] is other and last[other] >= i]
            if owner[node] is node and node.op != "output":
                linear: dict[str, float] = {}
                for other in there:
                    if other in rounded:
                        linear[rounded[other]] = linear.get(rounded[other], 0.0) + self.sizes[other] / 8
                fixed = sum(self.sizes[other] for other in there if other not in rounded) * FLOAT_BITS / 8
                rows.append(Row(linear, fixed=fixed))
        return rows


def _moves(node: fx.Node) -> bool:
    """Whether a node's value is that of its first argument, rounded or in another shape."""
    return isinstance(called_module(node), FakeQuantizeBase) or identify(node).family in (IDENTITY, PASS_THROUGH)


def _undominated(rows: Sequence[Row]) -> list[Row]:
    """Those that no other row is at least as large as, whatever the choice."""
    kept: list[Row] = []
    for row in sorted(rows, key=lambda row: -(row.fixed + 8 * sum(row.linear.values()))):
        if not any(
            other.fixed >= row.fixed and all(other.linear.get(name, 0.0) >= size for name, size in row.linear.items())
            for other in kept
        ):
            kept.append(row)
    return kept


def _elements(bank: WidthBank) -> dict[str, int]:
    """How many elements each weight has."""
    layers = {unit.name: unit.layer for unit in bank.units.values() if unit.layer is not None}
    return {name: _weight_of(bank, path).numel() for name, path in layers.items()}


def _weight_of(bank: WidthBank, path: str) -> Tensor:
    layer = bank.model.get_submodule(path)
    assert isinstance(layer, QATLayer)
    return layer.weight

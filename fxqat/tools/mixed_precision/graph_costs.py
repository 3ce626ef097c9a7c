"""Costs of bit widths that depend on the graph: bit operations, and memory of activations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.nn.quantized_layer import QuantizedLayer
from fxqat.ops.families import ACTIVATION
from fxqat.ops.identify import identify
from fxqat.quantization.graph_module import QuantGraphModule
from fxqat.tools.mixed_precision.bank import WidthBank
from fxqat.tools.mixed_precision.costs import Cost, Row, per_bit
from fxqat.tools.mixed_precision.units import Unit, Widths, eval_graph, fake_quant_of, find_units, moves, products_of
from fxqat.utils.batches import read_batch
from fxqat.utils.count_macs import count_macs
from fxqat.utils.fx_graph import called_module

FLOAT_BITS = 32


def bit_operations(bank: WidthBank, inputs: Sequence[Any]) -> Cost:
    """Multiply-accumulates times the bits of both factors, for one sample (Wang et al. 2019, HAQ, arXiv:1811.08886).

    Args:
        bank: the bank; a factor that stays float counts as 32 bits.
        inputs: one batch of inputs.
    """
    linear: dict[str, float] = {}
    macs_of: dict[tuple[str, str], float] = {}
    fixed = 0.0
    for factors, macs in _Multiplications(bank.model, bank.units, inputs).found:
        known = sorted(name for name in factors if name is not None)
        if len(known) == 2:
            macs_of[known[0], known[1]] = macs_of.get((known[0], known[1]), 0.0) + macs
        elif known:
            linear[known[0]] = linear.get(known[0], 0.0) + macs * FLOAT_BITS
        else:
            fixed += macs * FLOAT_BITS**2
    pairs = {
        (a, b): {(one, other): macs * one * other for one, other in product(bank.widths[a], bank.widths[b])}
        for (a, b), macs in macs_of.items()
    }
    row = Row(per_bit(bank, linear).single, pairs, fixed)
    return Cost("bit operations", "operations", (row,))


def bit_products(gm: QuantGraphModule, inputs: Sequence[Any]) -> Callable[[Widths], float]:
    """The same as :func:`bit_operations` of a model without a bank: a function of the bits by name of unit.

    Args:
        gm: a prepared model.
        inputs: one batch of inputs.

    Returns:
        The multiply-accumulates times the bits of both factors; a factor that has no bits counts as 32.
    """
    found = _Multiplications(gm, find_units(gm), inputs).found

    def bits_of(name: str | None, widths: Widths) -> int:
        return FLOAT_BITS if name is None else widths.get(name, FLOAT_BITS)

    def cost(widths: Widths) -> float:
        return sum((macs * bits_of(a, widths) * bits_of(b, widths) for (a, b), macs in found), 0.0)

    return cost


def activation_peak(bank: WidthBank, inputs: Sequence[Any]) -> Cost:
    """Peak memory of the activations of one sample, if each is freed after its last reader.

    While an operation runs, its operands, its result and all values that are read later are in memory. Operations that
    only move or reshape values work in place. So does an activation function that is the only reader of a value that is
    not rounded before it: the two operations are computed together.

    Args:
        bank: the bank; values that stay float count as 32 bits.
        inputs: one batch of inputs.
    """
    return Cost("activations", "bytes", tuple(_undominated(_Sizes(bank.model, bank.units, inputs).cuts(bank))))


def layer_inputs(bank: WidthBank) -> dict[str, str | None]:
    """For the weight of each layer, the unit of the layer's input; None if the input is float."""
    found: dict[str, str | None] = {}
    for node in eval_graph(bank.model).nodes:
        if isinstance(called_module(node), QuantizedLayer):
            name = weight_unit(bank.units, str(node.target))
            found[name] = _unit_of(bank.units, node.args[0]) or found.get(name)
    return found


def weight_unit(units: Mapping[str, Unit], layer: str) -> str:
    """The unit of the weight of the layer at a path."""
    return next(unit.name for unit in units.values() if layer in unit.layers)


def _unit_of(units: Mapping[str, Unit], value: object) -> str | None:
    """The unit that rounds a value; None if the value is float."""
    call = fake_quant_of(value)
    return None if call is None else next(unit.name for unit in units.values() if unit.paths == ((call.target,),))


class _Run(fx.Interpreter):
    """One run of the deployed graph."""

    caller: ClassVar[str]

    def __init__(self, model: QuantGraphModule, units: Mapping[str, Unit], inputs: Sequence[Any]) -> None:
        super().__init__(model, graph=eval_graph(model))
        self.units = units
        arguments = read_batch(model, inputs, type(self).caller)
        self.samples = next(x.shape[0] for x in arguments if isinstance(x, Tensor) and x.dim())
        with torch.no_grad():
            self.run(*arguments)


class _Multiplications(_Run):
    """Counts multiply-accumulates by the units of their factors.

    Attributes:
        found: ``((unit, unit), multiply-accumulates of a sample)`` of each operation that multiplies matrices.
    """

    caller = "bit_operations"

    def __init__(self, model: QuantGraphModule, units: Mapping[str, Unit], inputs: Sequence[Any]) -> None:
        self.found: list[tuple[tuple[str | None, str | None], float]] = []
        super().__init__(model, units, inputs)

    def run_node(self, n: fx.Node) -> Any:
        """Run a node and count."""
        products = products_of(n)
        if not products:
            return super().run_node(n)
        result, macs = count_macs(lambda: super(_Multiplications, self).run_node(n))
        for part in products:
            of_weight = [] if part.weight is None else [weight_unit(self.units, part.weight)]
            first, second = (*of_weight, *(_unit_of(self.units, value) for value in part.values), None)[:2]
            self.found.append(((first, second), macs / self.samples * part.share))
        return result


class _Sizes(_Run):
    """Records the number of output values of each node for one sample."""

    caller = "activation_peak"

    def __init__(self, model: QuantGraphModule, units: Mapping[str, Unit], inputs: Sequence[Any]) -> None:
        self.sizes: dict[fx.Node, float] = {}
        super().__init__(model, units, inputs)

    def run_node(self, n: fx.Node) -> Any:
        """Run a node and record its size."""
        result = super().run_node(n)
        if isinstance(result, Tensor) and n.op != "get_attr":
            self.sizes[n] = result.numel() / self.samples
        return result

    def cuts(self, bank: WidthBank) -> list[Row]:
        """The memory in use while each operation runs."""
        nodes = [node for node in self.graph.nodes if node in self.sizes or node.op == "output"]
        owner: dict[fx.Node, fx.Node] = {}  # the node whose memory a value is in
        last: dict[fx.Node, int] = {}
        rounded: dict[fx.Node, str] = {}
        for i, node in enumerate(nodes):
            source = node.args[0] if (moves(node) or _is_computed_with_source(node)) and node.args else None
            owner[node] = owner.get(source, node) if isinstance(source, fx.Node) else node
            last[owner[node]] = i
            for read in node.all_input_nodes:
                if read in owner:
                    last[owner[read]] = i
            if isinstance(called_module(node), FakeQuantizeBase):
                rounded.setdefault(owner[node], str(_unit_of(self.units, node)))
        rows = []
        for i, node in enumerate(nodes):
            there = [other for other in nodes[: i + 1] if owner[other] is other and last[other] >= i]
            if owner[node] is node and node.op != "output":
                linear: dict[str, float] = {}
                for other in there:
                    if other in rounded:
                        linear[rounded[other]] = linear.get(rounded[other], 0.0) + self.sizes[other] / 8
                fixed = sum(self.sizes[other] for other in there if other not in rounded) * FLOAT_BITS / 8
                rows.append(per_bit(bank, linear, fixed))
        return rows


def _is_computed_with_source(node: fx.Node) -> bool:
    """Whether a node is an activation function and the only reader of a value; a quantizer counts as a reader."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or source.op == "placeholder" or len(source.users) > 1:
        return False
    return not isinstance(called_module(source), FakeQuantizeBase) and identify(node).family == ACTIVATION


def _undominated(rows: Sequence[Row]) -> list[Row]:
    """Remove each row that another row is never smaller than."""
    kept: list[Row] = []
    for row in sorted(rows, key=_most, reverse=True):
        if not any(
            other.fixed >= row.fixed
            and all(name in other.single and _most_of(other, name) >= _most_of(row, name) for name in row.single)
            for other in kept
        ):
            kept.append(row)
    return kept


def _most_of(row: Row, name: str) -> float:
    return max(row.single[name].values())


def _most(row: Row) -> float:
    return row.fixed + sum(_most_of(row, name) for name in row.single)

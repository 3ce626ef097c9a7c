"""Find the overrides that cure what rounding damages, by trying: these nodes read float operands."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import fx

from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.quantization.graph_module import QuantGraphModule
from fxqat.quantization.two_values import TwoValues, is_layer, moves_values, readers_of
from fxqat.utils.fx_graph import called_module

ROUNDS = 5
"""How far back, in operations, overrides are looked for."""


def find_overrides(gm: QuantGraphModule, run: TwoValues, inputs: tuple[Any, ...]) -> list[dict[str, Any]]:
    """The overrides after which no value and no operation has a problem, as far as they are found."""
    overridable = {row.node: row.overridable for row in gm.quant_report}
    found: list[dict[str, Any]] = []
    read_float: set[str] = set()
    for _ in range(ROUNDS):
        before = len(read_float)
        for node in run.problems():
            if isinstance(called_module(node), FakeQuantizeBase):
                found += overrides_of_value(node, overridable)
                read_float |= {reader.name for reader, _ in readers_of(node)}
                continue
            for reader in _first_rounding(node, read_float):
                found += _of_operation(reader, overridable)
                read_float |= {reader.name, *(moved.name for moved in _operands(reader) if moves_values(moved))}
        if len(read_float) == before:
            break
        run = TwoValues(gm, run.graph, read_float)
        run.on(inputs)
    return [entry for number, entry in enumerate(found) if entry not in found[:number]]


def _of_operation(node: fx.Node, overridable: Mapping[str, tuple[str, ...]]) -> Iterator[dict[str, Any]]:
    """The overrides with which an operation reads no rounded value.

    One that reads float values already is named, too: an override of its reader may change that.
    """
    if "activation" in overridable.get(node.name, ()):
        yield {"match": {"node": node.name}, "activation": None}
    else:
        for operand in _operands(node):
            if isinstance(called_module(operand), FakeQuantizeBase):
                yield from overrides_of_value(operand, overridable)


def overrides_of_value(quant: fx.Node, overridable: Mapping[str, tuple[str, ...]]) -> Iterator[dict[str, Any]]:
    """The overrides with which nothing reads the value of a fake-quant's node rounded."""
    source = quant.args[0]
    assert isinstance(source, fx.Node)
    if quant.kwargs.get("on_grid"):  # a quantized value was moved
        return
    is_produced = "output" in overridable.get(source.name, ())
    if is_produced:
        yield {"match": {"node": source.name}, "output": None}
    for reader, moved in readers_of(quant):
        if (moved or not is_produced) and "activation" in overridable.get(reader.name, ()):
            yield {"match": {"node": reader.name}, "activation": None}


def _operands(node: fx.Node) -> Iterator[fx.Node]:
    """The operands of an operation: fake-quants and moving nodes back to the node that computes the value."""
    for operand in node.all_input_nodes:
        yield operand
        if isinstance(called_module(operand), FakeQuantizeBase) or moves_values(operand):
            yield from _operands(operand)


def _first_rounding(node: fx.Node, read_float: Collection[str]) -> Iterator[fx.Node]:
    """An operation, or where it reads float already, those before it; layers with a weight are the end."""
    if node.name not in read_float:
        yield node
        return
    for operand in _operands(node):
        computed = operand.op.startswith("call") and not isinstance(called_module(operand), FakeQuantizeBase)
        if computed and not moves_values(operand) and not is_layer(operand):
            yield from _first_rounding(operand, read_float)

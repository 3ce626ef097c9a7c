"""Units: the weights, and the groups of activations with one scale, whose bit width can be chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.nn.qat import QATLayer
from fxqat.ops.families import IDENTITY, PASS_THROUGH
from fxqat.ops.identify import identify, operands
from fxqat.quantization.graph_module import QuantGraphModule
from fxqat.utils.fx_graph import called_module
from fxqat.utils.train_eval_graph import graph_of_mode

Widths = dict[str, int]
"""Bits by unit name."""


@dataclass(frozen=True)
class Unit:
    """A fake-quant whose bit width can be chosen.

    Args:
        name: ``"<layer>.weight"``, or the name of the first tensor that has the scale.
        path: path of the fake-quant in the prepared model.
        tensors: names of all tensors that it rounds, as in an exported file.
        layer: path of the layer whose weight it rounds; None for activations.
        node: name of the node that computes the first tensor, as in ``quant_report``; None for a weight.
    """

    name: str
    path: str
    tensors: tuple[str, ...]
    layer: str | None = None
    node: str | None = None

    @property
    def is_weight(self) -> bool:
        """Whether it is a layer's weight."""
        return self.layer is not None

    def rule(self, bits: int) -> dict[str, Any]:
        """The rule for ``overrides`` that sets its bit width."""
        if self.is_weight:
            return {"match": {"module": self.layer}, "weight": {"bit_width": bits}}
        return {"match": {"node": self.node}, "value": {"bit_width": bits}}


def eval_graph(gm: QuantGraphModule) -> fx.Graph:
    """The graph that is deployed, with its modules at hand."""
    return graph_of_mode(gm.graph, training=False)


def find_units(gm: QuantGraphModule) -> dict[str, Unit]:
    """Every unit of a prepared model by name, in the order of execution."""
    found: dict[str, Unit] = {}
    names: dict[str, str] = {}  # name of the unit by path of its fake-quant
    for node in eval_graph(gm).nodes:
        module = called_module(node)
        target = str(node.target)
        if isinstance(module, QATLayer):
            name = f"{target}.weight"
            found.setdefault(name, Unit(name, f"{target}.weight_fake_quant", (name,), layer=target))
        elif isinstance(module, FakeQuantizeBase):
            tensor = str(node.kwargs["tensor_name"])
            if target not in names:
                names[target] = tensor
                found[tensor] = Unit(tensor, target, (tensor,), node=node.args[0].name)
            elif not node.kwargs.get("on_grid"):
                first = found[names[target]]
                found[first.name] = Unit(first.name, target, (*first.tensors, tensor), node=first.node)
    return found


def fake_quant_of(value: object) -> fx.Node | None:
    """The call of the fake-quant that rounds a value, also before operations that only move it; None if it is float."""
    while isinstance(value, fx.Node):
        if isinstance(called_module(value), FakeQuantizeBase):
            return value
        if not moves(value):
            return None
        value = next(iter(operands(value, identify(value))), None)
    return None


def moves(node: fx.Node) -> bool:
    """Whether a node only rounds, moves or reshapes its first argument."""
    return isinstance(called_module(node), FakeQuantizeBase) or identify(node).family in (IDENTITY, PASS_THROUGH)


def quant_at(gm: QuantGraphModule, path: str) -> FakeQuantizeBase:
    """The fake-quant at a path."""
    found = gm.get_submodule(path)
    assert isinstance(found, FakeQuantizeBase)
    return found

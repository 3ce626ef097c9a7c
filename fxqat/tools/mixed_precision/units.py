"""Units: the weights, and the groups of activations with one scale, whose bit width can be chosen; their products."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.nn.qat import QATLayer
from fxqat.nn.quantized_layer import QuantizedLayer
from fxqat.nn.recurrent import QATRecurrentLayer
from fxqat.ops.families import IDENTITY, MATMUL, PASS_THROUGH
from fxqat.ops.identify import identify, operands
from fxqat.quantization.graph_module import QuantGraphModule
from fxqat.scheme import QuantizeScheme
from fxqat.utils.fx_graph import called_module, set_module
from fxqat.utils.train_eval_graph import graph_of_mode

Widths = dict[str, int]
"""Bits by unit name."""


@dataclass(frozen=True)
class Unit:
    """Tensors with one bit width, which can be chosen: the weights of a layer, or activations with one scale.

    Args:
        name: ``"<layer>.weight"``, or the name of the first tensor that has the scale.
        paths: for each of its fake-quants the paths in the prepared model: several if layers with tied weights share
            it. A recurrent layer has two fake-quants.
        tensors: names of the tensors, as in an exported file.
        layers: paths of the layers that have the weight; empty for activations.
        node: name of the node that computes the first tensor, as in ``quant_report``; None for a weight.
    """

    name: str
    paths: tuple[tuple[str, ...], ...]
    tensors: tuple[str, ...]
    layers: tuple[str, ...] = ()
    node: str | None = None

    @property
    def is_weight(self) -> bool:
        """Whether it is the weight of a layer."""
        return bool(self.layers)

    def rules(self, bits: int) -> list[dict[str, Any]]:
        """The rules for ``overrides`` that set its bit width."""
        if self.is_weight:
            return [{"match": {"module": layer}, "weight": {"bit_width": bits}} for layer in self.layers]
        return [{"match": {"node": self.node}, "value": {"bit_width": bits}}]

    def quants(self, gm: QuantGraphModule) -> list[FakeQuantizeBase]:
        """Its fake-quants in a prepared model."""
        return [quant_at(gm, paths[0]) for paths in self.paths]

    def scheme(self, gm: QuantGraphModule) -> QuantizeScheme:
        """Its scheme in a prepared model; all of its fake-quants have the same."""
        return self.quants(gm)[0].scheme

    def set_quants(self, gm: QuantGraphModule, quants: Iterable[FakeQuantizeBase]) -> None:
        """Replace its fake-quants in a prepared model."""
        for paths, quant in zip(self.paths, quants, strict=True):
            for path in paths:
                set_module(gm, path, quant)


@dataclass(frozen=True)
class Product:
    """A part of the products of a node whose factors have the same widths.

    Args:
        weight: path of the layer whose weight is one factor; None if both are values.
        values: the other factors; None for one that is never rounded.
        share: its share of the multiply-accumulates of the node.
    """

    weight: str | None
    values: tuple[fx.Node | None, ...]
    share: float = 1.0


def eval_graph(gm: QuantGraphModule) -> fx.Graph:
    """The graph that is deployed, with its modules at hand."""
    return graph_of_mode(gm.graph, training=False)


def find_units(gm: QuantGraphModule) -> dict[str, Unit]:
    """Every unit of a prepared model by name, in the order of execution."""
    found: dict[str, Unit] = {}
    names: dict[FakeQuantizeBase, str] = {}  # of the unit
    for node in eval_graph(gm).nodes:
        module = called_module(node)
        target = str(node.target)
        if isinstance(module, QuantizedLayer):
            name = names.setdefault(module.weight_fake_quants()[0], f"{target}.weight")
            found[name] = _with_layer(found.get(name, Unit(name, (), ())), target, module)
        elif isinstance(module, FakeQuantizeBase):
            tensor = str(node.kwargs["tensor_name"])
            if module not in names:
                names[module] = tensor
                found[tensor] = Unit(tensor, ((target,),), (tensor,), node=node.args[0].name)
            elif not node.kwargs.get("on_grid"):
                first = found[names[module]]
                found[first.name] = replace(first, tensors=(*first.tensors, tensor))
    return found


def _with_layer(unit: Unit, path: str, layer: QuantizedLayer) -> Unit:
    """The unit of the weights of a layer, also of another one if they are tied."""
    if path in unit.layers:
        return unit
    names = [f"{path}.{name}" for name in layer.weight_names]
    known = unit.paths or [()] * len(names)
    paths = tuple((*others, f"{name}_fake_quant") for others, name in zip(known, names, strict=True))
    return replace(unit, paths=paths, tensors=(*unit.tensors, *names), layers=(*unit.layers, path))


def products_of(node: fx.Node) -> list[Product]:
    """What a node multiplies; nothing if it multiplies no matrices, or has a weight that is not rounded.

    A recurrent layer multiplies its input, and in each step its hidden state, which is never rounded inside the layer.
    """
    layer = called_module(node)
    values = [value for value in operands(node, identify(node)) if isinstance(value, fx.Node)]
    if isinstance(layer, QATLayer):
        return [Product(str(node.target), tuple(values[:1]))]
    if isinstance(layer, QATRecurrentLayer):
        sizes = [sum(tensor.numel() for tensor in tensors) for tensors in layer.weight_tensors()]
        read = (values[0], None)
        return [Product(str(node.target), (v,), size / sum(sizes)) for v, size in zip(read, sizes, strict=True)]
    return [Product(None, tuple(values))] if identify(node).family == MATMUL else []


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


def layer_at(gm: QuantGraphModule, path: str) -> QuantizedLayer:
    """The layer with quantized weights at a path."""
    found = gm.get_submodule(path)
    assert isinstance(found, QuantizedLayer)
    return found

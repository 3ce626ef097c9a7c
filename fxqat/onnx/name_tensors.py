"""Give every quantized tensor the name that it has in the prepared model.

With NAME the tensor's name:

1. a Q/DQ pair: the value that is quantized is NAME, its integers NAME_quantized, its rounded values NAME_dequantized,
   its parameters NAME_scale and NAME_zero_point;
2. a stored tensor: its integers are NAME_quantized and its real values NAME; an input of integers keeps its own name,
   and its real values are NAME;
3. inputs and outputs of the model keep their names; a quantized input or output is known by that name;
4. a value that is already named by another tensor, because what stood between them was simplified away, passes through
   an Identity, which gets the name;
5. a tensor without values may be missing: it is dropped when it is concatenated; so may an activation without effect;
6. a value that is quantized at run time has no constants: its node has the path as its name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import onnx_ir as ir

from fxqat.errors import ParityError
from fxqat.scheme import QuantizedTensor
from fxqat.utils.unused_names import unused_name

RECORDS = "fxqat.tensors"
"""Key of the records in the model's ``meta``, which onnx_ir keeps in memory and does not write to files."""

QUANTIZERS = ("QuantizeLinear", "DynamicQuantizeLinear")
"""The operators that turn real values into integers."""


class NameTensors(ir.passes.InPlacePass):
    """Rename the tensors, and keep their records with the names in the file: see :func:`tensors_of`.

    Args:
        tensors: the record of the tensor at each path; initializers are named ``<path>.<buffer>``.
        empty: paths of the tensors without values, see :func:`empty_tensors`.
        has_effect: whether missing activations, by their names, have an effect on what the model computes.

    Raises:
        ParityError: a tensor is not in the model.
    """

    def __init__(
        self,
        tensors: Mapping[str, QuantizedTensor],
        empty: Collection[str] = (),
        has_effect: Callable[[Collection[str]], bool] = bool,
    ) -> None:
        self.tensors = tensors
        self.empty = empty
        self.has_effect = has_effect

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rename the tensors in place."""
        named = _name_values(model.graph, self.tensors)
        lost = [t for path, t in self.tensors.items() if path not in named and path not in self.empty]
        names = sorted(tensor.name for tensor in lost)
        if lost and (any(tensor.kind != "activation" for tensor in lost) or self.has_effect(names)):
            raise ParityError(f"{', '.join(names)}: quantized in the model, but not in the exported file")
        _name_parameters(model.graph, named)
        model.meta[RECORDS] = named
        return ir.passes.PassResult(model, modified=bool(named))


def tensors_of(model: ir.Model) -> dict[str, QuantizedTensor]:
    """The quantized tensors of a model after :class:`NameTensors`, by their paths in the lowered graph."""
    found: dict[str, QuantizedTensor] = model.meta[RECORDS]
    return found


def empty_tensors(model: ir.Model, tensors: Mapping[str, QuantizedTensor]) -> set[str]:
    """The paths of the quantized tensors that have no values (case 5).

    Args:
        model: the exporter's model, with the shapes of its values.
        tensors: see :class:`NameTensors`.
    """
    found = set()
    for node in model.graph:
        path = _path_of(node, tensors)
        shape = node.inputs[0].shape if path is not None and node.inputs[0] is not None else None
        if path is not None and shape is not None and 0 in shape.dims:
            found.add(path)
    return found


def _name_values(graph: ir.Graph, tensors: Mapping[str, QuantizedTensor]) -> dict[str, QuantizedTensor]:
    """Name everything but the parameters; the result has the names in the file."""
    fixed = {value.name for value in (*graph.inputs, *graph.outputs)}  # case 3
    made = (value for node in graph for value in node.outputs)
    taken = {value.name for value in (*made, *graph.initializers.values()) if value.name} | fixed
    _clear_the_way(graph, {tensor.name for tensor in tensors.values()}, fixed, taken)
    named: dict[str, QuantizedTensor] = {}
    owners: dict[ir.Value, str] = {}
    for node in list(graph):
        path = _path_of(node, tensors)
        if path is None:
            continue
        record = tensors[path]
        if node.op_type in QUANTIZERS:  # case 1
            source = node.inputs[0]
            assert source is not None
            if owners.setdefault(source, path) != path:  # case 4
                source = _own_value(graph, node, source)
            _rename(source, record.name, fixed, taken)
            _rename(node.outputs[0], f"{record.name}_quantized", fixed, taken)
            named[path] = replace(record, name=str(source.name))
            continue
        source = node.inputs[0]
        is_stored = source is not None and (source.is_initializer() or source.is_graph_input())
        if not is_stored:
            _rename(node.outputs[0], f"{record.name}_dequantized", fixed, taken)
        elif path not in named:  # case 2; a layer that is called twice reads its weight twice
            _rename(node.outputs[0], record.name, fixed, taken)
            named[path] = replace(record, name=str(node.outputs[0].name))
            owners[node.outputs[0]] = path
    return named


def _own_value(graph: ir.Graph, node: ir.Node, source: ir.Value) -> ir.Value:
    """A copy of the value that a node reads, for this node alone."""
    identity = ir.node("Identity", [source])
    graph.insert_before(node, identity)
    node.replace_input_with(0, identity.outputs[0])
    return identity.outputs[0]


def _path_of(node: ir.Node, tensors: Mapping[str, QuantizedTensor]) -> str | None:
    if node.op_type == "DynamicQuantizeLinear" and node.name in tensors:  # case 6
        return node.name
    if node.op_type not in ("QuantizeLinear", "DequantizeLinear") or node.inputs[1] is None:
        return None
    path = str(node.inputs[1].name).removesuffix(".scale").removesuffix(".pair")
    return path if path in tensors else None


def _clear_the_way(graph: ir.Graph, names: set[str], fixed: set[str | None], taken: set[str | None]) -> None:
    """Rename the exporter's own values, and the model's float tensors, whose names our tensors need."""
    made = (value for node in graph for value in node.outputs)
    for value in [*made, *graph.initializers.values()]:
        if value.name in names:
            _rename(value, f"{value.name}_value", fixed, taken)


def _rename(value: ir.Value, name: str, fixed: set[str | None], taken: set[str | None]) -> None:
    if value.name in fixed or value.name == name:
        return
    unused = unused_name(name, taken)
    taken.discard(value.name)
    taken.add(unused)
    value.name = unused


def _name_parameters(graph: ir.Graph, named: Mapping[str, QuantizedTensor]) -> None:
    suffixes = {"integers": "quantized", "values": "float", "low": "low", "high": "high"}
    made = (value for node in graph for value in node.outputs)
    taken = {value.name for value in (*graph.inputs, *graph.initializers.values(), *made)}
    for old in list(graph.initializers):
        path, _, buffer = old.rpartition(".")
        record = named.get(path.removesuffix(".pair"))
        if record is not None:
            value = graph.initializers.pop(old)
            value.name = unused_name(f"{record.name}_{suffixes.get(buffer, buffer)}", taken)
            taken.add(value.name)
            graph.initializers[value.name] = value

"""Give every quantized tensor the name that it has in the prepared model.

With NAME the tensor's name:

1. a Q/DQ pair: the value that is quantized is NAME, its integers NAME_quantized, its rounded values NAME_dequantized,
   its parameters NAME_scale and NAME_zero_point;
2. a stored tensor: its integers are NAME_quantized and its real values NAME;
3. inputs and outputs of the model keep their names; a quantized input or output is known by that name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import onnx_ir as ir

from fxqat.errors import ParityError
from fxqat.scheme import QuantizedTensor
from fxqat.utils.unused_names import unused_name

RECORDS = "fxqat.tensors"
"""Key of the records in the model's ``meta``, which onnx_ir keeps in memory and does not write to files."""


class NameTensors(ir.passes.InPlacePass):
    """Rename the tensors, and keep their records with the names in the file: see :func:`tensors_of`.

    Args:
        tensors: the record of the tensor at each path; initializers are named ``<path>.<buffer>``.

    Raises:
        ParityError: a tensor is not in the model.
    """

    def __init__(self, tensors: Mapping[str, QuantizedTensor]) -> None:
        self.tensors = tensors

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rename the tensors in place."""
        named = _name_values(model.graph, self.tensors)
        lost = sorted(tensor.name for path, tensor in self.tensors.items() if path not in named)
        if lost:
            raise ParityError(f"{', '.join(lost)}: quantized in the model, but not in the exported file")
        _name_parameters(model.graph, named)
        model.meta[RECORDS] = named
        return ir.passes.PassResult(model, modified=bool(named))


def tensors_of(model: ir.Model) -> dict[str, QuantizedTensor]:
    """The quantized tensors of a model after :class:`NameTensors`, by their paths in the lowered graph."""
    found: dict[str, QuantizedTensor] = model.meta[RECORDS]
    return found


def _name_values(graph: ir.Graph, tensors: Mapping[str, QuantizedTensor]) -> dict[str, QuantizedTensor]:
    """Name everything but the parameters; the result has the names in the file."""
    fixed = {value.name for value in (*graph.inputs, *graph.outputs)}  # case 3
    taken = {value.name for node in graph for value in node.outputs if value.name} | fixed
    _clear_the_way(graph, {tensor.name for tensor in tensors.values()}, fixed, taken)
    named: dict[str, QuantizedTensor] = {}
    for node in graph:
        path = _path_of(node, tensors)
        if path is None:
            continue
        record = tensors[path]
        if node.op_type == "QuantizeLinear":  # case 1
            source = node.inputs[0]
            assert source is not None
            _rename(source, record.name, fixed, taken)
            _rename(node.outputs[0], f"{record.name}_quantized", fixed, taken)
            named[path] = replace(record, name=str(source.name))
            continue
        is_stored = node.inputs[0] is not None and node.inputs[0].is_initializer()
        if not is_stored:
            _rename(node.outputs[0], f"{record.name}_dequantized", fixed, taken)
        elif path not in named:  # case 2; a layer that is called twice reads its weight twice
            _rename(node.outputs[0], record.name, fixed, taken)
            named[path] = replace(record, name=str(node.outputs[0].name))
    return named


def _path_of(node: ir.Node, tensors: Mapping[str, QuantizedTensor]) -> str | None:
    if node.op_type not in ("QuantizeLinear", "DequantizeLinear") or node.inputs[1] is None:
        return None
    path = str(node.inputs[1].name).removesuffix(".scale").removesuffix(".pair")
    return path if path in tensors else None


def _clear_the_way(graph: ir.Graph, names: set[str], fixed: set[str | None], taken: set[str | None]) -> None:
    """Rename the exporter's own values whose names our tensors need."""
    for node in graph:
        for value in node.outputs:
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
    for old in list(graph.initializers):
        path, _, buffer = old.rpartition(".")
        record = named.get(path.removesuffix(".pair"))
        if record is not None:
            value = graph.initializers.pop(old)
            value.name = f"{record.name}_{suffixes.get(buffer, buffer)}"
            graph.initializers[value.name] = value

"""Names: every quantized tensor gets the name it has in the prepared model.

With NAME the tensor's name:

1. a Q/DQ pair: the value that is quantized is NAME, its integers NAME_quantized, its rounded values NAME_dequantized,
   the parameters NAME_scale and NAME_zero_point;
2. a stored tensor: its integers are NAME_quantized and its real values NAME;
3. inputs and outputs of the model keep their names; a quantized input is known by the input's name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import onnx_ir as ir

from fxqat.scheme import QuantizedTensor
from fxqat.utils.unused_names import unused_name


def name_tensors(model: ir.Model, tensors: Mapping[str, QuantizedTensor]) -> dict[str, QuantizedTensor]:
    """Rename in place.

    Args:
        model: the exported model, in which initializers are named ``<path>.<buffer>``.
        tensors: what the tensor at each path is.

    Returns:
        The tensors by the same paths, with the names they really have in the file.
    """
    graph = model.graph
    fixed = {value.name for value in (*graph.inputs, *graph.outputs)}
    taken = {value.name for node in graph for value in node.outputs if value.name} | fixed
    _clear_the_way(graph, {tensor.name for tensor in tensors.values()}, fixed, taken)
    named: dict[str, QuantizedTensor] = {}
    for node in graph:
        path = _path_of(node, tensors)
        if path is None:
            continue
        record = tensors[path]
        if node.op_type == "QuantizeLinear":
            source = node.inputs[0]
            assert source is not None
            _rename(source, record.name, fixed, taken)
            _rename(node.outputs[0], f"{record.name}_quantized", fixed, taken)
            named[path] = replace(record, name=str(source.name))
        else:
            stored = node.inputs[0] is not None and node.inputs[0].is_initializer()
            if stored and path in named:
                continue
            _rename(node.outputs[0], record.name if stored else f"{record.name}_dequantized", fixed, taken)
            if stored:
                named[path] = replace(record, name=str(node.outputs[0].name))
    _name_parameters(graph, named)
    return named


def name_outputs(model: ir.Model, names: Sequence[str]) -> None:
    """Name the outputs in place; nothing happens if there are not as many of them as names."""
    outputs = model.graph.outputs
    if len(outputs) == len(names) and not any(value.is_graph_input() for value in outputs):
        for value, name in zip(outputs, names, strict=True):
            value.name = name


def _path_of(node: ir.Node, tensors: Mapping[str, QuantizedTensor]) -> str | None:
    if node.op_type not in ("QuantizeLinear", "DequantizeLinear") or node.inputs[1] is None:
        return None
    path = str(node.inputs[1].name).removesuffix(".scale").removesuffix(".pair")
    return path if path in tensors else None


def _clear_the_way(graph: ir.Graph, names: set[str], fixed: set[str | None], taken: set[str | None]) -> None:
    """Rename the exporter's own values that hold a name which one of ours is to have."""
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

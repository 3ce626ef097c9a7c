"""Cut a quantized file into units: between quantized tensors, and around one of them.

An engine gets the right values at chosen quantized tensors. The readers of such a tensor read an input of the file, on
the grid of its integers, through its own Q and DQ nodes, so that the engine sees the same Q/DQ pairs as in the whole
file; what the tensor's producer computes is quantized by a copy of the Q node and becomes an output.

1. With all quantized tensors chosen, each unit is what lies between them.
2. An engine also drops Q/DQ pairs, and moves them past other operators. This shows only around a pair whose integers
   nobody looks at. So in some more runs part of the tensors is not chosen. Each pair of a tensor and a reader of it is
   in one of them, with the first left inside and the second chosen; for a chain these are two runs. In one more run
   only the ends of blocks are chosen: tensors that nothing is computed across, as behind a residual Add. Engines
   compute such an Add in the memory of the shortcut, and only if they know that everything else has read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import numpy_helper

from fxqat.onnx.ort_runs import COMPUTED, FOUND, GIVEN, INT32, with_integers_in
from fxqat.onnx.selections import indices_of

IN_NUMPY = tuple(getattr(onnx.TensorProto, name) for name in ("INT8", "UINT8", "INT16", "UINT16"))
"""Types of integers that an output may have; others are cast, because numpy has no types of 4 and 2 bits."""

CLIPPED, CAST = ":clipped", ":cast"
"""Endings of copies of what follows a Q node."""

NO_OPERATORS = ("QuantizeLinear", "DequantizeLinear", "Constant")
"""Nodes that compute nothing of the model."""


@dataclass(frozen=True)
class QuantizedFile:
    """A quantized ONNX file with what cutting it needs.

    Args:
        model: the file.
        quantizers: the Q node of every quantized activation, by the name of its result.
        clips: by the same names, the Clip that follows on its integers (``fxqat.onnx.integer_clamps``).
        sources: by the name of a Q node's result or of an output of the file: the results of the Q nodes that it is
            computed from, with no other Q node between.
        operators: by the same names: the nodes between.
    """

    model: onnx.ModelProto
    quantizers: dict[str, onnx.NodeProto]
    clips: dict[str, onnx.NodeProto]
    sources: dict[str, tuple[str, ...]]
    operators: dict[str, tuple[onnx.NodeProto, ...]]

    @property
    def indices(self) -> tuple[str, ...]:
        """The names of all selected indices, see :mod:`fxqat.onnx.selections`."""
        return tuple(name for node in self.model.graph.node if (name := indices_of(node)))


def read_units(model: onnx.ModelProto) -> QuantizedFile:
    """Find the quantized activations of a file and what lies between them."""
    constants = {tensor.name for tensor in model.graph.initializer}
    quantizers = {
        str(node.output[0]): node
        for node in model.graph.node
        if node.op_type == "QuantizeLinear" and node.input[0] not in constants and set(node.input[1:]) <= constants
    }
    clips = {
        str(node.input[0]): node for node in model.graph.node if node.op_type == "Clip" and node.input[0] in quantizers
    }
    reached: dict[str, tuple[dict[str, None], dict[str, onnx.NodeProto]]] = {}
    sources, operators = {}, {}
    for node in model.graph.node:
        before: dict[str, None] = {}
        between: dict[str, onnx.NodeProto] = {}
        for name in node.input:
            names, nodes = reached.get(name, ({}, {}))
            before |= names
            between |= nodes
        result = str(node.output[0])
        if result in quantizers:
            sources[result], operators[result] = tuple(before), tuple(between.values())
            reached[result] = ({result: None}, {})
        else:
            if node.op_type not in NO_OPERATORS and node.input[0] not in clips:
                between[result] = node
            reached |= dict.fromkeys(node.output, (before, between))
    for value in model.graph.output:
        names, nodes = reached.get(value.name, ({}, {}))
        sources[value.name], operators[value.name] = tuple(names), tuple(nodes.values())
    return QuantizedFile(model, quantizers, clips, sources, operators)


def runs_together(file: QuantizedFile) -> list[tuple[frozenset[str], frozenset[str]]]:
    """Runs with part of the tensors left inside: these, and the tensors and outputs to look at.

    First the blocks, in one run; then the pairs, in as few runs as a greedy choice finds.
    """
    rest = [(source, reader) for reader, found in file.sources.items() for source in found if source != reader]
    runs = [_blocks(file, rest)]
    while rest:
        inside: set[str] = set()
        readers: set[str] = set()
        left = []
        for source, reader in rest:
            if source in readers or reader in inside:
                left.append((source, reader))
            else:
                inside.add(source)
                readers.add(reader)
        runs.append((frozenset(inside), frozenset(readers)))
        rest = left
    return [found for found in dict.fromkeys(runs) if found[0]]


def _blocks(file: QuantizedFile, edges: Sequence[tuple[str, str]]) -> tuple[frozenset[str], frozenset[str]]:
    """What is inside of blocks, and their ends: the tensors that no pair of others reaches across."""
    places = {name: place for place, name in enumerate(file.sources)}  # sources come before their readers
    open_until = -1
    ends, last_reader = set(), {source: places[reader] for source, reader in sorted(edges, key=lambda e: places[e[1]])}
    for name, place in places.items():
        if open_until <= place:
            ends.add(name)
        open_until = max(open_until, last_reader.get(name, place))
    return frozenset(file.quantizers.keys() - ends), frozenset(ends)


def cut(
    file: QuantizedFile, values: Mapping[str, np.ndarray], selections: Mapping[str, np.ndarray]
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A copy that reads chosen tensors from inputs, and outputs the integers that it computes for them.

    Args:
        file: the file.
        values: the values of the chosen tensors, see :func:`given_values`.
        selections: indices that the readers of selecting nodes get, by name.

    Returns:
        The copy, and what its new inputs get. The integers are in the outputs :func:`computed_name`.
    """
    result, feeds = with_integers_in(file.model, [], {}, selections)
    nodes = list(result.graph.node)
    del result.graph.node[:]
    types = {tensor.name: tensor.data_type for tensor in file.model.graph.initializer}
    readers, others, copies = [], [], []
    for node in nodes:
        name = node.output[0]
        if name + GIVEN not in values:
            others.append(node)
            continue
        copies.append(_copy(node, [*node.input], name + FOUND))
        if name in file.clips:
            clip = file.clips[name]
            copies.append(_copy(clip, [name + FOUND, *clip.input[1:]], name + CLIPPED))
        kind = types[node.input[2]]
        if kind not in IN_NUMPY:
            copies.append(_copy(onnx.NodeProto(op_type="Cast"), [copies[-1].output[0]], name + CAST))
            copies[-1].attribute.append(onnx.helper.make_attribute("to", INT32))
            kind = INT32
        copies[-1].output[0] = computed_name(name)
        result.graph.output.append(onnx.helper.make_tensor_value_info(computed_name(name), kind, None))
        node.input[0] = name + GIVEN
        readers.append(node)
        shape = values[name + GIVEN].shape
        result.graph.input.append(onnx.helper.make_tensor_value_info(name + GIVEN, onnx.TensorProto.FLOAT, shape))
    result.graph.node.extend([*readers, *others, *copies])
    return result, {**feeds, **values}


def _copy(node: onnx.NodeProto, inputs: Sequence[str], result: str) -> onnx.NodeProto:
    """A node with the same operator that reads and computes other tensors."""
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.name = result
    copy.input[:], copy.output[:] = inputs, [result]
    return copy


def computed_name(tensor: str) -> str:
    """The output that has the integers computed for a chosen tensor."""
    return tensor + COMPUTED


def given_values(file: QuantizedFile, integers: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The values of tensors as inputs of a cut file: on the grid, ``(integer - zero_point) * scale``.

    Args:
        file: the file.
        integers: the integers by the names of the Q nodes' results.
    """
    constants = {tensor.name: tensor for tensor in file.model.graph.initializer}
    found = {}
    for name, array in integers.items():
        node = file.quantizers[name]
        scale, zero = (numpy_helper.to_array(constants[place]).astype(np.float64) for place in node.input[1:3])
        if scale.ndim:
            axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 1)
            shape = [-1 if dim == axis % array.ndim else 1 for dim in range(array.ndim)]
            scale, zero = scale.reshape(shape), zero.reshape(shape)
        found[name + GIVEN] = ((array - zero) * scale).astype(np.float32)
    return found

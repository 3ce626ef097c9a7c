"""Indices that a sort or a maximum selects: which of two equal values comes first is not defined.

Step by step, the readers of TopK (also of a sort), ArgMax and ArgMin get the indices of the fake-quant model, as the
readers of a quantized tensor get its integers. The indices themselves are judged by the values that they select: an
index may differ if both values are equal, up to ``TIE_VALUES`` of the largest value, or of what is added up to the
value: a distance that is computed as ``x * x - 2 * x * y + y * y`` is much smaller than what rounds there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

TIE_VALUES = 1e-5
INDICES = {"TopK": 1, "ArgMax": 0, "ArgMin": 0}
"""Which output of each operator has the indices."""

SUMS = ("Add", "Sub")
MOVES = ("Neg", "Identity", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Expand")
"""Operators that change nothing in the sizes of values."""

DATA = ":data"
"""Ending of a copy of the tensor that is selected from."""

SIZE = ":size"
"""Ending of a tensor's values, their addends taken by their absolute values."""


@dataclass(frozen=True)
class SelectionParity:
    """The indices of one sort or maximum, step by step.

    Args:
        name: name of the indices in the file.
        size: number of indices.
        ties: how many differ, but select an equal value.
        wrong: how many select another value.
    """

    name: str
    size: int
    ties: int
    wrong: int

    @property
    def passed(self) -> bool:
        """Whether every index selects the value that it should."""
        return self.wrong == 0


def indices_of(node: onnx.NodeProto) -> str:
    """The name of the indices that a node selects, empty if it selects none or no one reads them."""
    place = INDICES.get(node.op_type, len(node.output))
    return str(node.output[place]) if place < len(node.output) else ""


def match_selections(model: onnx.ModelProto, given: Mapping[str, Sequence[np.ndarray]]) -> dict[str, np.ndarray]:
    """The indices of the fake-quant model, by their names in the file.

    An operator of which the file has more or fewer nodes than the model made calls is left out: its indices are then
    compared like any integers.

    Args:
        model: the exported model.
        given: indices in the order of the calls, by the operator's type.
    """
    found: dict[str, np.ndarray] = {}
    for kind, arrays in given.items():
        nodes = [node for node in model.graph.node if node.op_type == kind]
        if len(nodes) == len(arrays):
            pairs = zip(nodes, arrays, strict=True)
            found |= {name: array for node, array in pairs if (name := indices_of(node))}
    return found


def add_sizes(model: onnx.ModelProto, names: Iterable[str]) -> None:
    """Add outputs to a model: tensors that are sums, each addend taken by its absolute value, as ``:size``.

    Args:
        model: the model; changed.
        names: of tensors; those that are no sums get no output.
    """
    makers = {output: node for node in model.graph.node for output in node.output}
    made = set[str]()

    def size_of(name: str) -> str:
        maker, size = makers.get(name), name + SIZE
        if size in made:
            return size
        made.add(size)
        if maker is None or maker.op_type not in (*SUMS, *MOVES):
            node = onnx.helper.make_node("Abs", [name], [size])
        elif maker.op_type in SUMS:
            node = onnx.helper.make_node("Add", [size_of(source) for source in maker.input], [size])
        else:
            node = onnx.NodeProto()
            node.CopyFrom(maker)
            node.name, node.op_type = "", "Identity" if maker.op_type == "Neg" else maker.op_type
            node.input[0], node.output[0] = size_of(maker.input[0]), size
        model.graph.node.append(node)
        return size

    for name in names:
        maker = makers.get(name)
        if maker is not None and maker.op_type in (*SUMS, *MOVES) and name + SIZE not in made:
            model.graph.output.append(onnx.ValueInfoProto(name=size_of(name)))


def compare_selection(
    node: onnx.NodeProto,
    data: np.ndarray,
    found: np.ndarray,
    expected: np.ndarray,
    sizes: np.ndarray | None = None,
) -> SelectionParity:
    """Compare the indices of a node by the values that they select.

    Args:
        node: the node.
        data: what it selects from.
        found: the indices of the file.
        expected: the indices of the fake-quant model.
        sizes: of each value the sum of its addends' absolute values, see :func:`add_sizes`; None for its own.
    """
    name, differs = indices_of(node), found != expected
    attributes = {attribute.name: attribute.i for attribute in node.attribute}
    axis = attributes.get("axis", -1 if node.op_type == "TopK" else 0)
    if node.op_type != "TopK" and not attributes.get("keepdims", 1):
        found, expected = (np.expand_dims(indices, axis) for indices in (found, expected))
    if not differs.any():
        return SelectionParity(name, expected.size, 0, 0)
    a, b = (np.take_along_axis(data, indices, axis).astype(np.float64) for indices in (found, expected))
    limit = np.abs(data[np.isfinite(data)]).max(initial=0.0)
    if sizes is not None:
        limit = np.maximum(limit, np.take_along_axis(sizes, expected, axis))
    with np.errstate(invalid="ignore"):  # equal infinities
        same = (a == b) | (np.abs(a - b) <= TIE_VALUES * limit) | (np.isnan(a) & np.isnan(b))
    wrong = int((~same).sum())
    return SelectionParity(name, expected.size, int(differs.sum()) - wrong, wrong)

"""Move the clamps before a QuantizeLinear of 8 bits behind it, where they clamp integers.

A clamp is a Relu, a Clip, or a Max or Min with a constant. ONNX Runtime makes an integer operator of
Conv -> QuantizeLinear, but of Conv -> Relu -> QuantizeLinear only if the zero point is the smallest integer.

1. The clamps between an operator and a QuantizeLinear are removed;
2. a Clip of the integers follows the QuantizeLinear, unless the range of the type clamps as much;
3. the names stay: what is quantized is now the result of the operator, and the integers are those after Clip.

No integer changes. QuantizeLinear is ``q(x) = min(max(round(x / scale) + z, a), b)``. Each of its steps keeps the order
of float32 values, so q does: ``q(max(x, l)) = max(q(x), q(l))``, and the same for min. A clamp to l and h therefore
becomes one to q(l) and q(h), and several of them, in their order, become one Clip.

A clamp stays where it is if

4. a value between it and the QuantizeLinear has another reader or is an output of the model;
5. it reads no result of an operator, but an input of the model, a constant or a DequantizeLinear: ONNX Runtime's
   optimizer would merge that with the QuantizeLinear, and round only once;
6. a bound, or a parameter of the QuantizeLinear, is no constant of one value.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from fxqat.onnx.narrow_types import input_of
from fxqat.onnx.remove_unread import remove_unread
from fxqat.utils.unused_names import unused_name

TYPES = (np.int8, np.uint8)
"""The integer types that both QuantizeLinear and ONNX Runtime's Clip have."""


class ClampIntegers(ir.passes.InPlacePass):
    """Move clamps of reals behind QuantizeLinear."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Move the clamps in place."""
        moved = [_move(model.graph, node) for node in list(model.graph) if node.op_type == "QuantizeLinear"]
        return ir.passes.PassResult(model, modified=any(moved))


def _move(graph: ir.Graph, quantizer: ir.Node) -> bool:
    """Move the clamps before one QuantizeLinear; whether there are any."""
    scale, zero_point = (_number(input_of(quantizer, place)) for place in (1, 2))
    if scale is None or zero_point is None or zero_point.dtype.type not in TYPES:  # case 6
        return False
    clamps, value = _clamps_before(quantizer)
    if not clamps:
        return False
    limits = np.iinfo(zero_point.dtype)
    ends = np.array([limits.min, limits.max], np.float32)
    for _, bounds in clamps:
        low, high = np.clip(np.rint(bounds / scale) + zero_point.astype(np.float32), limits.min, limits.max)
        ends = np.minimum(np.maximum(ends, low), high)
    name = input_of(quantizer, 0).name
    quantizer.replace_input_with(0, value)  # case 1
    remove_unread(graph, [node for node, _ in reversed(clamps)])
    value.name = name  # case 3
    if tuple(ends) != (limits.min, limits.max):
        clip_integers(graph, quantizer, ends.astype(zero_point.dtype))  # case 2
    return True


def _clamps_before(quantizer: ir.Node) -> tuple[list[tuple[ir.Node, np.ndarray]], ir.Value]:
    """The clamps before a QuantizeLinear with their bounds, the first one first, and what that one reads."""
    clamps: list[tuple[ir.Node, np.ndarray]] = []
    value = input_of(quantizer, 0)
    while len(value.uses()) == 1 and not value.is_graph_output():  # case 4
        node = value.producer()
        found = None if node is None else _bounds(node)
        if node is None or found is None:
            break
        value, bounds = found
        clamps.insert(0, (node, bounds))
    source = value.producer()
    is_operator = source is not None and source.op_type != "DequantizeLinear"  # case 5
    is_free = len(value.uses()) == 1 and not value.is_graph_output()
    return (clamps, value) if is_operator and is_free else ([], value)


def _bounds(node: ir.Node) -> tuple[ir.Value, np.ndarray] | None:
    """What a clamp reads, and its lower and upper bound; None if the node is no clamp to constants."""
    ends: list[ir.Value | float | None] = [None, None]
    value, *rest = node.inputs
    if node.op_type == "Relu":
        ends[0] = 0.0
    elif node.op_type == "Clip":
        ends[: len(rest)] = rest
    elif node.op_type in ("Max", "Min") and len(rest) == 1:
        value, bound = (rest[0], value) if value is not None and value.const_value is not None else (value, rest[0])
        ends[node.op_type == "Min"] = bound
    else:
        return None
    bounds = np.array([-np.inf, np.inf], np.float32)
    for place, end in enumerate(ends):
        number = _number(end) if isinstance(end, ir.Value) else end
        if (end is not None and number is None) or (number is not None and np.isnan(number)):
            return None
        bounds[place] = bounds[place] if number is None else number
    return None if value is None else (value, bounds)


def _number(value: ir.Value) -> np.ndarray | None:
    """The number that a value holds, None if it is no constant of one number."""
    if value.const_value is None or value.const_value.size != 1:
        return None
    return value.const_value.numpy().reshape(())


def clip_integers(graph: ir.Graph, quantizer: ir.Node, ends: np.ndarray) -> None:
    """Let a Clip follow a QuantizeLinear; its result has the name of the integers.

    Args:
        graph: the graph; changed in place.
        quantizer: the QuantizeLinear.
        ends: the smallest and the largest integer, ``(2,)``, in the type of the zero point.
    """
    made = (value for node in graph for value in node.outputs)
    taken = {value.name for value in (*graph.inputs, *graph.initializers.values(), *made)}
    integers = quantizer.outputs[0]
    bounds = []
    for end, which in zip(ends, ("smallest", "largest"), strict=True):
        name = unused_name(f"{integers.name}_{which}", taken)
        bounds.append(ir.Value(name=name, const_value=ir.tensor(end, name=name)))
        graph.register_initializer(bounds[-1])
    clip = ir.node("Clip", [integers, *bounds], name=f"{integers.name}_clip")
    clip.outputs[0].type, clip.outputs[0].shape = integers.type, integers.shape
    ir.convenience.replace_all_uses_with(integers, clip.outputs[0])
    clip.replace_input_with(0, integers)
    clip.outputs[0].name, integers.name = integers.name, unused_name(f"{integers.name}_unclamped", taken)
    graph.insert_after(quantizer, clip)

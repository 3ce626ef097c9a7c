"""Operators of ONNX that onnx2torch does not know, written with those that it knows.

1. ``auto_pad`` of a Conv or MaxPool with strides of 1 becomes ``pads``: ``(k - 1) d`` zeros in all, of which
   ``SAME_UPPER`` has the odd one at the end. A MaxPool with an odd one is padded on both sides, and the first or last
   value cut off: minus infinity, with which it would be padded on one, has no scale;
2. GlobalMaxPool becomes ReduceMax, if the rank of its input is known;
3. Shape of some axes becomes Shape of all, and Slice;
4. an output of the file that is one of several of a node, which the converter takes for all of them, is copied.

Source: Conv, MaxPool and GlobalMaxPool, opset 11 and 12; Shape, opset 15.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from fxqat.utils.unused_names import unused_name

SAME = ("SAME_UPPER", "SAME_LOWER")
"""Values of ``auto_pad`` that keep the size."""


class ForConverter(ir.passes.InPlacePass):
    """Write what the converter does not know with what it knows; where that is not possible, leave it."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite the model in place."""
        self.graph = model.graph
        self.taken = {value.name for node in model.graph for value in (*node.inputs, *node.outputs) if value}
        for node in list(model.graph):
            if node.op_type in REWRITES:
                REWRITES[node.op_type](self, node)
        for i, output in enumerate(list(model.graph.outputs)):
            producer = output.producer()
            if producer is not None and len(producer.outputs) > 1:  # case 4
                model.graph.outputs[i] = self.add("Identity", [output], output, after=producer)
        return ir.passes.PassResult(model, modified=True)

    def add(self, kind: str, inputs: list[ir.Value], like: ir.Value, after: ir.Node, **attributes: Any) -> ir.Value:
        """The output of a new node, of the type of another value."""
        made = ir.node(kind, inputs, attributes)
        found = made.outputs[0]
        found.name = unused_name(f"{like.name}_{kind.lower()}", self.taken)
        found.type, found.shape = like.type, like.shape
        self.taken.add(found.name)
        self.graph.insert_after(after, made)
        return found

    def constant(self, values: list[int], name: str) -> ir.Value:
        """An initializer of 64-bit integers."""
        name = unused_name(name, self.taken)
        value = ir.Value(name=name, const_value=ir.tensor(np.array(values, np.int64), name=name))
        self.taken.add(name)
        self.graph.register_initializer(value)
        return value

    def write_pads(self, node: ir.Node) -> None:
        """Case 1."""
        mode = node.attributes["auto_pad"].as_string() if "auto_pad" in node.attributes else ""
        kernel = _numbers(node, "kernel_shape") or _kernel_of_weight(node)
        if mode not in SAME or not kernel or set(_numbers(node, "strides")) - {1}:
            return
        dilations = _numbers(node, "dilations") or [1] * len(kernel)
        sums = [(k - 1) * d for k, d in zip(kernel, dilations, strict=True)]
        small, large = [s // 2 for s in sums], [s - s // 2 for s in sums]
        pads = small + large if mode == "SAME_UPPER" else large + small
        odd = [axis for axis, (a, b) in enumerate(zip(small, large, strict=True)) if a != b]
        if node.op_type == "MaxPool" and odd:
            pads = large + large
            starts, ends = ([1], [2**31 - 1]) if mode == "SAME_UPPER" else ([0], [-1])
            names = (f"{node.outputs[0].name}_{what}" for what in ("starts", "ends", "axes"))
            values = (starts * len(odd), ends * len(odd), [axis + 2 for axis in odd])
            where = [self.constant(value, name) for value, name in zip(values, names, strict=True)]
            output = node.outputs[0]
            cut = self.add("Slice", [output, *where], output, after=node)
            reader = cut.producer()
            ir.convenience.replace_all_uses_with(output, cut, replace_graph_outputs=True)
            assert reader is not None
            reader.replace_input_with(0, output)
            output.shape = None  # one more along these axes
        node.attributes["pads"] = ir.AttrInt64s("pads", pads)
        node.attributes.pop("auto_pad")

    def write_maximum(self, node: ir.Node) -> None:
        """Case 2."""
        value, output = node.inputs[0], node.outputs[0]
        if value is None or value.shape is None:
            return
        axes = ir.AttrInt64s("axes", list(range(2, len(value.shape))))
        found = self.add("ReduceMax", [value], output, after=node, axes=axes, keepdims=1)
        ir.convenience.replace_all_uses_with(output, found, replace_graph_outputs=True)
        self.graph.remove(node, safe=True)

    def write_shape(self, node: ir.Node) -> None:
        """Case 3."""
        if not {"start", "end"} & set(node.attributes):
            return
        output, last = node.outputs[0], 2**31 - 1
        start, end = (_number(node, name, other) for name, other in (("start", 0), ("end", last)))
        where = [self.constant([value], f"{output.name}_{what}") for value, what in ((start, "start"), (end, "end"))]
        for name in ("start", "end"):
            node.attributes.pop(name, None)
        cut = self.add("Slice", [output, *where], output, after=node)
        ir.convenience.replace_all_uses_with(output, cut, replace_graph_outputs=True)
        reader = cut.producer()
        assert reader is not None
        reader.replace_input_with(0, output)
        output.shape = None


REWRITES: dict[str, Callable[[ForConverter, ir.Node], None]] = {
    "Conv": ForConverter.write_pads,
    "MaxPool": ForConverter.write_pads,
    "GlobalMaxPool": ForConverter.write_maximum,
    "Shape": ForConverter.write_shape,
}


def _numbers(node: ir.Node, name: str) -> list[int]:
    """An attribute of integers; empty without it."""
    return list(node.attributes[name].as_ints()) if name in node.attributes else []


def _number(node: ir.Node, name: str, other: int) -> int:
    """An attribute that is an integer; ``other`` without it."""
    return node.attributes[name].as_int() if name in node.attributes else other


def _kernel_of_weight(node: ir.Node) -> list[int]:
    weight = node.inputs[1] if len(node.inputs) > 1 else None
    return [] if weight is None or weight.const_value is None else list(weight.const_value.shape.numpy())[2:]

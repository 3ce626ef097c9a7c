"""The sizes that a Reshape of an ONNX file computes from shapes, as Python numbers.

In a module of onnx2torch they are tensors: Shape, then Slice or Gather, Cast, arithmetic, Concat, Reshape.
``torch.export`` does not know the numbers in a tensor, so each becomes what a PyTorch program would have:
``x.reshape(y.size(0), -1)``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

Size = int | fx.Node
"""A number, or a node that gives it."""

ARITHMETIC: dict[Any, Callable[[Any, Any], Any]] = {
    torch.add: operator.add,
    torch.sub: operator.sub,
    torch.mul: operator.mul,
}
"""Functions of numbers for those of tensors; onnx2torch's division of integers is the other one."""

LEFT_AS_THEY_ARE = (
    "OnnxCast",
    "OnnxCopyIdentity",
    "OnnxSqueezeStaticAxes",
    "OnnxSqueezeDynamicAxes",
    "OnnxUnsqueezeStaticAxes",
    "OnnxUnsqueezeDynamicAxes",
)
"""Modules that do not change which numbers a tensor of one axis or none holds."""

LAST = 2**31 - 1
"""An end of a Slice that means the last axis, as exporters write it; larger ones do, too."""


def sizes_as_numbers(gm: fx.GraphModule) -> None:
    """Give each Reshape the numbers themselves, where all of them are known or are sizes of values."""
    sizes = _Sizes(gm)
    for node in list(gm.graph.nodes):
        with gm.graph.inserting_before(node):
            if sizes.kind(node) == "OnnxReshape":
                x, shape = node.args
                numbers = sizes.known.get(shape, [])
                if shape in sizes.shapes:
                    size = gm.graph.call_method("size", (sizes.shapes[shape],))
                    node.replace_all_uses_with(gm.graph.call_method("reshape", (x, size)))
                elif any(isinstance(number, fx.Node) for number in numbers):
                    kept = [sizes.of(x, axis) if number == 0 else number for axis, number in enumerate(numbers)]
                    node.replace_all_uses_with(gm.graph.call_method("reshape", (x, *kept)))
            else:
                sizes.follow(node)
    gm.graph.eliminate_dead_code()


class _Sizes:
    """The numbers that the nodes of a graph give; a tensor without an axis counts as one with one number."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm
        self.known: dict[Any, list[Size]] = {}
        self.shapes: dict[Any, Any] = {}
        """Nodes that give a shape, and the values whose shape it is."""

    def kind(self, node: fx.Node) -> str:
        """The name of the class of the module that a node calls; empty for others."""
        return type(self.gm.get_submodule(str(node.target))).__name__ if node.op == "call_module" else ""

    def of(self, x: Any, axis: int) -> Size:
        """The size of a value along an axis."""
        return self.gm.graph.call_method("size", (x, axis))

    def follow(self, node: fx.Node) -> None:
        """Record the numbers that a node gives, if they are known."""
        kind = self.kind(node)
        if node.op == "get_attr":
            value = self.gm.get_buffer(str(node.target))
            if value.dtype in (torch.int32, torch.int64) and value.dim() < 2:
                self.known[node] = value.flatten().tolist()
        elif kind == "OnnxShape":
            self.shapes[node] = node.args[0]
        elif kind in LEFT_AS_THEY_ARE and node.args[0] in self.shapes:
            self.shapes[node] = self.shapes[node.args[0]]
        elif kind in ("OnnxSlice", "OnnxGather"):
            source, *where = node.args
            if all(argument in self.known for argument in where):
                self._take(node, source, kind, [self.known[argument] for argument in where])
        elif kind and all(argument in self.known for argument in node.args):
            self._compute(node, kind, [self.known[argument] for argument in node.args])

    def _take(self, node: fx.Node, source: Any, kind: str, where: list[list[Any]]) -> None:
        """A Slice (its starts, ends, axes and steps) or a Gather (its indices) of numbers."""
        numbers = self.known.get(source)
        if kind == "OnnxGather":
            axes: Any = where[0]
        else:
            start, end, step = where[0][0], where[1][0], where[3][0] if len(where) > 3 else 1
            if numbers is not None:
                axes = range(len(numbers))[start:end:step]
            elif start >= 0 and 0 <= end < LAST and step > 0:
                axes = range(start, end, step)
            else:
                return  # the number of axes is not known
        if numbers is not None:
            self.known[node] = [numbers[axis] for axis in axes]
        elif source in self.shapes:
            self.known[node] = [self.of(self.shapes[source], axis) for axis in axes]

    def _compute(self, node: fx.Node, kind: str, values: list[list[Size]]) -> None:
        """A Concat of numbers, arithmetic on two, or what leaves them as they are."""
        if kind in LEFT_AS_THEY_ARE:
            self.known[node] = values[0]
        elif kind == "OnnxConcat":
            self.known[node] = [number for value in values for number in value]
        elif kind == "OnnxBinaryMathOperation" and all(len(value) == 1 for value in values):
            module: Any = self.gm.get_submodule(str(node.target))
            compute = ARITHMETIC.get(module.math_op_function, operator.floordiv)
            (a,), (b,) = values
            is_computed = isinstance(a, fx.Node) or isinstance(b, fx.Node)
            self.known[node] = [self.gm.graph.call_function(compute, (a, b)) if is_computed else compute(a, b)]

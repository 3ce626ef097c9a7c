"""Simplify: fold constants and remove what no one reads.

1. shape arithmetic on constants is folded. Two forms of torch's exporter that ONNX does not allow are mended: a Squeeze
   leaves out the axes that are not 1, as torch does for ``x.squeeze(dim)``; int32 indices of GatherND and ScatterND
   become int64;
2. a Where that always takes its first value, as for a constant attention mask that leaves each query a key, is an
   identity; identities, unread nodes and unread initializers are removed. An identity by which a branch of an If or the
   body of a Loop returns a value from outside is kept, because each graph must compute what it returns;
3. the exporter's notes are removed: they name paths of the exporting machine, and are often longer than the graph.

Initializers are not merged: two tensors of equal scale keep a scale each, under their own names.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript import optimizer


class Simplify(ir.passes.InPlacePass):
    """Fold constants; remove identities, unread nodes and initializers, and notes."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Simplify the model in place."""
        for node in model.graph:
            if node.op_type == "Squeeze":
                _squeeze_ones(model.graph, node)  # case 1
            elif node.op_type in ("GatherND", "ScatterND"):
                _index_by_int64(model.graph, node)  # case 1
        with _without_warnings():
            optimizer.fold_constants(model)  # case 1
        for node in model.graph:
            if node.op_type == "Where":
                _without_choice(node)  # case 2
        kept = [node for node in model.graph.all_nodes() if _returns_from_outside(node)]
        for node in kept:
            node.domain = "kept"  # hidden from the next pass, which would leave the branch without a value to return
        common.IdentityEliminationPass()(model)  # case 2
        for node in kept:
            node.domain = ""
        common.RemoveUnusedNodesPass()(model)
        common.ClearMetadataAndDocStringPass()(model)  # case 3; it leaves those of the model and of values
        model.metadata_props.clear()
        made = (value for node in model.graph.all_nodes() for value in node.outputs)
        for value in (*model.graph.inputs, *model.graph.initializers.values(), *made):
            value.metadata_props.clear()
        return ir.passes.PassResult(model, modified=True)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Keep onnxscript from warning of a node that it leaves as it is, since onnx's own evaluator cannot compute it."""
    logger = logging.getLogger("onnxscript")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _returns_from_outside(node: ir.Node) -> bool:
    """Whether a node is the identity by which a graph inside a node returns a value of a graph around it."""
    if node.op_type != "Identity" or node.inputs[0] is None:
        return False
    return node.outputs[0].is_graph_output() and node.inputs[0].graph is not node.graph


def _squeeze_ones(graph: ir.Graph, node: ir.Node) -> None:
    if len(node.inputs) < 2 or node.inputs[0] is None or node.inputs[1] is None:
        return
    shape, axes = node.inputs[0].shape, ir.convenience.get_const_tensor(node.inputs[1])
    if axes is None or shape is None:
        return
    given = axes.numpy().reshape(-1).tolist()
    ones = [axis for axis in given if shape[axis] == 1]  # an open size is not 1 for torch.export
    if len(ones) == len(given):
        return
    if ones:
        found = ir.Value(name=f"{node.outputs[0].name}_axes", const_value=ir.tensor(ones, dtype=ir.DataType.INT64))
        graph.register_initializer(found)
        node.replace_input_with(1, found)
    else:
        node.resize_inputs(1)
        node.op_type = "Identity"


def _without_choice(node: ir.Node) -> None:
    condition, first, second = node.inputs
    assert condition is not None
    assert first is not None
    assert second is not None
    known = ir.convenience.get_const_tensor(condition)
    if known is not None and known.numpy().all() and _fits(condition, first) and _fits(second, first):
        node.replace_input_with(0, first)
        node.resize_inputs(1)
        node.op_type = "Identity"


def _fits(value: ir.Value, other: ir.Value) -> bool:
    """Whether a value broadcasts to the shape of another one, which is known."""
    held = ir.convenience.get_const_tensor(value)
    shape = value.shape if held is None else held.shape
    if shape is None or other.shape is None or len(shape) > len(other.shape):
        return False
    sizes = other.shape[len(other.shape) - len(shape) :]
    return all(size in (1, expected) for size, expected in zip(shape, sizes, strict=True))


def _index_by_int64(graph: ir.Graph, node: ir.Node) -> None:
    indices = source = node.inputs[1]
    while source is not None and source.dtype is None and (maker := source.producer()) is not None:
        source = next(iter(maker.inputs), None)  # of a node that moves or joins: the exporter notes no type there
    if source is not None and source.dtype == ir.DataType.INT32:
        cast = ir.node("Cast", [indices], {"to": ir.DataType.INT64})
        graph.insert_before(node, cast)
        node.replace_input_with(1, cast.outputs[0])

"""Simplify: fold constants and remove what no one reads.

1. shape arithmetic on constants is folded; a Squeeze leaves out the axes that are not 1, which torch's exporter writes
   for ``x.squeeze(dim)`` although torch leaves such a dimension as it is and ONNX does not allow it;
2. identities, unread nodes and unread initializers are removed. An identity by which a branch of an If or the body of a
   Loop returns a value from outside is kept, because each graph must compute what it returns;
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
        with _without_warnings():
            optimizer.fold_constants(model)  # case 1
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

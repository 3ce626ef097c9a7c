"""Simplify: what the exporter leaves of shape arithmetic is folded, what nothing reads is removed.

So are the exporter's notes on how it came to each node: they tell paths of the machine that exported and names of no
meaning outside, and are often longer than the graph.

Initializers are not merged: two tensors of equal scale keep a scale of their own name.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript import optimizer


def simplify(model: ir.Model) -> ir.Model:
    """Fold constants, drop identities, unread nodes and initializers, and notes, in place."""
    optimizer.fold_constants(model)
    for simplification in (
        common.IdentityEliminationPass(),
        common.RemoveUnusedNodesPass(),
        common.ClearMetadataAndDocStringPass(),
    ):
        simplification(model)
    model.metadata_props.clear()
    made = (value for node in model.graph.all_nodes() for value in node.outputs)
    for value in (*model.graph.inputs, *model.graph.initializers.values(), *made):
        value.metadata_props.clear()
    return model

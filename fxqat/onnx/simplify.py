"""Simplify: fold constants and remove what no one reads.

1. shape arithmetic on constants is folded;
2. identities, unread nodes and unread initializers are removed;
3. the exporter's notes are removed: they name paths of the exporting machine, and are often longer than the graph.

Initializers are not merged: two tensors of equal scale keep a scale each, under their own names.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript import optimizer


class Simplify(ir.passes.InPlacePass):
    """Fold constants; remove identities, unread nodes and initializers, and notes."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Simplify the model in place."""
        optimizer.fold_constants(model)  # case 1
        common.IdentityEliminationPass()(model)  # case 2
        common.RemoveUnusedNodesPass()(model)
        common.ClearMetadataAndDocStringPass()(model)  # case 3; it leaves those of the model and of values
        model.metadata_props.clear()
        made = (value for node in model.graph.all_nodes() for value in node.outputs)
        for value in (*model.graph.inputs, *model.graph.initializers.values(), *made):
            value.metadata_props.clear()
        return ir.passes.PassResult(model, modified=True)

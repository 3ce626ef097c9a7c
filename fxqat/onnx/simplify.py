"""Simplify: what the exporter leaves of shape arithmetic is folded, what nothing reads is removed.

Initializers are not merged: two tensors of equal scale keep a scale of their own name.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript import optimizer


def simplify(model: ir.Model) -> ir.Model:
    """Fold constants, drop identities and unread nodes and initializers, in place."""
    optimizer.fold_constants(model)
    for simplification in (common.IdentityEliminationPass(), common.RemoveUnusedNodesPass()):
        simplification(model)
    return model

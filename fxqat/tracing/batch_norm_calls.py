"""BatchNorms whose own forward was traced become plain BatchNorm modules again.

A subclass of BatchNorm with an activation in it (``BatchNormAct2d`` of timm) is traced into a call of
``F.batch_norm``, as it computes in eval mode. As a module it is folded into the layer before it, and follows
``train()`` and ``eval()``.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import fx, nn
from torch.nn import functional as F

from fxqat.utils.fx_graph import unique_name
from fxqat.utils.torch_compat import BatchNorm

PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
TENSORS = ("running_mean", "running_var", "weight", "bias")


def batch_norms_to_modules(root: nn.Module, gm: fx.GraphModule) -> None:
    """Replace the calls, in place; the modules hold the very tensors.

    Args:
        root: the traced model, whose modules still have their types.
        gm: its graph module.
    """
    replaced = False
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or node.target is not F.batch_norm:
            continue
        call = inspect.signature(F.batch_norm).bind(*node.args, **node.kwargs)
        call.apply_defaults()
        bound: dict[str, Any] = call.arguments
        found = _owner(root, bound)
        if found is None or bound["training"] is True:
            continue
        path, owner = found
        name = unique_name(gm.get_submodule(path), "batch_norm")
        target = f"{path}.{name}" if path else name
        gm.add_submodule(target, _plain(owner, bound))
        with gm.graph.inserting_before(node):
            new = gm.graph.call_module(target, (bound["input"],))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)
        replaced = True
    if replaced:
        gm.recompile()


def _owner(root: nn.Module, bound: dict[str, Any]) -> tuple[str, BatchNorm] | None:
    """The BatchNorm, and its path, all of whose tensors a call reads."""
    read = bound["running_mean"]
    if not isinstance(read, fx.Node) or read.op != "get_attr":
        return None
    path = str(read.target).rpartition(".")[0]
    owner = root.get_submodule(path)
    if not isinstance(owner, PLAIN):
        return None
    for name in TENSORS:
        expected = f"{path}.{name}" if path else name
        given = bound[name].target if isinstance(bound[name], fx.Node) else None
        if given != (expected if getattr(owner, name) is not None else None):
            return None
    return path, owner


def _plain(owner: BatchNorm, bound: dict[str, Any]) -> BatchNorm:
    kind = next(kind for kind in PLAIN if isinstance(owner, kind))
    plain: BatchNorm = kind(owner.num_features, bound["eps"], owner.momentum, device="meta")
    for name in (*TENSORS, "num_batches_tracked"):
        setattr(plain, name, getattr(owner, name))
    return plain.train(owner.training)

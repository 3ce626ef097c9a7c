"""Calls of ``F.batch_norm`` in a subclass of BatchNorm become plain BatchNorm modules.

A subclass of BatchNorm that includes an activation (``BatchNormAct2d`` of timm) is traced into, which gives a call of
``F.batch_norm`` in eval mode. A BatchNorm module can be folded into the layer before it, and follows ``train()`` and
``eval()``.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any

from torch import fx, nn
from torch.nn import functional as F

from fxqat.utils.fx_graph import unique_name
from fxqat.utils.torch_compat import BatchNorm
from fxqat.utils.train_eval_graph import follows_mode

PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
TENSORS = ("running_mean", "running_var", "weight", "bias")


def batch_norms_to_modules(root: nn.Module, gm: fx.GraphModule, branching: Collection[str] | None = None) -> None:
    """Replace the calls in the graph module, in place. The new modules hold the same tensors.

    Args:
        root: the traced model, whose modules still have their types.
        gm: the graph module of that model.
        branching: the paths of the BatchNorms whose forward branches on ``self.training``; None if that is not known.
    """
    replaced = False
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or node.target is not F.batch_norm:
            continue
        call = inspect.signature(F.batch_norm).bind(*node.args, **node.kwargs)
        call.apply_defaults()
        bound: dict[str, Any] = call.arguments
        owner_and_path = _owner(root, bound)
        training = bound["training"]
        if owner_and_path is None:
            continue
        owner, path = owner_and_path
        may_follow = branching is None or path in branching
        if not (follows_mode(training) or (training is False and may_follow)):
            continue  # the batch's statistics in both modes, or frozen ones
        name = unique_name(gm.get_submodule(path), "batch_norm")
        target = f"{path}.{name}" if path else name
        gm.add_submodule(target, _plain(owner, bound))
        with gm.graph.inserting_before(node):
            new = gm.graph.call_module(target, (bound["input"],))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)
        if isinstance(training, fx.Node) and not training.users:
            gm.graph.erase_node(training)
        replaced = True
    if replaced:
        gm.recompile()


def _owner(root: nn.Module, bound: dict[str, Any]) -> tuple[BatchNorm, str] | None:
    """The BatchNorm whose tensors the call reads (all of them), and its path."""
    mean = bound["running_mean"]
    if not isinstance(mean, fx.Node) or mean.op != "get_attr":
        return None
    path = str(mean.target).rpartition(".")[0]
    owner = root.get_submodule(path)
    if not isinstance(owner, PLAIN):
        return None
    for name in TENSORS:
        expected = f"{path}.{name}" if path else name
        given = bound[name].target if isinstance(bound[name], fx.Node) else None
        if given != (expected if getattr(owner, name) is not None else None):
            return None
    return owner, path


def _plain(owner: BatchNorm, bound: dict[str, Any]) -> BatchNorm:
    """A plain BatchNorm with the tensors and the mode of ``owner`` and the epsilon of the call."""
    kind = next(kind for kind in PLAIN if isinstance(owner, kind))
    plain: BatchNorm = kind(owner.num_features, bound["eps"], owner.momentum, device="meta")
    for name in (*TENSORS, "num_batches_tracked"):
        setattr(plain, name, getattr(owner, name))
    return plain.train(owner.training)

"""Trace: the user's model becomes a graph.

The model is copied first; shared modules and tied weights stay shared in the copy. What ``torch.fx`` cannot trace
raises :class:`~fxqat.errors.TraceError` with the module, the source line and the remedy.
"""

from __future__ import annotations

import copy
import inspect
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torchvision.ops import StochasticDepth

from fxqat.errors import ConfigError, TraceError

MODE_DEPENDENT_LEAVES: tuple[type[nn.Module], ...] = (StochasticDepth,)
"""Modules that compute differently in training: kept whole, so that ``train()`` and ``eval()`` go on working."""


class LeafTracer(fx.Tracer):
    """The fx tracer, with more modules kept whole and source lines recorded.

    Args:
        leaf_modules: module types or dotted paths that are not traced into.
    """

    def __init__(self, leaf_modules: Sequence[type[nn.Module] | str] = ()) -> None:
        super().__init__()
        self.record_stack_traces = True
        self.leaf_types = (*MODE_DEPENDENT_LEAVES, *(leaf for leaf in leaf_modules if isinstance(leaf, type)))
        self.leaf_paths = frozenset(leaf for leaf in leaf_modules if isinstance(leaf, str))
        self.path_of_failure = ""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module becomes one node."""
        if isinstance(m, self.leaf_types) or module_qualified_name in self.leaf_paths:
            return True
        return super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Trace one module call, remembering the innermost one that fails."""
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            self.path_of_failure = self.path_of_failure or self.path_of_module(m)
            raise


def trace(
    model: nn.Module,
    custom_tracer: fx.Tracer | None = None,
    *,
    leaf_modules: Sequence[type[nn.Module] | str] = (),
    concrete_args: Mapping[str, Any] | None = None,
) -> tuple[nn.Module, fx.GraphModule]:
    """Copy a model and trace the copy in eval mode.

    Args:
        model: the user's model; not changed.
        custom_tracer: a tracer to use instead of :class:`LeafTracer`.
        leaf_modules: module types or paths to keep whole (not together with ``custom_tracer``).
        concrete_args: arguments of ``forward`` fixed to a value, as in ``torch.fx.symbolic_trace``.

    Returns:
        ``(copy, gm)``: the copy of the model, whose tensors the graph module shares, and the graph module in the
        model's own mode.

    Raises:
        ConfigError: a leaf path does not exist in the model, or leaves were given beside a custom tracer.
        TraceError: the model cannot be traced.
    """
    _check_leaves(model, custom_tracer, leaf_modules)
    _check_arguments(model, concrete_args or {})
    was_training = {name: module.training for name, module in model.named_modules()}
    try:
        root = copy.deepcopy(model)
    except Exception as cause:
        raise TraceError(f"cannot copy {type(model).__name__}: {cause}. Make the model deep-copyable.") from cause
    tracer = LeafTracer(leaf_modules) if custom_tracer is None else custom_tracer
    root.eval()
    try:
        graph = tracer.trace(root, dict(concrete_args) if concrete_args else None)
    except Exception as cause:
        raise TraceError(_explain(model, tracer, cause)) from cause
    for name, module in root.named_modules():
        module.training = was_training[name]
    gm = fx.GraphModule(root, graph, type(model).__name__)
    gm.training = model.training
    _restore_containers(root, gm)
    return root, gm


def _restore_containers(root: nn.Module, gm: nn.Module) -> None:
    """Containers that fx made anew get the mode of the module they stand for."""
    modes = dict(root.named_modules())
    for name, module in gm.named_modules():
        if name in modes:
            module.training = modes[name].training


def _check_leaves(
    model: nn.Module, custom_tracer: fx.Tracer | None, leaf_modules: Sequence[type[nn.Module] | str]
) -> None:
    if custom_tracer is not None and not isinstance(custom_tracer, fx.Tracer):
        raise ConfigError(f"custom_tracer must be a torch.fx.Tracer object, got {custom_tracer!r}")
    if custom_tracer is not None and leaf_modules:
        raise ConfigError("leaf_module and custom_tracer exclude each other: let the custom tracer name the leaves")
    paths = {name for name, _ in model.named_modules()}
    for leaf in leaf_modules:
        if isinstance(leaf, str) and leaf not in paths:
            raise ConfigError(f"leaf_module: the model has no module {leaf!r}")
        if not isinstance(leaf, (str, type)):
            raise ConfigError(f"leaf_module: expected a module type or a dotted path, got {leaf!r}")


def _check_arguments(model: nn.Module, concrete_args: Mapping[str, Any]) -> None:
    known = list(inspect.signature(model.forward).parameters)
    for name in concrete_args:
        if name not in known:
            raise ConfigError(f"concrete_args: forward has no argument {name!r}; it has {', '.join(map(repr, known))}")


def _explain(model: nn.Module, tracer: fx.Tracer, cause: Exception) -> str:
    """Say where tracing failed and what to do."""
    path = getattr(tracer, "path_of_failure", "") or "the model itself"
    inner = ("torch/fx/", "torch/nn/modules/module.py", "fxqat/quantization/trace.py")
    frames = [f for f in traceback.extract_tb(cause.__traceback__) if not any(part in f.filename for part in inner)]
    where = f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else "unknown source line"
    if isinstance(cause, torch.fx.proxy.TraceError):
        what = "its forward depends on the value of a tensor or on a size that is not known while tracing"
    else:
        what = f"{type(cause).__name__}: {cause}"
    return (
        f"cannot trace {type(model).__name__}: {what}\n  in module: {path}\n  at: {where}\n"
        "Remedy: keep that module whole and float with prepare_custom_config_dict={'leaf_module': [its type or path]}, "
        "fix the argument with 'concrete_args', or pass a custom_tracer."
    )

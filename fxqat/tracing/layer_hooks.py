"""Forward hooks of modules that become one node: what they compute for the model becomes part of the graph.

Such a hook gets proxies that it cannot tell from those of the layer, each behind a call of :func:`hook_value`. Where
the outputs depend on one of these calls, the hook is part of the model: it modifies what the layer reads or returns, or
collects features that forward returns. Then the graph holds what the hook computes, and the layer of the graph has no
hooks. Where none depends on them, the hook only observes. It stays on the layer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

from torch import fx, nn
from torch.fx.node import map_aggregate

from fxqat.ops.identify import works_in_place
from fxqat.utils.fx_graph import set_module
from fxqat.utils.torch_compat import (
    drop_forward_hooks,
    has_backward_hooks,
    has_hooks,
    run_forward_hooks,
    run_forward_pre_hooks,
    without_forward_hooks,
)
from fxqat.utils.weight_hooks import weight_hooks


def hook_value(value: Any, path: str) -> Any:  # noqa: ARG001  the path is read from the node
    """What a hook of the module at a path gets."""
    return value


def can_trace_hooks(module: nn.Module) -> bool:
    """Whether a module has forward hooks that may be part of the graph; those that compute weights may not."""
    return has_hooks(module) and not has_backward_hooks(module) and not weight_hooks(module)


class HookTrace:
    """One call of a layer and of its hooks.

    Args:
        tracer: makes the nodes.
        module: the layer.
        path: its path in the model.
    """

    def __init__(self, tracer: fx.Tracer, module: nn.Module, path: str) -> None:
        self.tracer, self.module, self.path = tracer, module, path
        self._behind: dict[fx.Node, Any] = {}

    def call(self, layer: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a call of the layer; ``layer`` makes its node.

        Raises:
            fx.proxy.TraceError: a hook sets an attribute of the layer before its forward.
        """
        before = dict(vars(self.module))
        args, kwargs = run_forward_pre_hooks(self.module, self._given(args), self._given(kwargs))
        if any(before.get(name) is not value for name, value in vars(self.module).items()):
            raise fx.proxy.TraceError("a hook sets an attribute of its layer, which forward reads")
        with without_forward_hooks(self.module):
            result = layer(*self._without(args), **self._without(kwargs))
        return self._without(run_forward_hooks(self.module, args, kwargs, self._given(result)))

    def _given(self, values: Any) -> Any:
        """Values for a hook: each proxy behind a call of :func:`hook_value`."""

        def wrap(value: Any) -> Any:
            if not isinstance(value, fx.Proxy):
                return value
            given = self.tracer.create_proxy("call_function", hook_value, (value, self.path), {})
            self._behind[given.node] = value
            return given

        return map_aggregate(values, wrap)

    def _without(self, values: Any) -> Any:
        """The same values without the calls that :meth:`_given` made."""
        return map_aggregate(values, lambda v: self._behind.get(v.node, v) if isinstance(v, fx.Proxy) else v)


def settle_hooks(gm: fx.GraphModule) -> list[str]:
    """Keep in a traced graph what hooks compute for the outputs, and take these hooks off their layers.

    Args:
        gm: the graph module; its graph gets rid of all calls of :func:`hook_value`.

    Returns:
        The paths of the layers that lost their hooks.
    """
    given = [node for node in gm.graph.nodes if node.target is hook_value]
    if not given:
        return []
    needed: set[fx.Node] = set()
    for node in reversed(gm.graph.nodes):
        if node.is_impure() or works_in_place(node) or not needed.isdisjoint(node.users):
            needed.add(node)
    paths = list(dict.fromkeys(str(node.args[1]) for node in given if node in needed))
    unread = {node for node in given if node not in needed}
    for node in gm.graph.nodes:  # what hooks that only observe computed
        if not unread.isdisjoint(node.all_input_nodes):
            unread.add(node)
    for node in reversed(list(gm.graph.nodes)):
        if node in unread:
            gm.graph.erase_node(node)
        elif node.target is hook_value:
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
    _remove_hooks(gm, paths)
    return paths


def _remove_hooks(gm: nn.Module, paths: Iterable[str]) -> None:
    """Replace the modules at some paths by copies without forward hooks, which share their tensors."""
    hooked = {id(gm.get_submodule(path)) for path in paths}
    copies: dict[int, nn.Module] = {}
    for path, module in list(gm.named_modules(remove_duplicate=False)):
        if id(module) in hooked:
            if id(module) not in copies:
                copies[id(module)] = copy.copy(module)
                drop_forward_hooks(copies[id(module)])
            set_module(gm, path, copies[id(module)])

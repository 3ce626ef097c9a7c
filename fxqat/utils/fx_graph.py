"""Small helpers for fx graphs."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.fx.proxy import GraphAppendingTracer

from fxqat.utils.node_meta import MODE
from fxqat.utils.torch_compat import OPERATORS
from fxqat.utils.unused_names import numbered


@dataclass(frozen=True)
class Reference:
    """A reference to a node by its name, in the arguments of a :class:`Call`."""

    name: str


@dataclass(frozen=True)
class Imported:
    """A reference to a function that pickle does not find by its qualified name.

    Such as ``F.max_pool2d``, or an operator ``torch.ops.aten.add.Tensor``.
    """

    module: str
    name: str


@dataclass(frozen=True)
class Call:
    """A node as plain values; nodes among its arguments are :class:`Reference` objects.

    ``mode`` is the value of ``MODE`` in its meta, None if it runs in both modes (``fxqat.utils.train_eval_graph``).
    """

    name: str
    op: str
    target: Any
    args: Any
    kwargs: Any
    mode: bool | None = None


IN_PLACE_OPERATORS = (operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.setitem)


class NodeTracer(GraphAppendingTracer):
    """Appends the nodes of what is computed with proxies to a graph; each passes through a function first."""

    def __init__(self, graph: fx.Graph, meant: Callable[[fx.Node], fx.Node]) -> None:
        super().__init__(graph)
        self.meant = meant

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Make a node."""
        return self.meant(super().create_node(*args, **kwargs))


def get_module(gm: nn.Module, path: str) -> nn.Module:
    """The submodule at a dotted path."""
    return gm.get_submodule(path)


def set_module(gm: nn.Module, path: str, module: nn.Module) -> None:
    """Put a module at a dotted path whose parent exists."""
    parent, _, name = path.rpartition(".")
    setattr(gm.get_submodule(parent), name, module)


def has_attribute(root: nn.Module, path: str) -> bool:
    """Whether there is an attribute at a dotted path."""
    try:
        operator.attrgetter(path)(root)
    except AttributeError:
        return False
    return True


def set_attribute(root: nn.Module, path: str, value: object) -> None:
    """Set an attribute at a dotted path; modules on the way that do not exist are made, without content."""
    *parents, name = path.split(".")
    module = root
    for parent in parents:
        if not hasattr(module, parent):
            setattr(module, parent, nn.Module())
        module = getattr(module, parent)
    setattr(module, name, value)


def copy_modes(source: nn.Module, target: nn.Module) -> None:
    """Give each module of ``target`` the mode of its counterpart in ``source``, and new ones the mode of ``source``."""
    modes = {path: module.training for path, module in source.named_modules()}
    for path, module in target.named_modules():
        if module.training != modes.get(path, source.training):
            module.training = not module.training


def called_module(node: fx.Node) -> nn.Module | None:
    """The module that a ``call_module`` node calls, None for any other node."""
    if node.op != "call_module":
        return None
    owner = node.graph.owning_module
    assert owner is not None
    module: nn.Module = functools.reduce(getattr, str(node.target).split("."), owner)  # faster than get_submodule
    return module


def nodes_in(module: nn.Module) -> list[fx.Node]:
    """The nodes of a graph module; none of a module that is no graph."""
    return list(module.graph.nodes) if isinstance(module, fx.GraphModule) else []


def attribute_of(gm: nn.Module, node: fx.Node) -> object:
    """The attribute that a ``get_attr`` node reads."""
    owner, _, name = str(node.target).rpartition(".")
    return getattr(gm.get_submodule(owner), name)


def calls_of(gm: fx.GraphModule) -> dict[int, list[fx.Node]]:
    """All calls of each module, by the ``id`` of the module, because a shared module may have several paths."""
    calls: dict[int, list[fx.Node]] = {}
    for node in gm.graph.nodes:
        module = called_module(node)
        if module is not None:
            calls.setdefault(id(module), []).append(node)
    return calls


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """An argument of a call, which may be passed by position or by name."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def only_user(node: fx.Node) -> fx.Node | None:
    """The only node that reads this node, None if there are none or several."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def writes_state(node: fx.Node) -> bool:
    """Whether a call writes in place to a parameter or buffer, directly or to the result of such a call."""
    first = _overwritten(node)
    return first is not None and (first.op == "get_attr" or writes_state(first))


def overwritten_state(node: fx.Node) -> str | None:
    """The parameter or buffer that a call writes in place, also detached from autograd (``.data``); or None."""
    first = _overwritten(node)
    while first is not None and (first.target == "detach" or first.args[1:] == ("data",)):
        first = first.args[0] if isinstance(first.args[0], fx.Node) else None
    if first is None or first.op == "get_attr":
        return None if first is None else str(first.target)
    return overwritten_state(first)


def _overwritten(node: fx.Node) -> fx.Node | None:
    """The first operand of a call in place."""
    name = str(node.target)
    by_method = node.op == "call_method" and name.endswith("_") and not name.endswith("__")
    if not node.args or not (by_method or node.target in IN_PLACE_OPERATORS):
        return None
    return node.args[0] if isinstance(node.args[0], fx.Node) else None


def module_path(node: fx.Node) -> str:
    """The path of the innermost module whose forward contains this node; for a module call, of the called module."""
    if node.op == "call_module":
        return str(node.target)
    stack = node.meta.get("nn_module_stack") or {}
    path = ""
    for value in stack.values():
        path = str(value[0]) if isinstance(value, tuple) else path
    return path


def unique_name(gm: nn.Module, path: str) -> str:
    """``path``, or the first of ``path_1``, ``path_2``, ... that is not an attribute of the module yet."""
    owner = path.rpartition(".")[0]
    home: object = gm
    for name in owner.split(".") if owner else ():
        home = getattr(home, name, None)
    return next(candidate for candidate in numbered(path) if not hasattr(home, candidate.rpartition(".")[2]))


def node_inputs(argument: Any) -> Iterator[fx.Node]:
    """All nodes in nested arguments, in order, with duplicates."""
    found: list[fx.Node] = []

    def keep(node: fx.Node) -> fx.Node:
        found.append(node)
        return node

    fx.node.map_arg(argument, keep)
    yield from found


def nodes_where(graph: fx.Graph, holds: Callable[[fx.Node, set[fx.Node]], bool]) -> set[fx.Node]:
    """The nodes of which a rule holds, in one pass; it may look at the nodes before, of which it held."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if holds(node, found):
            found.add(node)
    return found


def calls_in(graph: fx.Graph) -> list[Call]:
    """The nodes of a graph as plain values, which can be pickled."""

    def plain(argument: Any) -> Any:
        refer: Any = lambda a: Reference(a.name) if isinstance(a, fx.Node) else a  # noqa: E731  torch's types are narrower
        return fx.node.map_aggregate(argument, refer)

    def named(target: Any) -> Any:
        if isinstance(target, OPERATORS):
            return Imported(torch.ops.__name__, str(target))
        module, name = getattr(target, "__module__", None), getattr(target, "__name__", None)
        by_name = "<locals>" in getattr(target, "__qualname__", "") and hasattr(sys.modules.get(str(module)), str(name))
        return Imported(str(module), str(name)) if by_name else target

    return [Call(n.name, n.op, named(n.target), plain(n.args), plain(n.kwargs), n.meta.get(MODE)) for n in graph.nodes]


def graph_of(calls: list[Call]) -> fx.Graph:
    """A graph from the result of :func:`calls_in`."""
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}

    def linked(argument: Any) -> Any:
        link: Any = lambda a: nodes[a.name] if isinstance(a, Reference) else a  # noqa: E731
        return fx.node.map_aggregate(argument, link)

    for call in calls:
        target = call.target
        if isinstance(target, Imported):
            target = functools.reduce(getattr, target.name.split("."), sys.modules[target.module])
        node = graph.create_node(call.op, target, linked(call.args), linked(call.kwargs), name=call.name)
        if call.mode is not None:
            node.meta[MODE] = call.mode
        nodes[call.name] = node
    return graph

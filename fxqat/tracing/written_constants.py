"""Tensors that forward makes, and overwrites, without a node of the graph: each call has its own.

In ``acc = torch.zeros(6); acc.add_(y)`` the first call has no traced argument. Where it is no node, torch.fx runs it
and holds its result as a constant, which the second call would change for good.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from functools import partial

from torch import fx, nn

from fxqat.ops.families import IDENTITY, PASS_THROUGH
from fxqat.ops.identify import identify, works_in_place
from fxqat.utils.node_meta import ADDRESS

CONSTANT = "_tensor_constant"
"""How torch.fx begins the names of the tensors that it holds as constants."""


def constants_of(root: nn.Module) -> set[str]:
    """The names of such constants of a module, which may be a traced one."""
    return {name for name in (*vars(root), *dict(root.named_buffers(recurse=False))) if name.startswith(CONSTANT)}


def copy_written_constants(graph: fx.Graph, held: Collection[str] = ()) -> None:
    """Read a copy of each constant that the graph overwrites, in place.

    Args:
        graph: the graph of a graph module.
        held: names of constants that the model held before it was traced: they are its state.
    """
    reads: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_method" and node.target == "__setitem__":
            node.op, node.target = "call_function", operator.setitem
        if node.op == "get_attr" and str(node.target).startswith(CONSTANT) and node.target not in held:
            reads.setdefault(node.target, []).append(node)
    for nodes in reads.values():
        if any(map(_is_overwritten, nodes)):
            first, *others = nodes
            with graph.inserting_after(first):
                copy = graph.call_method("clone", (first,))
            copy.meta = {name: value for name, value in first.meta.items() if name != ADDRESS}
            for node in nodes:
                node.replace_all_uses_with(copy, delete_user_cb=partial(operator.is_not, copy))
            for node in others:
                graph.erase_node(node)


def _is_overwritten(node: fx.Node) -> bool:
    """Whether a call overwrites a value, or a view of it."""
    for user in node.users:
        if not user.args or user.args[0] is not node:
            continue
        if works_in_place(user):
            return True
        if identify(user).family in (IDENTITY, PASS_THROUGH) and _is_overwritten(user):
            return True
    return False

"""Values that nothing reads: only their size, type or device is used, so the exported file does not have them."""

from __future__ import annotations

import operator
from collections.abc import Container, Mapping

import torch
from torch import fx

from fxqat.custom_quantizer.value_kinds import reads_sizes_only
from fxqat.ops.identify import works_in_place
from fxqat.utils.fx_graph import writes_state
from fxqat.utils.node_meta import Kind

UNREAD = "only its size or type is read"

LIKE_ANOTHER = ("to", "type_as", "expand_as", "view_as", "reshape_as")
"""Methods whose second operand gives a type or a size."""

ALIKE = (torch.broadcast_tensors, torch.meshgrid)
"""Functions that return each of their operands in a size that all of them give."""


def unread_values(gm: fx.GraphModule, kinds: Mapping[fx.Node, Kind]) -> dict[fx.Node, str]:
    """The results of which no value is read, and the reason to leave them float; also through other such results.

    Args:
        gm: the graph.
        kinds: of all nodes.
    """
    found: dict[fx.Node, str] = {}
    for node in reversed(gm.graph.nodes):
        is_result = node.op in ("call_function", "call_method", "call_module") and kinds[node] is not Kind.OTHER
        if not is_result or not node.users or works_in_place(node) or writes_state(node):
            continue
        if all(
            user in found or reads_no_value(user, node, kinds) or _drops_it(user, node, found) for user in node.users
        ):
            found[node] = UNREAD
    return found


def _drops_it(user: fx.Node, node: fx.Node, unread: Container[fx.Node]) -> bool:
    """Whether a node returns its operands in another size, and nobody reads this one of its results.

    ``torch.distributions.Normal(mean, deviation).mean``, for one, reads the size of the deviation only.
    """
    if user.target not in ALIKE:
        return False
    operands = user.args[0] if isinstance(user.args[0], (list, tuple)) else user.args
    for reader in user.users:
        index = reader.args[1] if reader.target is operator.getitem else None
        if not isinstance(index, int) or (operands[index] is node and reader not in unread):
            return False
    return True


def reads_no_value(user: fx.Node, node: fx.Node, kinds: Mapping[fx.Node, Kind]) -> bool:
    """Whether a node reads only the size, type or device of its operand."""
    if user.op == "output":
        return False
    if user.target is getattr:
        return user.args[1] in ("device", "dtype", "shape")
    if user.op == "call_method" and user.target in LIKE_ANOTHER:
        return user.args[0] is not node
    return reads_sizes_only(user, kinds)

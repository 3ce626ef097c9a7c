"""Drop unread results: in ``y, _ = attention(x, x, x)`` the mean of the weights is computed for nothing."""

from __future__ import annotations

from torch import fx

from fxqat.ops.families import NORM, OPAQUE
from fxqat.ops.identify import identify, works_in_place
from fxqat.utils.fx_graph import writes_state


def drop_unread(graph: fx.Graph) -> None:
    """Erase function and method calls whose results are not read, and the calls that only they read.

    Calls of modules stay, and so do calls that may write to a tensor.
    """
    for node in reversed(list(graph.nodes)):
        if node.op not in ("call_function", "call_method") or node.users or "out" in node.kwargs:
            continue
        writes = works_in_place(node) or writes_state(node) or str(node.target).endswith("_")
        if not writes and identify(node).family not in (OPAQUE, NORM):
            graph.erase_node(node)

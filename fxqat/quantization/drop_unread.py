"""Drop unread results: in ``y, _ = attention(x, x, x)`` the mean of the weights is computed for nothing.

So do the sizes that an assertion checks (``torch._assert(x.ndim == 4, ...)``), as in the layers of timm. As a second
reader of a value, they would keep a BatchNorm from being folded.
"""

from __future__ import annotations

from torch import fx

from fxqat.ops.families import NORM, OPAQUE
from fxqat.ops.identify import identify, works_in_place
from fxqat.utils.fx_graph import writes_state
from fxqat.utils.torch_compat import ASSERT


def drop_unread(graph: fx.Graph) -> None:
    """Erase function and method calls whose results are not read, and the calls that only they read.

    Calls of modules stay, and so do calls that may write to a tensor, and assertions on values.
    """
    for node in reversed(list(graph.nodes)):
        if node.op not in ("call_function", "call_method") or node.users or "out" in node.kwargs:
            continue
        writes = works_in_place(node) or writes_state(node) or str(node.target).endswith("_")
        if not writes and (identify(node).family not in (OPAQUE, NORM) or _checks_sizes(node)):
            graph.erase_node(node)


def _checks_sizes(node: fx.Node) -> bool:
    """Whether a node is an assertion on sizes and types of tensors, not on their values."""
    if node.target is not ASSERT:
        return False
    reached = list(node.all_input_nodes)
    for computed in reached:
        if identify(computed).name != "size" or computed.target == "item":
            if computed.op not in ("call_function", "call_method") or not computed.all_input_nodes:
                return False
            reached += [source for source in computed.all_input_nodes if source not in reached]
    return True

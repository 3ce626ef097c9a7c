"""The values that hold numbers which stand for infinity: masks, above all."""

from __future__ import annotations

from torch import fx

from fxqat.ops.families import BINARY, CONCAT, IDENTITY, PASS_THROUGH, UNBOUNDED
from fxqat.ops.identify import identify, operands
from fxqat.utils.fx_graph import attribute_of, node_inputs
from fxqat.utils.node_meta import INFINITE, INFINITE_SCORE, IS_MASK, holds_infinity

INSERT_NUMBERS = {"masked_fill": 2, "where": 1, "assign_item": 2, "mul": 0, "constructor": 1}
"""The ops that put a number into a tensor, and their first argument that can be this number."""

ATTENTION = "scaled_dot_product_attention"
ADDITIONS = ("add", "sub", ATTENTION)
"""The ops that add a mask to scores; attention does inside."""


def unbounded_values(gm: fx.GraphModule) -> set[fx.Node]:
    """Nodes whose value holds numbers that stand for infinity: no range fits them and the other numbers.

    An op inserts such numbers, or they are in a tensor of the model or in a mask computed from the example inputs. Ops
    that move values and elementwise ops (a mask that is added) pass them on. Max pooling does not: its windows also
    hold values that are no padding. Where a softmax reads the result, smaller numbers are infinite: Swin's masks hold
    -100. A product with such a number counts only if it is added to the scores: it may be the scores, at a temperature.
    """
    scores, added = _scores(gm.graph)
    found: set[fx.Node] = set()
    for node in gm.graph.nodes:
        op = identify(node)
        carries = op.family in (PASS_THROUGH, IDENTITY, CONCAT, BINARY) and "max_pool" not in op.name
        carried = carries and any(source in found for source in node_inputs(operands(node, op)))
        if node.op == "get_attr":
            inserted = holds_infinity(attribute_of(gm, node), INFINITE_SCORE if node in scores else INFINITE)
        else:
            inserted = op.family == UNBOUNDED or node.meta.get(IS_MASK, False)
            reaches = node in (added if op.name == "mul" else scores)
            inserted = inserted or (reaches and _lowest_number(node, op.name) <= -INFINITE_SCORE)
        if carried or inserted:
            found.add(node)
    return found


def _scores(graph: fx.Graph) -> tuple[set[fx.Node], set[fx.Node]]:
    """The nodes whose values are scores of a softmax or are added to them, and those of them that are added."""
    scores: set[fx.Node] = set()
    added: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        readers = [user for user in node.users if _reads_scores(user, node, scores)]
        if readers:
            scores.add(node)
        if any(user in added or identify(user).name in ADDITIONS for user in readers):
            added.add(node)
    return scores, added


def _reads_scores(user: fx.Node, node: fx.Node, scores: set[fx.Node]) -> bool:
    op = identify(user)
    if op.name == ATTENTION:
        return node is user.kwargs.get("attn_mask") or node in user.args[3:4]
    passes = op.family in (PASS_THROUGH, IDENTITY, CONCAT) or op.name in (*ADDITIONS, "where", "assign_item")
    return op.name in ("softmax", "log_softmax") or (passes and user in scores)


def _lowest_number(node: fx.Node, name: str) -> float:
    if name not in INSERT_NUMBERS:
        return 0.0
    given = (*node.args[INSERT_NUMBERS[name] :], *node.kwargs.values())
    return min((float(number) for number in given if isinstance(number, (int, float))), default=0.0)

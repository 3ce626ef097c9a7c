"""Reads that stay float, even of a value that other nodes read quantized."""

from __future__ import annotations

from collections.abc import Container, Mapping

from torch import fx

from fxqat.custom_quantizer.requests import Request
from fxqat.ops.families import BINARY
from fxqat.ops.identify import poles

BY_OVERRIDE = "read float because of an override"
SINGULARITY = "read by an op with a singularity at zero: rounding would turn small values into zero"

Read = tuple[fx.Node, fx.Node]
"""An operand and the node that reads it."""


def float_reads(requests: dict[fx.Node, Request]) -> dict[Read, str]:
    """The reads that stay float, and why.

    1. The user's overrides leave the ``activation`` of the reader float.
    2. The operation or its derivative is infinite where this operand is zero; rounding turns small values into zero.

    Operations that only move the values pass this on to their own operands. In the second case so do products, and ops
    that add a number, clamp the values or take their size.
    """
    found: dict[Read, str] = {}
    for node in reversed(requests):
        request = requests[node]
        operands, reason = node.all_input_nodes, common_reason(node, found)
        if request.activation is None and request.activation_rank > 0:
            reason = BY_OVERRIDE
        elif reason is None or not _passes_on(node, request, reason):
            operands, reason = _near_singularity(node, requests), SINGULARITY
        found |= dict.fromkeys(((operand, node) for operand in operands), reason)
    return found


def common_reason(node: fx.Node, found: Mapping[Read, str]) -> str | None:
    """Why all readers of a node read it float; None if one does not."""
    reasons = {found.get((node, user)) for user in node.users}
    if not reasons or None in reasons:
        return None
    return BY_OVERRIDE if BY_OVERRIDE in reasons else SINGULARITY


def quantized_readers(
    node: fx.Node, requests: Mapping[fx.Node, Request], asking: list[fx.Node], left_float: Container[Read]
) -> frozenset[str] | None:
    """The names of the nodes that read the quantized value; None if all do.

    Args:
        node: produces the value.
        requests: of all nodes.
        asking: the nodes that ask for it quantized: they alone read it so, unless its producer gives it to all.
        left_float: the reads that stay float.
    """
    if requests[node].output is None:
        return frozenset(reader.name for reader in asking)
    if not any((node, reader) in left_float for reader in node.users):
        return None
    return frozenset(reader.name for reader in node.users if (node, reader) not in left_float)


def _passes_on(node: fx.Node, request: Request, reason: str) -> bool:
    """Whether the operands of an op stay float for the reason for which its result does."""
    op = request.op
    of_one = (op.family == BINARY or op.name in ("abs", "clamp", "neg")) and len(node.all_input_nodes) == 1
    return request.moves_values or ((of_one or op.name == "mul") and reason == SINGULARITY)


def _near_singularity(node: fx.Node, requests: Mapping[fx.Node, Request]) -> list[fx.Node]:
    """The operands at whose zero the op has a singularity, except those that the user wants quantized."""
    if requests[node].activation_rank > 0:
        return []
    found = [operand for operand in poles(node, requests[node].op) if isinstance(operand, fx.Node)]
    return [operand for operand in found if requests[operand].output is None or requests[operand].output_rank == 0]

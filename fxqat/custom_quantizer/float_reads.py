"""Reads that stay float, even of a value that other nodes read quantized."""

from __future__ import annotations

from collections.abc import Container, Mapping

from torch import fx

from fxqat.custom_quantizer.requests import Request
from fxqat.custom_quantizer.unread_values import reads_no_value
from fxqat.custom_quantizer.value_kinds import reads_sizes_only, returns_structure, single_numbers
from fxqat.ops.families import LOOKUP, MATMUL, OPAQUE, RECURRENT, WEIGHTED
from fxqat.ops.identify import gives_indices, identify, poles
from fxqat.utils.node_meta import Kind, kind_of
from fxqat.utils.train_eval_graph import eval_or_train

BY_OVERRIDE = "read float because of an override"
SINGULARITY = "read by an op with a singularity at zero: rounding would turn small values into zero"
DECIDES = "becomes an index, a comparison or an order: rounding would change the decision"
PRECISE = "read in float64: rounding would lose the precision that the model asks for"
LOSS = "becomes a single number, as a loss: outside of a calibrated range it would have no gradient"

LAYERS = (WEIGHTED, MATMUL, RECURRENT, LOOKUP, OPAQUE)
"""Families at which values that must stay float begin: their own operands are quantized as always."""

Read = tuple[fx.Node, fx.Node]
"""An operand and the node that reads it."""


def float_reads(requests: dict[fx.Node, Request], kinds: Mapping[fx.Node, Kind]) -> dict[Read, str]:
    """The reads that stay float, and why.

    1. The user's overrides leave the ``activation`` of the reader float.
    2. The operation or its derivative is infinite where this operand is zero; rounding turns small values into zero.
    3. The value is compared, sorted, or becomes an integer.
    4. The model computes with it in float64.
    5. It is an output of the model without dimensions: a loss that forward computes, or a statistic.

    In the cases 2 to 5 everything back to the last layer is computed in float, in case 1 what only moves the values.

    Args:
        requests: of all nodes, in execution order.
        kinds: of all nodes.
    """
    found: dict[Read, str] = {}
    singles = single_numbers(requests, kinds)
    for node in reversed(requests):
        request = requests[node]
        operands, reason = node.all_input_nodes, common_reason(node, found, kinds)
        if request.activation is None and request.activation_rank > 0:
            reason = BY_OVERRIDE
        elif request.activation_rank > 0:  # the user wants them quantized
            continue
        elif node.op == "output" or _is_returned_structure(node):
            operands, reason = [operand for operand in operands if operand in singles], LOSS
        elif _decides(node, kinds):
            reason = DECIDES
        elif kind_of(node) == "float64":
            reason = PRECISE
        elif reason is None or not _passes_on(request, reason):
            operands, reason = _near_singularity(node, requests), SINGULARITY
        asked = {operand for operand in operands if requests[operand].output and requests[operand].output_rank}
        if reason != BY_OVERRIDE:
            operands = [operand for operand in operands if operand not in asked]
        found |= dict.fromkeys(((operand, node) for operand in operands), reason)
    return found


def common_reason(node: fx.Node, found: Mapping[Read, str], kinds: Mapping[fx.Node, Kind]) -> str | None:
    """Why all nodes that read the values of a node read them float; None if one does not."""
    reasons = {found.get((node, user)) for user in node.users if not reads_no_value(user, node, kinds)}
    if not reasons or None in reasons:
        return None
    return next(reason for reason in (BY_OVERRIDE, DECIDES, PRECISE, SINGULARITY, LOSS) if reason in reasons)


def quantized_readers(
    node: fx.Node,
    requests: Mapping[fx.Node, Request],
    asking: list[fx.Node],
    left_float: Container[Read],
    kinds: Mapping[fx.Node, Kind],
) -> frozenset[str] | None:
    """The names of the nodes that read the quantized value; None if all do.

    Args:
        node: produces the value.
        requests: of all nodes.
        asking: the nodes that ask for it quantized: they alone read it so, unless its producer gives it to all.
        left_float: the reads that stay float.
        kinds: of all nodes.
    """
    if requests[node].output is None:
        return frozenset(reader.name for reader in asking)
    if not any((node, reader) in left_float for reader in node.users):
        return None
    reading = [reader for reader in node.users if not reads_no_value(reader, node, kinds)]
    return frozenset(reader.name for reader in reading if (node, reader) not in left_float)


def _decides(node: fx.Node, kinds: Mapping[fx.Node, Kind]) -> bool:
    """Whether an op turns values into indices, integers or booleans, or orders them and its indices are read."""
    if node.op not in ("call_function", "call_method", "call_module") or node.target is eval_or_train:
        return False
    op = identify(node)
    if gives_indices(op):
        return any(identify(user).name == "indices" or user.op == "output" for user in node.users)
    if kinds[node] is not Kind.OTHER or op.name == "indices" or returns_structure(node):
        return False
    return not reads_sizes_only(node, kinds)


def _is_returned_structure(node: fx.Node) -> bool:
    """Whether a node makes the dataclass, or another object, that the model returns."""
    return isinstance(node.target, type) and bool(node.users) and all(user.op == "output" for user in node.users)


def _passes_on(request: Request, reason: str) -> bool:
    """Whether the operands of an op stay float for the reason for which its result does."""
    return request.moves_values or (reason != BY_OVERRIDE and request.op.family not in LAYERS)


def _near_singularity(node: fx.Node, requests: Mapping[fx.Node, Request]) -> list[fx.Node]:
    """The operands at whose zero the op has a singularity."""
    return [operand for operand in poles(node, requests[node].op) if isinstance(operand, fx.Node)]

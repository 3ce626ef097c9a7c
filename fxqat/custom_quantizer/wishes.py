"""What the rules and the user want of each node, and the questions the quantizer asks about it."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from fxqat.custom_quantizer.overrides import TensorChange
from fxqat.custom_quantizer.spec import Rule
from fxqat.nn.fused import FusedLayer
from fxqat.nn.weighted import WEIGHTED_TYPES
from fxqat.quantization.annotation import ValueQuant
from fxqat.quantization.op_table import IDENTITY, PASS_THROUGH, WEIGHTED, Op
from fxqat.quantization.ops import identify
from fxqat.scheme import TensorQConfig
from fxqat.utils.fx_graph import called_module, only_user
from fxqat.utils.torch_compat import has_hooks


@dataclass
class Wish:
    """What the rules and the user want of one node.

    ``rank`` says who decided: 0 the backend, i + 1 the user's rule number i.
    """

    op: Op
    rule: Rule | None
    reason: str
    weight: TensorQConfig | None = None
    activation: TensorQConfig | None = None
    output: TensorQConfig | None = None
    activation_rank: int = 0
    output_rank: int = 0
    operands: list[fx.Node] = field(default_factory=list)


def changed(config: TensorQConfig, change: TensorChange | None) -> TensorQConfig | None:
    """The configuration after a change; None leaves the tensor float."""
    return None if change is None else change.applied_to(config)


def claim_order(claim: tuple[TensorQConfig, int]) -> tuple[int, int]:
    """Of several wishes the one of the latest rule is strongest; among equals the widest."""
    return claim[1], claim[0].scheme.bit_width


def refusing(wishes: dict[fx.Node, Wish]) -> set[fx.Node]:
    """Nodes that were told to read float, and those that only move values for such nodes."""
    found: set[fx.Node] = set()
    for node in reversed(wishes):
        wish = wishes[node]
        moves = wish.op.family in (PASS_THROUGH, IDENTITY)
        told = wish.activation is None and wish.activation_rank > 0
        if told or (moves and node.users and all(user in found for user in node.users)):
            found.add(node)
    return found


def readers_of(
    node: fx.Node, wishes: dict[fx.Node, Wish], asking: list[fx.Node], refusing: set[fx.Node]
) -> frozenset[str] | None:
    """Who reads the quantized value: all if the producer gives it so, but for those told to read float."""
    if wishes[node].output is None:
        return frozenset(reader.name for reader in asking)
    if not any(reader in refusing for reader in node.users):
        return None
    return frozenset(reader.name for reader in node.users if reader not in refusing)


def can_change(wish: Wish, part: str, node: fx.Node) -> bool:
    """Whether an override of this part of a node means anything."""
    if part == "weight":
        return wish.weight is not None or (wish.rule is not None and wish.op.family == WEIGHTED)
    if part == "output" and node.op in ("placeholder", "get_attr"):
        return True
    if wish.rule is None:
        return False
    return part != "output" or wish.op.family not in (PASS_THROUGH, IDENTITY)


def is_written_for(operand: fx.Node, reader: fx.Node) -> bool:
    """Whether a weighted layer computes the operand for this reader alone, looking through identity ops."""
    while only_user(operand) is reader:
        op = identify(operand)
        if op.family == WEIGHTED:
            return True
        if op.family != IDENTITY or not operand.args or not isinstance(operand.args[0], fx.Node):
            return False
        operand, reader = operand.args[0], operand
    return False


def wanted_behind(wishes: dict[fx.Node, Wish], values: dict[fx.Node, ValueQuant]) -> set[fx.Node]:
    """Nodes whose value is quantized, or would be behind some ops that only move it."""
    wanted: set[fx.Node] = set()
    for node in reversed(wishes):
        moved = [user for user in node.users if wishes[user].op.family in (PASS_THROUGH, IDENTITY)]
        if node in values or any(user in wanted for user in moved):
            wanted.add(node)
    return wanted


def may_follow(node: fx.Node, value: ValueQuant, wanted: set[fx.Node]) -> bool:
    """Whether a pass-through op takes the scale of its operand: if it reads it quantized, or its result is to be."""
    return reads_quantized(node, value) or node in wanted


def reads_quantized(node: fx.Node, value: ValueQuant | None) -> bool:
    """Whether a node reads the quantized form of a value."""
    return value is not None and (value.readers is None or node.name in value.readers)


def ends_in_activation(node: fx.Node) -> bool:
    """Whether an activation is fused into the node already."""
    module = called_module(node)
    return isinstance(module, FusedLayer) and module.activation is not None


def unsupported(node: fx.Node) -> str:
    """Why a weighted op cannot have a quantized weight; empty if it can."""
    module = called_module(node)
    assert module is not None
    layer = module.layer if isinstance(module, FusedLayer) else module
    if type(layer) not in WEIGHTED_TYPES:
        return f"{type(layer).__name__} is not a plain layer"
    if has_hooks(module) or has_hooks(layer):
        return "has forward hooks, which a quantized layer would not run"
    if node.kwargs or len(node.args) != 1:
        return "called with more than its input (output_size)"
    return ""

"""What the rules and the user want of each node, and the questions the quantizer asks about it."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

from torch import fx

from fxqat.config.overrides import TensorChange
from fxqat.custom_quantizer.spec import Rule
from fxqat.nn.fused import FusedLayer
from fxqat.nn.weighted import WEIGHTED_TYPES
from fxqat.ops.identify import identify, poles
from fxqat.ops.table import BINARY, IDENTITY, PASS_THROUGH, WEIGHTED, Op
from fxqat.quantization.annotation import ValueQuant
from fxqat.scheme import TensorQConfig
from fxqat.utils.fx_graph import called_module, only_user
from fxqat.utils.torch_compat import has_hooks

LEFT_FLOAT = "left float by"
TOLD = "told to be read float"
NEAR_ZERO = "read by an op with a pole at zero, to which rounding would send what is near it"


@dataclass
class Wish:
    """What the rules and the user want of one node.

    ``rank`` says who decided: 0 the backend, i the user's rule number i, from 1.
    """

    op: Op
    rule: Rule | None
    reason: str
    weight: TensorQConfig | None = None
    activation: TensorQConfig | None = None
    output: TensorQConfig | None = None
    weight_rank: int = 0
    activation_rank: int = 0
    output_rank: int = 0
    operands: list[fx.Node] = field(default_factory=list)


def changed(config: TensorQConfig, change: TensorChange | None) -> TensorQConfig | None:
    """The configuration after a change; None leaves the tensor float."""
    return None if change is None else change.applied_to(config)


def claim_order(claim: tuple[TensorQConfig, int]) -> tuple[int, int]:
    """Of several wishes the one of the latest rule is strongest; among equals the widest."""
    return claim[1], claim[0].scheme.bit_width


def refusals(wishes: dict[fx.Node, Wish]) -> dict[tuple[fx.Node, fx.Node], str]:
    """The operands that are read float whoever else reads them quantized: ``(operand, reader)``, and why.

    Such readers were told so by the user, or have a pole at zero, to which rounding would send what is near it. Ops
    before them that only move the values refuse, too; before a pole also products, and those that add a number, clamp
    the values or take their size.
    """
    found: dict[tuple[fx.Node, fx.Node], str] = {}
    for node in reversed(wishes):
        wish = wishes[node]
        refused, reason = node.all_input_nodes, only_reason(node, found)
        if wish.activation is None and wish.activation_rank > 0:
            reason = TOLD
        elif reason is None or not _passes_on(node, wish.op, reason):
            refused, reason = _poles(node, wishes), NEAR_ZERO
        found |= dict.fromkeys(((operand, node) for operand in refused), reason)
    return found


def only_reason(node: fx.Node, refused: dict[tuple[fx.Node, fx.Node], str]) -> str | None:
    """Why all readers of a node read it float; None if one does not."""
    reasons = {refused.get((node, user)) for user in node.users}
    if not reasons or None in reasons:
        return None
    return TOLD if TOLD in reasons else NEAR_ZERO


def _passes_on(node: fx.Node, op: Op, reason: str) -> bool:
    """Whether what is refused behind an op is refused before it, too."""
    of_one = (op.family == BINARY or op.name in ("abs", "clamp", "neg")) and len(node.all_input_nodes) == 1
    return op.family in (PASS_THROUGH, IDENTITY) or ((of_one or op.name == "mul") and reason == NEAR_ZERO)


def _poles(node: fx.Node, wishes: dict[fx.Node, Wish]) -> list[fx.Node]:
    """The operands at whose zero the op has a pole, but for what the user asked to have quantized."""
    if wishes[node].activation_rank > 0:
        return []
    found = [operand for operand in poles(node, wishes[node].op) if isinstance(operand, fx.Node)]
    return [operand for operand in found if wishes[operand].output is None or wishes[operand].output_rank == 0]


def readers_of(
    node: fx.Node, wishes: dict[fx.Node, Wish], asking: list[fx.Node], refused: Container[tuple[fx.Node, fx.Node]]
) -> frozenset[str] | None:
    """Who reads the quantized value: all if the producer gives it so, but for those that read it float."""
    if wishes[node].output is None:
        return frozenset(reader.name for reader in asking)
    if not any((node, reader) in refused for reader in node.users):
        return None
    return frozenset(reader.name for reader in node.users if (node, reader) not in refused)


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

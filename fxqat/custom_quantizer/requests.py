"""What the backend and the user ask of each node, and what the graph says about it."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

from torch import fx

from fxqat.custom_quantizer.spec import BackendSpec, Rule
from fxqat.nn.embedding import TABLES, Table, why_table_stays_float
from fxqat.nn.fused import FusedLayer
from fxqat.nn.parametrized import has_computed_weight
from fxqat.nn.recurrent import RecurrentLayer
from fxqat.nn.weighted import WEIGHTED_TYPES
from fxqat.ops.families import IDENTITY, PASS_THROUGH, WEIGHTED, Op
from fxqat.ops.identify import identify
from fxqat.scheme import TensorQConfig
from fxqat.utils.fx_graph import called_module, only_user
from fxqat.utils.own_forward import type_of
from fxqat.utils.torch_compat import has_hooks
from fxqat.utils.weight_hooks import why_hooks_forbid

RankedConfig = tuple[TensorQConfig, int]
"""A configuration and the rank of who asks for it: 0 the backend, i the user's override number i, from 1."""


@dataclass
class Request:
    """What the backend and the user ask of one node.

    Args:
        op: its op.
        rule: the backend's rule for the op; None if the op computes in float.
        reason: why it has the rule, or why it has none.
        detail: more about that, for a node that stays float.
        excluded: the user's configuration leaves the op float.
        weight: how to quantize its weight; None leaves it float.
        activation: how to quantize the values it reads; None leaves them float.
        dynamic: the layer quantizes what it reads itself, at run time; ``activation`` is None then.
        output: how to quantize the value it produces, for all readers; None leaves that to the readers.
        weight_rank: who decided about the weight (see :data:`RankedConfig`).
        activation_rank: who decided about the values it reads.
        output_rank: who decided about the value it produces.
        operands: the values that it reads quantized.
        overridden_by: the entries of the configuration that changed something.
    """

    op: Op
    rule: Rule | None
    reason: str
    detail: str = ""
    excluded: bool = False
    weight: TensorQConfig | None = None
    activation: TensorQConfig | None = None
    dynamic: bool = False
    output: TensorQConfig | None = None
    weight_rank: int = 0
    activation_rank: int = 0
    output_rank: int = 0
    operands: list[fx.Node] = field(default_factory=list)
    overridden_by: list[str] = field(default_factory=list)

    @property
    def why_float(self) -> str:
        """The reason with its detail."""
        return f"{self.reason}: {self.detail}" if self.detail else self.reason

    @property
    def moves_values(self) -> bool:
        """Whether the op only moves or selects values, or is none in the deployed graph."""
        return self.op.family in (PASS_THROUGH, IDENTITY)


def precedence(asked: RankedConfig) -> tuple[int, int, int, bool]:
    """The key that orders requests about one value: the latest override wins; among equals the widest scheme.

    Of equal widths a symmetric one wins: an op that asks for it computes in float otherwise.
    """
    scheme = asked[0].scheme
    return asked[1], scheme.bit_width, scheme.scale_bits, scheme.symmetric


def fused_activation(node: fx.Node, op: Op, spec: BackendSpec) -> fx.Node | None:
    """The activation that the backend runs inside the op of a node, if such an activation is its only reader."""
    reader = only_user(node)
    if reader is None or op.family not in spec.fuses_into or _has_fused_activation(node):
        return None
    return reader if identify(reader).name in spec.fused_activations else None


def op_around(node: fx.Node, spec: BackendSpec) -> fx.Node | None:
    """The node inside whose op the backend runs this activation, None if there is none."""
    for source in node.all_input_nodes:
        if fused_activation(source, identify(source), spec) is node:
            return source
    return None


def is_layer_output_for(operand: fx.Node, reader: fx.Node) -> bool:
    """Whether a weighted layer computes the operand for this reader alone, looking through identity ops."""
    while only_user(operand) is reader:
        op = identify(operand)
        if op.family == WEIGHTED:
            return True
        if op.family != IDENTITY or not operand.args or not isinstance(operand.args[0], fx.Node):
            return False
        operand, reader = operand.args[0], operand
    return False


def layer_of_result(node: fx.Node) -> fx.Node | None:
    """The call of a recurrent layer of whose results a node is one; None if it is something else."""
    source = node.args[0] if node.target is operator.getitem else None
    if isinstance(source, fx.Node) and isinstance(called_module(source), RecurrentLayer):
        return source
    return None


def why_weight_stays_float(node: fx.Node) -> str:
    """Why the weight of a layer cannot be quantized; empty if it can."""
    module = called_module(node)
    if module is None:
        return "its table is computed or a buffer, no parameter"
    layer = module.layer if isinstance(module, FusedLayer) else module
    if type_of(layer) not in (*WEIGHTED_TYPES, *TABLES):
        kinds = "Conv, ConvTranspose, Linear, Embedding or EmbeddingBag of torch.nn"
        return f"{type(layer).__name__} is not a layer that fxqat quantizes ({kinds})"
    for hooked in filter(has_hooks, (module, layer)):
        return why_hooks_forbid(hooked)
    if isinstance(layer, Table):
        return why_table_stays_float(layer)
    if node.kwargs or len(node.args) != 1:
        return "called with more than its input (output_size)"
    return ""


def weight_of(node: fx.Node) -> object:
    """The weight of the layer that a node calls, None if it calls none, or computes it."""
    module = called_module(node)
    layer = module.layer if isinstance(module, FusedLayer) else module
    return None if layer is None or has_computed_weight(layer) else getattr(layer, "weight", None)


def _has_fused_activation(node: fx.Node) -> bool:
    module = called_module(node)
    return isinstance(module, FusedLayer) and module.activation is not None

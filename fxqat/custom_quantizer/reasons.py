"""The reasons of the report: for every node, why its value and weight are quantized or stay float."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from fxqat.custom_quantizer.float_reads import BY_OVERRIDE, DECIDES, LOSS, PRECISE, SINGULARITY, Read, common_reason
from fxqat.custom_quantizer.requests import Request, fused_activation, op_around
from fxqat.custom_quantizer.spec import BackendSpec
from fxqat.custom_quantizer.value_kinds import NO_RANGE
from fxqat.ops.families import CONSTRUCTOR, LOOKUP, NOT_FLOAT, OPAQUE, RECURRENT, UNBOUNDED
from fxqat.quantization.annotation import FLOAT, QUANTIZED, SHARES, ValueQuant
from fxqat.utils.node_meta import Kind

OF_PARAMETERS = "computed from parameters alone: a constant, quantized where a quantized operation reads it"
DECODES_POSITIONS = "post-processing: decodes positions after the last layer with a weight"
EXACT = "computed from constants, sizes or integers only: stays exact"
OF_MODE = "number of eval mode or of training"
IS_WIDE = "computed in float64 or with complex numbers"
WEIGHTS_ONLY = "weights only"
READS_FLOAT = f"{WEIGHTS_ONLY}: it reads float values"
READS_DYNAMIC = "quantizes the values that it reads at run time"
ADDED = "asked for by extra_quantizer_dict"
SOURCES = {"placeholder": "input of the model", "get_attr": "tensor of the model"}
CREATED = "tensor that the model creates"
FAMILY_REASONS = {
    NOT_FLOAT: "gives sizes, indices or booleans",
    RECURRENT: "recurrent layers stay float",
    OPAQUE: "not an op of fxqat's table",
    CONSTRUCTOR: CREATED,
    UNBOUNDED: NO_RANGE,
}
COMPUTED_FLOAT = {
    DECIDES: "its result decides an index, a comparison or an order",
    PRECISE: "its result is used in float64",
    SINGULARITY: "rounding an operand could make it zero, where the op is singular",
    LOSS: "its result becomes a single number, as a loss",
}
"""Why an op reads float values, by the reason for which the read stays float; the first that holds is told."""


class Reasons:
    """Puts the decisions about the nodes of a graph into words.

    Args:
        spec: the backend.
        requests: of all nodes.
        kinds: of all nodes.
        always_float: the nodes that stay float on every backend, and why.
        left_float: the reads that stay float, and why.
        values: how the values are quantized, for the nodes whose value is.
    """

    def __init__(
        self,
        spec: BackendSpec,
        requests: Mapping[fx.Node, Request],
        kinds: Mapping[fx.Node, Kind],
        always_float: Mapping[fx.Node, str],
        left_float: Mapping[Read, str],
        values: Mapping[fx.Node, ValueQuant],
    ) -> None:
        self.spec = spec
        self.requests = requests
        self.kinds = kinds
        self.always_float = always_float
        self.left_float = left_float
        self.values = values
        groups = [value.group for value in values.values()]
        self._group_sizes = {group: groups.count(group) for group in set(groups)}

    def status(self, node: fx.Node) -> str:
        """What became of the value and the weight of a node."""
        value = self.values.get(node)
        if value is None:
            return FLOAT if self.requests[node].weight is None else QUANTIZED
        return SHARES if value.on_grid or self._group_sizes[value.group] > 1 else QUANTIZED

    def reason(self, node: fx.Node) -> str:
        """Why, as clauses: how the op computes, the user's overrides, its value, and the scale that it shares."""
        if node in self.always_float:
            return self.always_float[node]
        request, value = self.requests[node], self.values.get(node)
        clauses = [self._about_op(node), *(f"changed by {where}" for where in request.overridden_by)]
        if request.activation_rank and not request.dynamic and BY_OVERRIDE in self._why_operands_are_float(node):
            clauses.append("reads its operands float")
        if value is None:
            clauses.append(self._why_value_is_float(node))
        elif value.readers is not None:
            clauses.append(f"read quantized by {', '.join(sorted(value.readers))}")
        if value is not None and self._group_sizes[value.group] > 1:
            clauses.append(f"one scale for {self._group_sizes[value.group]} values")
        return "; ".join(clause for clause in clauses if clause)

    def _about_op(self, node: fx.Node) -> str:
        """Why the op computes in integers or in float; empty if another clause says it."""
        request, value = self.requests[node], self.values.get(node)
        host = self._host(node)
        if host is not None:
            rule = self.requests[host].rule
            return f"runs inside {host.name}" + (f": {rule.reason}" if rule and rule.output and value else "")
        if request.rule is None:
            if request.weight is not None:
                return f"{WEIGHTS_ONLY}: {request.why_float}"
            if value is None or self._is_source(node) or request.excluded:
                return request.why_float
            return f"computed in float: {request.reason}"
        if request.weight is not None and request.activation is None and request.op.family != LOOKUP:
            return READS_DYNAMIC if request.dynamic else READS_FLOAT
        if request.moves_values and (value is None or not value.on_grid):
            return "moves values" if value is None else "moves float values"
        reads_integers = request.weight is not None or any(operand in self.values for operand in request.operands)
        if value is None and not reads_integers and not request.moves_values:
            return ""
        why = self._why_operands_are_float(node)
        causes = [COMPUTED_FLOAT[reason] for reason in COMPUTED_FLOAT if reason in why]
        if causes:
            output = f"; {self.spec.name} quantizes its output" if request.output is not None and value else ""
            return f"computed in float: {causes[0]}{output}"
        return request.reason

    def _why_operands_are_float(self, node: fx.Node) -> set[str | None]:
        return {self.left_float.get((operand, node)) for operand in node.all_input_nodes}

    def _why_value_is_float(self, node: fx.Node) -> str:
        """Why a value is not quantized; empty if the clause about the op says it."""
        request = self.requests[node]
        if self.kinds[node] in (Kind.OTHER, Kind.WIDE):
            return "not a float tensor" if node.op in SOURCES else ""
        if request.rule is None and not self._is_source(node) and self._host(node) is None:
            return ""
        if request.op.gives_tuple and not request.moves_values:
            return ""
        activation = fused_activation(node, request.op, self.spec)
        if activation is not None and activation in self.values:
            return f"quantized after {activation.name}"
        if request.output is None and request.output_rank:
            return "its value is left float"
        refused = common_reason(node, self.left_float, self.kinds)
        if refused is not None and (request.output is not None or any(map(self._would_read_quantized, node.users))):
            return refused
        if request.moves_values and not any(operand in self.values for operand in node.all_input_nodes):
            return "its operand is float"
        if request.rule is not None and request.rule.why_float_output:
            return request.rule.why_float_output
        if node.users and all(self.kinds[user] is Kind.OTHER and user.op != "output" for user in node.users):
            return "only its size or indices are used"
        return "no quantized op reads it"

    def _would_read_quantized(self, node: fx.Node) -> bool:
        request = self.requests[node]
        return request.activation is not None or request.activation_rank > 0 or request.moves_values

    def _host(self, node: fx.Node) -> fx.Node | None:
        """The op with a rule inside which the backend runs this activation."""
        around = None if self.requests[node].excluded else op_around(node, self.spec)
        return around if around is not None and self.requests[around].rule is not None else None

    def _is_source(self, node: fx.Node) -> bool:
        """Whether a node computes nothing: an input or tensor of the model, or a new tensor."""
        return node.op in SOURCES or self.requests[node].op.family == CONSTRUCTOR

"""The one interpreter of backend tables: reads a spec, writes annotations, changes nothing else."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from fxqat.config.config import SIZE, STATIC, PrepareConfig
from fxqat.config.first_last import first_last_overrides
from fxqat.config.overrides import check_all_match
from fxqat.config.tensor_entry import DYNAMIC
from fxqat.custom_quantizer.conversion_cost import too_costly
from fxqat.custom_quantizer.float_reads import Read, float_reads, quantized_readers
from fxqat.custom_quantizer.legal_schemes import check_dynamic, check_legal
from fxqat.custom_quantizer.nonnegative import nonnegative_values
from fxqat.custom_quantizer.override_rules import (
    Overrides,
    can_change,
    check_additions,
    check_defaults,
    check_dynamic_weights,
    check_forms,
    check_lists,
    check_shared_weights,
    tie_tables,
)
from fxqat.custom_quantizer.position_decoding import decoding_positions
from fxqat.custom_quantizer.reasons import (
    ADDED,
    DECODES_POSITIONS,
    EXACT,
    FAMILY_REASONS,
    IS_WIDE,
    OF_MODE,
    OF_PARAMETERS,
    READS_DYNAMIC,
    SOURCES,
    Reasons,
)
from fxqat.custom_quantizer.requests import (
    RankedConfig,
    Request,
    fused_activation,
    is_layer_output_for,
    op_around,
    precedence,
    why_weight_stays_float,
)
from fxqat.custom_quantizer.sharing import Groups, group_config, share_scales
from fxqat.custom_quantizer.spec import BackendSpec, Rule
from fxqat.custom_quantizer.unread_values import unread_values
from fxqat.custom_quantizer.value_kinds import (
    always_float,
    constant_values,
    exact_values,
    returns_structure,
    untrained,
    value_kinds,
)
from fxqat.nn.recurrent import RecurrentLayer
from fxqat.ops.families import LOOKUP, MATMUL, NOT_FLOAT, OPAQUE, RECURRENT, WEIGHTED, WITH_WEIGHT, Op
from fxqat.ops.identify import identify, operands
from fxqat.quantization.annotation import TOO_COSTLY, Annotation, ValueQuant
from fxqat.utils.fx_graph import called_module, node_inputs
from fxqat.utils.node_meta import ANNOTATION, KEPT_WHOLE, Kind
from fxqat.utils.train_eval_graph import eval_or_train

ADDITIONAL = Rule(reason=ADDED)
ADDITIONAL_TABLE = Rule(inputs="none", output=False, reason=ADDED)
"""A lookup reads indices, and its value is quantized where a quantized operation reads it."""
DYNAMIC_RECURRENT = Rule(inputs="none", output=False, reason=READS_DYNAMIC)

Requests = dict[fx.Node, Request]
Values = dict[fx.Node, ValueQuant]


class BackendQuantizer:
    """Annotates a graph by a backend's table and a user's configuration.

    Args:
        spec: the backend.
        config: the user's configuration.
    """

    def __init__(self, spec: BackendSpec, config: PrepareConfig | None = None) -> None:
        self.config = config or PrepareConfig()
        self.spec = _configured(spec, self.config)
        if self.config.activations == DYNAMIC and not self.spec.dynamic:
            check_dynamic(self.spec, "linear", "activation", "any layer")

    def annotate(self, gm: fx.GraphModule) -> PrepareConfig:
        """Write an :class:`~fxqat.quantization.annotation.Annotation` on every node; nothing else changes.

        1. Every op requests, by its rule and the overrides, its operands, its weight and its result quantized.
        2. Ops for which conversions cost too much withdraw their requests.
        3. A value is quantized once, at its producer, if its producer or a reader requests it.
        4. Values that are joined or moved share a scale.
        5. Every node gets the configuration of its value and its weight, and the reason.

        Returns:
            The configuration as it was applied: shorthands and functions have become overrides of single nodes.

        Raises:
            ConfigError: an exclusion, addition or override matches no node or has no effect, or asks for something
                impossible.
        """
        config = self.config
        check_all_match(gm, [*config.additional, *config.exclude, *(override.match for override in config.overrides)])
        check_forms(gm.graph.nodes, config)
        kinds = value_kinds(gm)
        excluded = always_float(gm)
        kinds |= dict.fromkeys(excluded, Kind.OTHER)
        excluded = dict.fromkeys(constant_values(gm, kinds), OF_PARAMETERS) | excluded
        decoding = [node for node in decoding_positions(gm, kinds) if not any(m(node) for m in config.additional)]
        excluded |= dict.fromkeys(decoding, DECODES_POSITIONS)
        excluded |= unread_values(gm, kinds)
        exact = exact_values(gm, kinds)
        overrides = Overrides(self.spec, (*first_last_overrides(config.first_last, kinds), *config.overrides))

        requests = {node: self._request(node, kinds, excluded, exact, overrides) for node in gm.graph.nodes}
        check_lists(requests, config.additional, config.exclude)
        check_shared_weights(requests)
        tie_tables(requests)
        check_dynamic_weights(requests)
        least_work = self._withdraw_costly(requests, kinds)
        self._pass_on_outputs(requests)
        left_float = float_reads(requests, kinds)
        for node, request in requests.items():
            request.operands = [operand for operand in request.operands if (operand, node) not in left_float]
        values, asked = self._values(requests, kinds, left_float, overrides)
        applied = overrides.applied()
        nonnegative = nonnegative_values(gm.graph)
        groups = share_scales(requests, values, left_float, nonnegative)
        _drop_unused(values, kinds)
        check_additions(requests, values.keys(), config.additional)
        check_defaults(config, requests, values.keys())
        self._number_groups(values, asked, groups, requests, untrained(gm), nonnegative, kinds)
        reasons = Reasons(self.spec, requests, kinds, excluded, left_float, values)
        for node, request in requests.items():
            if node.op != "output":
                name = request.op.name if request.op.family != OPAQUE else node.op
                changeable = tuple(t for t in ("activation", "output") if can_change(request, t, node))
                annotation = Annotation(
                    name,
                    reasons.status(node),
                    reasons.reason(node),
                    values.get(node),
                    request.weight,
                    changeable,
                    weights_only=request.weight is not None and request.activation is None and not request.dynamic,
                    dynamic=request.dynamic and request.weight is not None,
                )
                node.meta[ANNOTATION] = annotation
        overrides.check_fixed_ranges(values)
        return replace(config, first_last={}, overrides=applied, least_work=least_work)

    def _request(
        self,
        node: fx.Node,
        kinds: dict[fx.Node, Kind],
        excluded: dict[fx.Node, str],
        exact: set[fx.Node],
        overrides: Overrides,
    ) -> Request:
        """What the backend's rule and the user's configuration ask of a node."""
        op = identify(node)
        if op.family == WEIGHTED and node.op == "call_function":  # its weight is computed: a product of two values
            op = replace(op, family=MATMUL, inputs=2)
        if node in excluded:
            return Request(op, None, excluded[node])
        if KEPT_WHOLE in node.meta:
            return Request(op, None, node.meta[KEPT_WHOLE])
        rule = None if node in exact else self.spec.rule(op.name, op.family)
        if rule is None and any(match(node) for match in self.config.additional):
            rule = ADDITIONAL_TABLE if op.family == LOOKUP else ADDITIONAL
        is_recurrent = isinstance(called_module(node), RecurrentLayer)
        if rule is None and is_recurrent and op.name in self.spec.dynamic and self.config.asks_dynamic(node):
            rule = DYNAMIC_RECURRENT
        if node.op in ("placeholder", "get_attr", "output"):
            return overrides.apply(node, Request(op, None, SOURCES.get(node.op, "")))
        if node in exact and rule is None:
            return overrides.apply(node, Request(op, None, FAMILY_REASONS.get(op.family, EXACT)))
        if node.target is eval_or_train and kinds[node] is Kind.OTHER:
            return Request(op, None, OF_MODE)
        if kinds[node] is Kind.OTHER and op.family != RECURRENT:
            return Request(op, None, FAMILY_REASONS[NOT_FLOAT])
        if kinds[node] is Kind.WIDE:
            return Request(op, None, IS_WIDE)
        if rule is None:
            why = self.spec.why_float(op.name, op.family)
            if op.family in FAMILY_REASONS:
                return Request(op, None, FAMILY_REASONS[op.family], why)
            request = Request(op, None, f"{self.spec.name} has no rule for {op.name}", why)
            if not self._stores_weight(node, op):
                return request
            request.weight = self.spec.weight_of(op.name)
            return overrides.apply(node, request)
        exclusion = next((match for match in self.config.exclude if match(node)), None)
        if exclusion is not None:
            return Request(op, None, f"left float by {exclusion.where}", excluded=True)
        request = Request(op, rule, rule.reason)
        if is_recurrent:
            request.weight = self.spec.weight_of(op.name)
        if op.family in WITH_WEIGHT:
            problem = why_weight_stays_float(node)
            if problem:
                return Request(op, None, problem)
            request.weight = self.spec.weight_of(op.name)
        is_static = self.config.activations == STATIC
        request.dynamic = self.config.activations == DYNAMIC and op.name in self.spec.dynamic
        if is_static and rule.inputs != "none" and node.target is not eval_or_train:  # which only passes values through
            request.activation = self.spec.activation_of(rule)
        gives_values = not request.moves_values and not op.gives_tuple
        if is_static and rule.output and gives_values and fused_activation(node, op, self.spec) is None:
            request.output = self.spec.activation
            if op.name in self.spec.fixed_ranges:
                request.output = request.output.with_scheme(fixed_range=self.spec.fixed_ranges[op.name])
        overrides.apply(node, request)
        if request.activation is not None:
            request.operands = self._operands(node, request, rule, kinds)
        return request

    def _stores_weight(self, node: fx.Node, op: Op) -> bool:
        """Whether the weight of a layer without a rule is stored as integers: for a small file, or for its own sake."""
        for_latency = self.config.optimize_for != SIZE and self.config.activations == STATIC
        if for_latency or op.family not in WITH_WEIGHT or why_weight_stays_float(node):
            return False
        return not any(match(node) for match in self.config.exclude)

    def _operands(self, node: fx.Node, request: Request, rule: Rule, kinds: dict[fx.Node, Kind]) -> list[fx.Node]:
        """The operands to quantize, in order and once each; keyword arguments count."""
        found: list[fx.Node] = []
        around = op_around(node, self.spec)
        for operand in node_inputs(operands(node, request.op)):
            usable = kinds[operand] is Kind.FLOAT or (kinds[operand] is Kind.UNKNOWN and request.op.name != "getitem")
            if usable and operand not in found and operand is not around:
                found.append(operand)
        if rule.inputs == "residual" and len(found) > 1:
            from_layer = [operand for operand in found if is_layer_output_for(operand, node)]
            if from_layer:
                found.remove(from_layer[0])
        return found

    def _withdraw_costly(self, requests: Requests, kinds: dict[fx.Node, Kind]) -> int | None:
        """Withdraw the requests whose conversions cost too much; if that leaves no layer in integers, withdraw none.

        For a small file, layers keep the request of their weight.

        Returns:
            The ``least_work`` in force; None for the backend's.
        """
        if self.config.activations != STATIC:
            return self.config.least_work
        keep = self.config.optimize_for == SIZE
        costly = too_costly(requests, kinds, self.spec, keep) if self.spec.least_work else {}
        stay = [request for node, request in requests.items() if node not in costly]
        if self.spec.least_work and not any(it.activation is not None and it.weight is not None for it in stay):
            return 0
        for node, why in costly.items():
            old, requests[node] = requests[node], Request(requests[node].op, None, TOO_COSTLY, why)
            if keep:
                weight, rank, by = old.weight, old.weight_rank, old.overridden_by
                requests[node] = replace(requests[node], weight=weight, weight_rank=rank, overridden_by=by)
        return self.config.least_work

    def _pass_on_outputs(self, requests: Requests) -> None:
        """The value of an op whose activation runs inside it is quantized after the activation."""
        for node, request in requests.items() if self.config.activations == STATIC else ():
            reader = fused_activation(node, request.op, self.spec)
            if reader is None or request.rule is None or not request.rule.output:
                continue
            if requests[reader].output is None and requests[reader].output_rank == 0:
                requests[reader].output = self.spec.activation

    def _values(
        self, requests: Requests, kinds: dict[fx.Node, Kind], left_float: dict[Read, str], overrides: Overrides
    ) -> tuple[Values, dict[fx.Node, RankedConfig]]:
        """The values that are quantized, and for each the request that it follows."""
        readers: dict[fx.Node, list[fx.Node]] = {}
        for node, request in requests.items():
            for operand in request.operands:
                readers.setdefault(operand, []).append(node)
        values: Values = {}
        followed: dict[fx.Node, RankedConfig] = {}
        for node, request in requests.items():
            by_readers = [requests[reader] for reader in readers.get(node, [])]
            configs = [(reader.activation, reader.activation_rank) for reader in by_readers]
            configs.append((request.output, request.output_rank))
            asked = [(config, rank) for config, rank in configs if config is not None]
            strongest = max((rank for _, rank in asked), default=0)
            vetoed = request.output is None and request.output_rank > strongest
            if not asked or vetoed or kinds[node] in (Kind.OTHER, Kind.WIDE):
                continue
            names = quantized_readers(node, requests, readers.get(node, []), left_float, kinds)
            if names is not None and not names:
                continue
            config, rank = max(asked, key=precedence)
            if request.output is not None and request.output.scheme.fixed_range is not None:
                config = config.with_scheme(fixed_range=request.output.scheme.fixed_range)
            followed[node] = overrides.value_config(node, request, (config, rank))
            values[node] = ValueQuant(followed[node][0], group=-1, readers=names)
        return values, followed

    def _number_groups(
        self,
        values: Values,
        asked: dict[fx.Node, RankedConfig],
        groups: Groups,
        requests: Requests,
        untrained: set[fx.Node],
        nonnegative: set[fx.Node],
        kinds: dict[fx.Node, Kind],
    ) -> None:
        """Give the values of each group one configuration and a number, in execution order."""
        members: dict[str, list[fx.Node]] = {}
        for node in values:
            members.setdefault(groups.find(node.name), []).append(node)
        for number, nodes in enumerate(members.values()):
            of_nodes = [asked[node] for node in nodes if node in asked]
            config = group_config(nodes, values, of_nodes, untrained, nonnegative, kinds)
            if not config.scale_bits_asked:
                rules = [requests[op_around(node, self.spec) or node].rule for node in nodes]
                bits = [config.scheme.scale_bits, *(rule.scale_bits for rule in rules if rule is not None)]
                config = config.with_scheme(scale_bits=max(bits))
            values |= {node: replace(values[node], config=config, group=number) for node in nodes}


def _drop_unused(values: Values, kinds: dict[fx.Node, Kind]) -> None:
    """Drop the values of which only sizes or indices are used."""
    for node in [node for node in values if node.users and all(kinds[user] is Kind.OTHER for user in node.users)]:
        used = any(u.op == "output" or u.target is eval_or_train or returns_structure(u) for u in node.users)
        if not used:
            del values[node]


def _configured(spec: BackendSpec, config: PrepareConfig) -> BackendSpec:
    """The backend with the user's changes to its weights and activations.

    Raises:
        ConfigError: the backend cannot run the changed scheme.
    """
    spec = spec.with_configs(config.weight.applied_to, config.activation.applied_to)
    for tensor, letter, change in (("weight", "w", config.weight), ("activation", "a", config.activation)):
        own = spec.weights.values() if tensor == "weight" else ()
        for changed in (getattr(spec, tensor), *own) if change.scheme else ():
            check_legal(spec, tensor, changed.scheme, f"extra_qconfig_dict: {letter}_qscheme")
    return spec if config.least_work is None else replace(spec, least_work=config.least_work)

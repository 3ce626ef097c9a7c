"""The one interpreter of backend tables: reads a spec, writes annotations, changes nothing.

In four steps, each a method:

1. wishes: every op says, by its rule, which of its operands and whether its result should be quantized;
2. values: a value is quantized once, at its producer, if its producer or a reader wishes it;
3. groups: concatenations and pass-through ops join values into groups of one scale;
4. annotations: every node gets its value's configuration, its weight's, and the reason.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from fxqat.config.config import PrepareConfig
from fxqat.config.effective import config_in_force
from fxqat.config.first_last import rules_of_ends
from fxqat.config.overrides import check_all_match
from fxqat.config.part_checks import check_arguments
from fxqat.custom_quantizer.conversion_cost import worth_it
from fxqat.custom_quantizer.override_rules import Rules, check_listed, check_shared_weights
from fxqat.custom_quantizer.position_decoding import DECODES_POSITIONS, decoding_positions
from fxqat.custom_quantizer.requests import (
    LEFT_FLOAT,
    Wish,
    claim_order,
    ends_in_activation,
    is_written_for,
    may_follow,
    only_reason,
    readers_of,
    reads_quantized,
    refusals,
    unsupported,
    wanted_behind,
)
from fxqat.custom_quantizer.sharing import Groups, group_config
from fxqat.custom_quantizer.spec import BackendSpec, Rule
from fxqat.custom_quantizer.value_kinds import NO_RANGE, always_float, untrained, value_kinds
from fxqat.ops.identify import identify, operands
from fxqat.ops.table import (
    CONCAT,
    CONSTRUCTOR,
    IDENTITY,
    MATMUL,
    NOT_FLOAT,
    OPAQUE,
    PASS_THROUGH,
    RECURRENT,
    UNBOUNDED,
    WEIGHTED,
    Op,
)
from fxqat.quantization.annotation import FLOAT, QUANTIZED, SHARES, Annotation, ValueQuant
from fxqat.scheme import TensorQConfig
from fxqat.utils.fx_graph import node_inputs, only_user
from fxqat.utils.node_meta import ANNOTATION, Kind
from fxqat.utils.train_eval_graph import eval_or_train

ADDITIONAL = Rule(reason="asked for by extra_quantizer_dict")
FAMILY_REASONS = {
    NOT_FLOAT: "gives sizes, indices or booleans",
    RECURRENT: "recurrent layers stay float",
    OPAQUE: "not an op of the table",
    CONSTRUCTOR: "a tensor constructor: quantized only where a quantized op reads it",
    UNBOUNDED: NO_RANGE,
}


class BackendQuantizer:
    """Annotates a graph by a backend's table and a user's configuration.

    Args:
        spec: the backend.
        config: the user's configuration.

    Attributes:
        in_force: after annotating, the effective configuration (see ``fxqat.config.effective``).
    """

    def __init__(self, spec: BackendSpec, config: PrepareConfig | None = None) -> None:
        self.config = config or PrepareConfig()
        self.spec = _configured(spec, self.config)

    def annotate(self, gm: fx.GraphModule) -> fx.GraphModule:
        """Write an :class:`~fxqat.quantization.annotation.Annotation` on every node; nothing else changes.

        Raises:
            ConfigError: an exclusion, addition or override matches no node or has no effect, or asks for something
                impossible.
        """
        config = self.config
        check_all_match(gm, [*config.additional, *config.exclude, *(rule.match for rule in config.overrides)])
        kinds = value_kinds(gm)
        self._outside = always_float(gm)
        kinds |= dict.fromkeys(self._outside, Kind.OTHER)
        decoding = [node for node in decoding_positions(gm, kinds) if not any(m(node) for m in config.additional)]
        self._outside |= dict.fromkeys(decoding, DECODES_POSITIONS)
        self._untrained = untrained(gm)
        self._rules = Rules(self.spec, (*rules_of_ends(config.ends, kinds), *config.overrides))
        self._claims: dict[str, tuple[TensorQConfig, int]] = {}
        wishes = {node: self._wish(node, kinds) for node in gm.graph.nodes}
        check_listed(wishes, config.additional, config.exclude)
        check_shared_weights(wishes)
        if self.spec.least_work:
            everything = wishes
            wishes = worth_it(everything, kinds, self._runs_inside, self.spec.least_work)
            if wishes is everything:
                config = replace(config, least_work=0)
        self._pass_on_outputs(wishes)
        self._refused = refusals(wishes)
        for node, wish in wishes.items():
            wish.operands = [operand for operand in wish.operands if (operand, node) not in self._refused]
        values = self._values(wishes, kinds)
        self._rules.check_effects()
        groups = self._join(wishes, values)
        for node in [n for n in values if n.users and all(kinds[user] is Kind.OTHER for user in n.users)]:
            if not any(user.op == "output" or user.target is eval_or_train for user in node.users):
                del values[node]  # only its size is read
        self._write(wishes, values, groups)
        self._rules.check_ranges(values)
        check_arguments(gm)
        self.in_force = config_in_force(gm, config, self._rules.applied)
        return gm

    # 1. wishes

    def _wish(self, node: fx.Node, kinds: dict[fx.Node, Kind]) -> Wish:
        op = identify(node)
        if op.family == WEIGHTED and node.op == "call_function":  # its weight is computed: a product of two values
            op = replace(op, family=MATMUL, inputs=2)
        if node in self._outside:
            return Wish(op, None, self._outside[node])
        rule = self.spec.rule(op.name, op.family)
        if rule is None and any(match(node) for match in self.config.additional):
            rule = ADDITIONAL
        if node.op in ("placeholder", "get_attr", "output"):
            return self._rules.apply(node, Wish(op, None, f"{node.op} of the model"))
        if kinds[node] is Kind.OTHER:
            return Wish(op, None, FAMILY_REASONS[RECURRENT if op.family == RECURRENT else NOT_FLOAT])
        if rule is None:
            return Wish(op, None, FAMILY_REASONS.get(op.family, self.spec.why_float(op.name, op.family)))
        excluded = next((match for match in self.config.exclude if match(node)), None)
        if excluded is not None:
            return Wish(op, None, f"{LEFT_FLOAT} {excluded.where}")
        wish = Wish(op, rule, rule.reason)
        if op.family == WEIGHTED:
            problem = unsupported(node)
            if problem:
                return Wish(op, None, problem)
            wish.weight = self.spec.weight_of(op.name)
        if rule.inputs != "none":
            wish.activation = self.spec.activation
        if rule.output and op.family not in (PASS_THROUGH, IDENTITY):
            wish.output = self._output_config(node, op)
        wish = self._rules.apply(node, wish)
        if wish.activation is not None:
            wish.operands = self._operands(node, op, rule, kinds)
        return wish

    def _output_config(self, node: fx.Node, op: Op) -> TensorQConfig | None:
        """The configuration of the value an op produces; None if the activation behind it is part of the op."""
        if self._fused_reader(node, op) is not None:
            return None
        config = self.spec.activation
        fixed = self.spec.fixed_ranges.get(op.name)
        return config if fixed is None else config.with_scheme(fixed_range=fixed)

    def _fused_reader(self, node: fx.Node, op: Op) -> fx.Node | None:
        """The activation that runs inside this op, if its only reader is one."""
        reader = only_user(node)
        if reader is None or op.family not in self.spec.fuses_into or ends_in_activation(node):
            return None
        return reader if identify(reader).name in self.spec.fused_activations else None

    def _runs_inside(self, node: fx.Node) -> bool:
        """Whether a node is an activation that runs inside the op before it."""
        return any(self._fused_reader(source, identify(source)) is node for source in node.all_input_nodes)

    def _operands(self, node: fx.Node, op: Op, rule: Rule, kinds: dict[fx.Node, Kind]) -> list[fx.Node]:
        """The operands to quantize, in order and once each; keyword arguments count."""
        found: list[fx.Node] = []
        for operand in node_inputs(operands(node, op)):
            usable = kinds[operand] is Kind.FLOAT or (kinds[operand] is Kind.UNKNOWN and op.name != "getitem")
            if usable and operand not in found and self._fused_reader(operand, identify(operand)) is not node:
                found.append(operand)
        if rule.inputs == "residual" and len(found) > 1:
            written_for_it = [o for o in found if is_written_for(o, node)]
            if written_for_it:
                found.remove(written_for_it[0])
        return found

    def _pass_on_outputs(self, wishes: dict[fx.Node, Wish]) -> None:
        """The output of an op whose activation runs inside it is the activation's value."""
        for node, wish in wishes.items():
            reader = self._fused_reader(node, wish.op)
            if reader is None or wish.rule is None or not wish.rule.output:
                continue
            if wishes[reader].output is None and wishes[reader].output_rank == 0:
                wishes[reader].output = self.spec.activation
                wishes[reader].reason = f"runs inside {node.name}: {wish.rule.reason}"

    # 2. values

    def _values(self, wishes: dict[fx.Node, Wish], kinds: dict[fx.Node, Kind]) -> dict[fx.Node, ValueQuant]:
        readers: dict[fx.Node, list[fx.Node]] = {}
        for node, wish in wishes.items():
            for operand in wish.operands:
                readers.setdefault(operand, []).append(node)
        values = {}
        for node, wish in wishes.items():
            wanted = [(wishes[r].activation, wishes[r].activation_rank) for r in readers.get(node, [])]
            wanted.append((wish.output, wish.output_rank))
            asked = [(config, rank) for config, rank in wanted if config is not None]
            strongest = max((rank for _, rank in asked), default=0)
            vetoed = wish.output is None and wish.output_rank > strongest
            if not asked or vetoed or kinds[node] is Kind.OTHER:
                continue
            names = readers_of(node, wishes, readers.get(node, []), self._refused)
            if names is not None and not names:
                continue
            config, rank = max(asked, key=claim_order)
            if wish.output is not None and wish.output.scheme.fixed_range is not None:
                config = config.with_scheme(fixed_range=wish.output.scheme.fixed_range)
            config, rank = self._rules.value_config(node, wish, config, rank)
            self._claims[node.name] = config, rank
            values[node] = ValueQuant(config, group=-1, readers=names)
        return values

    # 3. groups

    def _join(self, wishes: dict[fx.Node, Wish], values: dict[fx.Node, ValueQuant]) -> Groups:
        groups = Groups()
        wanted = wanted_behind(wishes, values)
        for node, wish in wishes.items():
            if wish.rule is None or wish.rule.share == "none":
                continue
            inputs = list(node_inputs(operands(node, wish.op)))
            if wish.op.family in (PASS_THROUGH, IDENTITY):
                source = inputs[0] if inputs else None
                if source not in values or not may_follow(node, values[source], wanted):
                    continue
                if values[source].readers is not None:
                    readers = values[source].readers or frozenset()
                    values[source] = replace(values[source], readers=readers | {node.name})
                follows = wish.op.family == IDENTITY or wish.op.gives_tuple
                values[node] = replace(values[source], readers=None, on_grid=True, transparent=follows)
                groups.join(source.name, node.name)
                continue
            shared = [o for o in inputs if reads_quantized(node, values.get(o))]
            for operand in shared[1:]:
                groups.join(shared[0].name, operand.name)
            if shared and wish.rule.share == "all" and node in values:
                groups.join(shared[0].name, node.name)
                if wish.op.family == CONCAT and set(inputs) <= set(shared):
                    values[node] = replace(values[node], on_grid=True)
        return groups

    # 4. annotations

    def _write(self, wishes: dict[fx.Node, Wish], values: dict[fx.Node, ValueQuant], groups: Groups) -> None:
        members: dict[str, list[fx.Node]] = {}
        for node in values:
            members.setdefault(groups.find(node.name), []).append(node)
        for number, nodes in enumerate(members.values()):
            claims = [self._claims[node.name] for node in nodes if node.name in self._claims]
            shared = group_config({node: values[node] for node in nodes}, claims, self._untrained)
            for node in nodes:
                values[node] = replace(values[node], config=shared, group=number)
        sizes = {values[nodes[0]].group: len(nodes) for nodes in members.values()}
        for node, wish in wishes.items():
            if node.op == "output":
                continue
            value = values.get(node)
            status, reason = self._explain(node, wish, value, sizes)
            name = wish.op.name if wish.op.family != OPAQUE else node.op
            node.meta[ANNOTATION] = Annotation(name, status, reason, value, wish.weight)

    def _explain(self, node: fx.Node, wish: Wish, value: ValueQuant | None, sizes: dict[int, int]) -> tuple[str, str]:
        if value is None:
            if wish.rule is None:
                return FLOAT, wish.reason
            reader = self._fused_reader(node, wish.op)
            reason = f"{wish.reason}; rounded after {reader.name}" if reader is not None else wish.reason
            if wish.weight is not None:
                return QUANTIZED, reason
            why_float = only_reason(node, self._refused) or "no quantized reader"
            return FLOAT, reason if reader is not None else f"{why_float}; {reason}"
        reason = wish.reason
        if value.readers is not None:
            reason = f"{reason}; read quantized by {', '.join(sorted(value.readers))}"
        if value.on_grid or sizes[value.group] > 1:
            return SHARES, f"{reason}; one scale for {sizes[value.group]} values"
        return QUANTIZED, reason


def _configured(spec: BackendSpec, config: PrepareConfig) -> BackendSpec:
    """The backend with the user's changes to its weights and activations."""
    spec = spec.with_configs(config.weight.applied_to, config.activation.applied_to)
    return spec if config.least_work is None else replace(spec, least_work=config.least_work)

"""The one interpreter of backend tables: reads a spec, writes annotations, changes nothing.

In four steps, each a method:

1. wishes: every op says, by its rule, which of its operands and whether its result should be quantized;
2. values: a value is quantized once, at its producer, if its producer or a reader wishes it;
3. groups: concatenations and pass-through ops join values into groups of one scale;
4. annotations: every node gets its value's configuration, its weight's, and the reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import fx

from fxqat.custom_quantizer.config import PrepareConfig
from fxqat.custom_quantizer.overrides import TensorChange, check_all_match
from fxqat.custom_quantizer.sharing import Groups
from fxqat.custom_quantizer.spec import BackendSpec, Rule
from fxqat.custom_quantizer.values import Kind, value_kinds
from fxqat.errors import ConfigError
from fxqat.nn.fused import FusedLayer
from fxqat.nn.weighted import WEIGHTED_TYPES
from fxqat.quantization import annotation
from fxqat.quantization.annotation import Annotation, ValueQuant
from fxqat.quantization.ops import (
    CONCAT,
    IDENTITY,
    NOT_FLOAT,
    OPAQUE,
    PASS_THROUGH,
    RECURRENT,
    WEIGHTED,
    Op,
    identify,
    operands,
)
from fxqat.scheme import TensorQConfig
from fxqat.utils.fx_graph import called_module, node_inputs, only_user

ADDITIONAL = Rule(reason="asked for by extra_quantizer_dict")
FAMILY_REASONS = {
    NOT_FLOAT: "gives sizes, indices or booleans",
    RECURRENT: "recurrent layers stay float",
    OPAQUE: "not an op of the table",
}


@dataclass
class _Wish:
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


class BackendQuantizer:
    """Annotates a graph by a backend's table and a user's configuration.

    Args:
        spec: the backend.
        config: the user's configuration.
    """

    def __init__(self, spec: BackendSpec, config: PrepareConfig | None = None) -> None:
        self.config = config or PrepareConfig()
        self.spec = self.config.applied_to(spec)

    def annotate(self, gm: fx.GraphModule) -> fx.GraphModule:
        """Write an :class:`~fxqat.quantization.annotation.Annotation` on every node; nothing else changes.

        Raises:
            ConfigError: an exclusion or override matches no node.
        """
        config = self.config
        check_all_match(gm, [*config.additional, *config.exclude, *(rule.match for rule in config.overrides)])
        kinds = value_kinds(gm)
        self._acting: set[int] = set()
        wishes = {node: self._wish(node, kinds) for node in gm.graph.nodes}
        self._check_rules_act()
        self._pass_on_outputs(wishes)
        values = self._values(wishes, kinds)
        groups = self._join(wishes, values)
        self._write(wishes, values, groups)
        return gm

    # 1. wishes

    def _wish(self, node: fx.Node, kinds: dict[fx.Node, Kind]) -> _Wish:
        op = identify(node)
        rule = self.spec.rule(op.name, op.family)
        if rule is None and any(match(node) for match in self.config.additional):
            rule = ADDITIONAL
        if node.op in ("placeholder", "get_attr", "output"):
            return self._overridden(node, _Wish(op, None, f"{node.op} of the model"))
        if kinds[node] is Kind.OTHER:
            return _Wish(op, None, FAMILY_REASONS[NOT_FLOAT])
        if rule is None:
            return _Wish(op, None, FAMILY_REASONS.get(op.family, f"{self.spec.name} has no rule for {op.name}"))
        excluded = next((match for match in self.config.exclude if match(node)), None)
        if excluded is not None:
            return _Wish(op, None, f"left float by {excluded.where}")
        wish = _Wish(op, rule, rule.reason)
        if op.family == WEIGHTED:
            problem = _unsupported(node)
            if problem:
                return _Wish(op, None, problem)
            wish.weight = self.spec.weight
        if rule.inputs != "none":
            wish.activation = self.spec.activation
        if rule.output and op.family not in (PASS_THROUGH, IDENTITY):
            wish.output = self._output_config(node, op)
        wish = self._overridden(node, wish)
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
        if reader is None or op.family not in self.spec.fuses_into or _ends_in_activation(node):
            return None
        return reader if identify(reader).name in self.spec.fused_activations else None

    def _overridden(self, node: fx.Node, wish: _Wish) -> _Wish:
        for rank, rule in enumerate(self.config.overrides, start=1):
            if not rule.match(node):
                continue
            base = {"weight": self.spec.weight, "activation": self.spec.activation, "output": self.spec.activation}
            acted = False
            for part, change in rule.changes.items():
                if not _can_change(wish, part, node):
                    continue
                acted = True
                current = getattr(wish, part) or base[part]
                setattr(wish, part, _changed(current, change))
                if part != "weight":
                    setattr(wish, f"{part}_rank", rank)
            if acted:
                self._acting.add(rank)
                wish.reason = f"{wish.reason}; changed by {rule.match.where}" if wish.reason else rule.match.where
        return wish

    def _operands(self, node: fx.Node, op: Op, rule: Rule, kinds: dict[fx.Node, Kind]) -> list[fx.Node]:
        """The operands to quantize, in order and once each; keyword arguments count."""
        found: list[fx.Node] = []
        for operand in node_inputs(operands(node, op)):
            usable = kinds[operand] is Kind.FLOAT or (kinds[operand] is Kind.UNKNOWN and op.name != "getitem")
            if usable and operand not in found and self._fused_reader(operand, identify(operand)) is not node:
                found.append(operand)
        if rule.inputs == "residual" and len(found) > 1:
            written_for_it = [o for o in found if _is_written_for(o, node)]
            if written_for_it:
                found.remove(written_for_it[0])
        return found

    def _check_rules_act(self) -> None:
        """A rule that matches but cannot change anything is a mistake of its writer."""
        for rank, rule in enumerate(self.config.overrides, start=1):
            if rank not in self._acting:
                raise ConfigError(
                    f"{rule.match.where}: has no effect: what it matches stays float on {self.spec.name} or has no "
                    f"{' or '.join(rule.changes)} of its own. Name it in extra_quantizer_dict, or drop the rule."
                )

    def _pass_on_outputs(self, wishes: dict[fx.Node, _Wish]) -> None:
        """The output of an op whose activation runs inside it is the activation's value."""
        for node, wish in wishes.items():
            reader = self._fused_reader(node, wish.op)
            if reader is None or wish.rule is None or not wish.rule.output:
                continue
            if wishes[reader].output is None and wishes[reader].output_rank == 0:
                wishes[reader].output = self.spec.activation
                wishes[reader].reason = f"runs inside {node.name}: {wish.rule.reason}"

    # 2. values

    def _values(self, wishes: dict[fx.Node, _Wish], kinds: dict[fx.Node, Kind]) -> dict[fx.Node, ValueQuant]:
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
            names = self._readers(node, wishes, readers.get(node, []))
            config = _strongest(asked)
            if wish.output is not None and wish.output.scheme.fixed_range is not None:
                config = config.with_scheme(fixed_range=wish.output.scheme.fixed_range)
            values[node] = ValueQuant(config, group=-1, readers=names)
        return values

    def _readers(self, node: fx.Node, wishes: dict[fx.Node, _Wish], asking: list[fx.Node]) -> frozenset[str] | None:
        """Who reads the quantized value: everyone if the producer gives it so, but for those told to read float."""
        if wishes[node].output is None:
            return frozenset(reader.name for reader in asking)
        refusing = [r for r in node.users if wishes[r].activation is None and wishes[r].activation_rank > 0]
        return frozenset(r.name for r in node.users if r not in refusing) if refusing else None

    # 3. groups

    def _join(self, wishes: dict[fx.Node, _Wish], values: dict[fx.Node, ValueQuant]) -> Groups:
        groups = Groups()
        wanted = _wanted_behind(wishes, values)
        for node, wish in wishes.items():
            if wish.rule is None or wish.rule.share == "none":
                continue
            inputs = list(node_inputs(operands(node, wish.op)))
            if wish.op.family in (PASS_THROUGH, IDENTITY):
                source = inputs[0] if inputs else None
                if source not in values or not _may_follow(node, values[source], wanted):
                    continue
                if values[source].readers is not None:
                    readers = values[source].readers or frozenset()
                    values[source] = replace(values[source], readers=readers | {node.name})
                follows = wish.op.family == IDENTITY or wish.op.name == "split"
                values[node] = replace(values[source], readers=None, on_grid=True, transparent=follows)
                groups.join(source.name, node.name)
                continue
            shared = [o for o in inputs if _reads_quantized(node, values.get(o))]
            for operand in shared[1:]:
                groups.join(shared[0].name, operand.name)
            if shared and wish.rule.share == "all" and node in values:
                groups.join(shared[0].name, node.name)
                if wish.op.family == CONCAT and set(inputs) <= set(shared):
                    values[node] = replace(values[node], on_grid=True)
        return groups

    # 4. annotations

    def _write(self, wishes: dict[fx.Node, _Wish], values: dict[fx.Node, ValueQuant], groups: Groups) -> None:
        members: dict[str, list[fx.Node]] = {}
        for node in values:
            members.setdefault(groups.find(node.name), []).append(node)
        for number, nodes in enumerate(members.values()):
            shared = _group_config([values[n] for n in nodes])
            for node in nodes:
                values[node] = replace(values[node], config=shared, group=number)
        sizes = {values[nodes[0]].group: len(nodes) for nodes in members.values()}
        for node, wish in wishes.items():
            if node.op == "output":
                continue
            value = values.get(node)
            status, reason = self._explain(node, wish, value, sizes)
            found = Annotation(
                wish.op.name if wish.op.family != OPAQUE else node.op, status, reason, value, wish.weight
            )
            node.meta[annotation.KEY] = found

    def _explain(self, node: fx.Node, wish: _Wish, value: ValueQuant | None, sizes: dict[int, int]) -> tuple[str, str]:
        if value is None:
            if wish.rule is None:
                return annotation.FLOAT, wish.reason
            reader = self._fused_reader(node, wish.op)
            reason = f"{wish.reason}; rounded after {reader.name}" if reader is not None else wish.reason
            if wish.weight is not None:
                return annotation.QUANTIZED, reason
            return annotation.FLOAT, reason if reader is not None else f"no quantized reader; {reason}"
        reason = wish.reason
        if value.readers is not None:
            reason = f"{reason}; read quantized by {', '.join(sorted(value.readers))}"
        if value.on_grid or sizes[value.group] > 1:
            return annotation.SHARES, f"{reason}; one scale for {sizes[value.group]} values"
        return annotation.QUANTIZED, reason


def _changed(config: TensorQConfig, change: TensorChange | None) -> TensorQConfig | None:
    return None if change is None else change.applied_to(config)


def _strongest(asked: list[tuple[TensorQConfig, int]]) -> TensorQConfig:
    """Of several wishes the one of the latest rule; among equals the widest."""
    return max(asked, key=lambda wish: (wish[1], wish[0].scheme.bit_width))[0]


def _can_change(wish: _Wish, part: str, node: fx.Node) -> bool:
    """Whether an override of this part of a node means anything."""
    if part == "weight":
        return wish.weight is not None or (wish.rule is not None and wish.op.family == WEIGHTED)
    if part == "output" and node.op in ("placeholder", "get_attr"):
        return True
    if wish.rule is None:
        return False
    return part != "output" or wish.op.family not in (PASS_THROUGH, IDENTITY)


def _is_written_for(operand: fx.Node, reader: fx.Node) -> bool:
    """Whether a weighted layer computes the operand for this reader alone, looking through identity ops."""
    while only_user(operand) is reader:
        op = identify(operand)
        if op.family == WEIGHTED:
            return True
        if op.family != IDENTITY or not operand.args or not isinstance(operand.args[0], fx.Node):
            return False
        operand, reader = operand.args[0], operand
    return False


def _wanted_behind(wishes: dict[fx.Node, _Wish], values: dict[fx.Node, ValueQuant]) -> set[fx.Node]:
    """Nodes whose value is quantized, or would be behind some ops that only move it."""
    wanted: set[fx.Node] = set()
    for node in reversed(wishes):
        moved = [user for user in node.users if wishes[user].op.family in (PASS_THROUGH, IDENTITY)]
        if node in values or any(user in wanted for user in moved):
            wanted.add(node)
    return wanted


def _may_follow(node: fx.Node, value: ValueQuant, wanted: set[fx.Node]) -> bool:
    """Whether a pass-through op takes the scale of its operand: if it reads it quantized, or its result is to be."""
    return _reads_quantized(node, value) or node in wanted


def _reads_quantized(node: fx.Node, value: ValueQuant | None) -> bool:
    return value is not None and (value.readers is None or node.name in value.readers)


def _group_config(values: list[ValueQuant]) -> TensorQConfig:
    """One configuration for values of one scale: the widest; a fixed range only where nothing else is in the group."""
    sources = [value for value in values if not value.on_grid] or values
    widest = max((value.config for value in sources), key=lambda config: config.scheme.bit_width)
    if len(sources) > 1:
        return widest.with_scheme(fixed_range=None)
    return widest


def _ends_in_activation(node: fx.Node) -> bool:
    module = called_module(node)
    return isinstance(module, FusedLayer) and module.activation is not None


def _unsupported(node: fx.Node) -> str:
    """Why a weighted op cannot have a quantized weight; empty if it can."""
    module = called_module(node)
    if module is None:
        return "its weight is computed, not a parameter"
    layer = module.layer if isinstance(module, FusedLayer) else module
    if type(layer) not in WEIGHTED_TYPES:
        return f"{type(layer).__name__} is not a plain layer"
    if node.kwargs or len(node.args) != 1:
        return "called with more than its input (output_size)"
    return ""

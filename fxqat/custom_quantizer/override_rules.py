"""The user's rules at work: what each changes, in order, and that none is without effect."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from fxqat.config.overrides import Match, OverrideRule, TensorChange
from fxqat.custom_quantizer.requests import LEFT_FLOAT, Wish, can_change, changed
from fxqat.custom_quantizer.spec import BackendSpec
from fxqat.errors import ConfigError
from fxqat.quantization.annotation import ValueQuant
from fxqat.scheme import QConfig, TensorQConfig
from fxqat.utils.fx_graph import called_module


class Rules:
    """Applies rules to the wishes of nodes; the rank of a rule is its place, from 1.

    Args:
        spec: the backend.
        rules: in order, later wins.

    Attributes:
        applied: the rules as they were applied: those that a function stands for are rules of a node each.
    """

    def __init__(self, spec: BackendSpec, rules: tuple[OverrideRule, ...]) -> None:
        self.spec = spec
        self.rules = rules
        self.applied: list[OverrideRule] = []
        self._acting: set[tuple[int, str]] = set()
        self._ranged: dict[str, str] = {}
        self._answers: dict[int, list[OverrideRule]] = {}

    def apply(self, node: fx.Node, wish: Wish) -> Wish:
        """Change what is wanted of a node; ``"value"`` waits for :meth:`value_config`."""
        for rank, rule in enumerate(self.rules, start=1):
            if not rule.match(node) or (rule.function is not None and wish.rule is None):
                continue
            weight, activation = self.spec.weight_of(wish.op.name), self.spec.activation
            base = {"weight": weight, "activation": activation, "output": activation}
            changes = rule.changes_of(node, QConfig(wish.weight, wish.activation, wish.output))
            if rule.function is not None and changes:
                answer = OverrideRule(replace(rule.match, node=node.name), changes)
                self._answers.setdefault(rank, []).append(answer)
            acted = False
            for part, change in changes.items():
                if part == "value" or not can_change(wish, part, node):
                    continue
                acted = True
                setattr(wish, part, changed(getattr(wish, part) or base[part], change))
                setattr(wish, f"{part}_rank", rank)
                self._acting.add((rank, part))
                self._note_range(node, rule, change)
            if acted:
                wish.reason = _with_reason(wish.reason, rule)
        return wish

    def value_config(self, node: fx.Node, wish: Wish, config: TensorQConfig, rank: int) -> tuple[TensorQConfig, int]:
        """How a value is quantized that somebody wants quantized: changed by the later rules for ``"value"``.

        Args:
            node: gives the value.
            wish: of the node; its reason names the rules.
            config: how it is wanted.
            rank: who wants it so.
        """
        for number, rule in enumerate(self.rules, start=1):
            for answer in self._answers.get(number, [rule]):
                change = answer.changes.get("value")
                if change is None or not answer.match(node):
                    continue
                self._acting.add((number, "value"))
                wish.reason = _with_reason(wish.reason, rule)
                if number > rank:
                    config, rank = change.applied_to(config), number
                    self._note_range(node, rule, change)
        return config, rank

    def check_effects(self) -> None:
        """A rule that matches but cannot change anything is a mistake of its writer.

        Raises:
            ConfigError: a part of a rule has no effect on any node, or a function none at all.
        """
        for rank, rule in enumerate(self.rules, start=1):
            idle = [part for part in rule.changes if (rank, part) not in self._acting]
            if rule.function is not None and not any(number == rank for number, _ in self._acting):
                raise ConfigError(f"{rule.match.where}: the function changes nothing; let it return a dict of changes")
            if idle:
                raise ConfigError(
                    f"{rule.match.where}: {idle[0]} has no effect: what it matches stays float on {self.spec.name} or "
                    f"has no {idle[0]} of its own. Name it in extra_quantizer_dict, or drop {idle[0]!r} from the rule."
                )
            self.applied += self._answers.get(rank, [rule])

    def check_ranges(self, values: dict[fx.Node, ValueQuant]) -> None:
        """A fixed range that was asked for is there.

        Raises:
            ConfigError: the value has its scale in common with others.
        """
        for node, value in values.items():
            where = self._ranged.get(node.name)
            if where is not None and value.config.scheme.fixed_range is None:
                raise ConfigError(
                    f"{where}: fixed_range for {node.name!r} has no effect: its scale is one with that of other values "
                    "(see the groups of the report), or a later rule observes it. Drop it."
                )

    def _note_range(self, node: fx.Node, rule: OverrideRule, change: TensorChange | None) -> None:
        if change is not None and change.scheme.get("fixed_range") is not None:
            self._ranged[node.name] = rule.match.where


def check_listed(wishes: dict[fx.Node, Wish], additional: tuple[Match, ...], exclude: tuple[Match, ...]) -> None:
    """What is listed to be quantized, or to stay float, can be.

    Raises:
        ConfigError: an addition stays float all the same, or an exclusion means an input or parameter of the model.
    """
    for match in exclude:
        nodes = [node for node in wishes if match(node)]
        if all(node.op in ("placeholder", "get_attr", "output") for node in nodes):
            raise ConfigError(
                f"{match.where}: {nodes[0].name!r} is no operation, so that leaving it out has no effect. For a value "
                f"that is read float write overrides: [{{match: {{node: {nodes[0].name}}}, output: null}}]"
            )
    for match in additional:
        nodes = [node for node in wishes if match(node)]
        if all(wishes[node].rule is None and not wishes[node].reason.startswith(LEFT_FLOAT) for node in nodes):
            reason = wishes[nodes[0]].reason
            raise ConfigError(f"{match.where}: {nodes[0].name!r} cannot be quantized: {reason}. Drop it from the list.")


def check_shared_weights(wishes: dict[fx.Node, Wish]) -> None:
    """A layer that is called several times has one weight.

    Raises:
        ConfigError: rules change it for some of the calls only.
    """
    first: dict[int, fx.Node] = {}
    for node, wish in wishes.items():
        module = called_module(node)
        if module is None or wish.op.family != "weighted":
            continue
        other = first.setdefault(id(module), node)
        if wishes[other].weight != wish.weight and max(wish.weight_rank, wishes[other].weight_rank):
            raise ConfigError(
                f"overrides: {other.name!r} and {node.name!r} are calls of one layer, with one weight; change it for "
                f"both with match: {{module: {node.target}}}"
            )


def _with_reason(reason: str, rule: OverrideRule) -> str:
    words = f"changed by {rule.match.where}"
    if words in reason:
        return reason
    return f"{reason}; {words}" if reason else rule.match.where

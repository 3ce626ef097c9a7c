"""Overrides: which nodes an entry of the user's configuration means, and what it changes."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from fxqat.errors import ConfigError
from fxqat.nn.fused import FusedLayer
from fxqat.ops.identify import identify, op_spelled
from fxqat.scheme import QConfig, TensorQConfig
from fxqat.utils.fx_graph import called_module
from fxqat.utils.node_meta import PART_OF, SPELLING, SPLIT_FROM
from fxqat.utils.torch_compat import operator_name

TENSORS = ("weight", "activation", "output", "value")
"""The tensors of a node that an override can change: its weight, the values it reads, the value it produces (twice)."""

KEYS = {
    "module": "the path of a module",
    "type": "the type of a module",
    "function": "a function",
    "node": "the name of a node",
}
"""The keys of a match, and what each takes, in words."""

LIST_NAMES = {"module": "module_name", "type": "module_type", "function": "function_type", "node": "node_name"}
"""How the lists of ``extra_quantizer_dict`` for each key end."""

LISTS = (
    "additional_function_type",
    "additional_module_type",
    "additional_node_name",
    "exclude_module_name",
    "exclude_function_type",
    "exclude_node_name",
)
"""The lists of ``extra_quantizer_dict`` that name nodes."""

SHOWN = 4
"""How many nodes an error names."""


@dataclass(frozen=True)
class TensorChange:
    """A change to how one tensor is quantized.

    Args:
        scheme: fields of :class:`~fxqat.scheme.QuantizeScheme`.
        modules: the other fields of :class:`~fxqat.scheme.TensorQConfig`: observer, fake-quant and their arguments.
        dynamic: instead of both: the values that a layer reads are quantized at run time.
    """

    scheme: Mapping[str, Any] = field(default_factory=dict)
    modules: Mapping[str, Any] = field(default_factory=dict)
    dynamic: bool = False

    def applied_to(self, config: TensorQConfig) -> TensorQConfig:
        """The changed configuration.

        A new observer or fake-quant does not inherit the arguments of the old one, and gives up a known range.
        """
        modules, scheme = dict(self.modules), dict(self.scheme)
        if "observer" in modules:
            modules.setdefault("observer_args", {})
        if "fake_quantize" in modules:
            modules.setdefault("fake_quantize_args", {})
        if "observer" in modules or modules.get("fake_quantize", "Fixed") != "Fixed":
            scheme.setdefault("fixed_range", None)
        asked = config.scale_bits_asked or "scale_bits" in scheme
        return replace(config, scheme=replace(config.scheme, **scheme), scale_bits_asked=asked, **modules)


@dataclass(frozen=True)
class Match:
    """Which nodes are meant; every key that is given must agree.

    Args:
        module: path of the called module, a glob (``layer1.*.conv1``) or ``re:`` and a regular expression.
        type: type of the called module, or its class name.
        function: function or method, or its name; it means every spelling in its row of the op table. An own
            operator is meant by its function, ``torch.ops.mylib.wavy``, or ``"mylib::wavy"``.
        node: name of the node, a glob or ``re:``.
        where: the configuration entry, for messages.
    """

    module: str | None = None
    type: type | str | None = None
    function: Callable[..., Any] | str | None = None
    node: str | None = None
    where: str = ""

    def __call__(self, node: fx.Node) -> bool:
        """Whether a node is meant."""
        tests = (
            (self.module, self._is_module),
            (self.type, self._is_type),
            (self.function, self._is_function),
            (self.node, self._is_node),
        )
        return all(test(node) for value, test in tests if value is not None)

    def _is_module(self, node: fx.Node) -> bool:
        paths = [str(node.target)] if node.op == "call_module" else []
        paths += node.meta.get(PART_OF, ())[:1]
        return any(_fits(str(self.module), path, self.where) for path in paths)

    def _is_type(self, node: fx.Node) -> bool:
        module = called_module(node)
        layers = (module, module.layer) if isinstance(module, FusedLayer) else (module,)
        types = [*map(type, layers), *node.meta.get(PART_OF, ())[1:]]
        return any(self.type in ((kind.__name__,) if isinstance(self.type, str) else (kind,)) for kind in types)

    def _is_function(self, node: fx.Node) -> bool:
        target = node.meta.get(SPELLING, node.target if node.op in ("call_function", "call_method") else None)
        if target is None:
            return False
        name = target if isinstance(target, str) else getattr(target, "__name__", "")
        if self.function in (target, name):
            return True
        operator = operator_name(target)
        if operator and (operator_name(self.function) or self.function) in (operator, operator.partition("::")[2]):
            return True
        asked, found = (op_spelled(spelling) for spelling in (self.function, target))  # type: ignore[arg-type]
        return asked is not None and (asked is found or asked.name == identify(node).name)

    def _is_node(self, node: fx.Node) -> bool:
        names = (node.name, node.meta.get(SPLIT_FROM, node.name))
        return any(_fits(str(self.node), name, self.where) for name in names)


@dataclass(frozen=True)
class Override:
    """One entry of ``overrides``.

    Args:
        match: the nodes meant.
        changes: for ``"weight"``, ``"activation"`` (the values the node reads) and ``"output"`` (the value it
            produces): the change, or None to leave it float. What is not named stays as it was. ``"value"`` also means
            the value it produces: it changes how the value is quantized, not whether.
        function: computes the changes instead, from the node's path and its configuration so far.
        recurrent: the form of a recurrent module, see ``fxqat.quantization.split_recurrent``; None as the backend has.
        split: whether an op is computed by several, see ``fxqat.quantization.split_ops``; False as the backend has.
    """

    match: Match
    changes: Mapping[str, TensorChange | None] = field(default_factory=dict)
    function: Callable[[str, QConfig], Mapping[str, TensorChange | None]] | None = None
    recurrent: str | None = None
    split: bool = False

    @property
    def is_dynamic(self) -> bool:
        """Whether it has layers quantize what they read at run time."""
        change = self.changes.get("activation")
        return change is not None and change.dynamic

    def changes_of(self, node: fx.Node, current: QConfig) -> Mapping[str, TensorChange | None]:
        """The changes for one of the nodes meant."""
        return self.changes if self.function is None else self.function(path_of(node), current)


def path_of(node: fx.Node) -> str:
    """The path of the module that a node calls, or the node's name if it calls none."""
    return str(node.target) if node.op == "call_module" else node.name


def check_all_match(gm: fx.GraphModule, matches: list[Match]) -> None:
    """Check that every match means at least one node.

    Raises:
        ConfigError: one means none; the message names the right key, or the nearest name.
    """
    nodes = list(gm.graph.nodes)
    for match in matches:
        if any(match(node) for node in nodes):
            continue
        raise ConfigError(f"{match.where}: {_words(match)} matches no node of the model.{_hint(match, nodes)}")


def _words(match: Match) -> str:
    return " with ".join(repr(str(getattr(value, "__name__", value))) for value in _given(match).values())


def _given(match: Match) -> dict[str, Any]:
    return {key: value for key in KEYS if (value := getattr(match, key)) is not None}


def _hint(match: Match, nodes: list[fx.Node]) -> str:
    """What to write instead of a match that means no node.

    1. Each key alone means nodes, only all of them together mean none.
    2. A value means nodes under another key.
    3. A name is near, under the same key.
    """
    given = _given(match)
    wrong = [key for key, value in given.items() if not _means_any(key, value, nodes)]
    if not wrong:
        return f" Each of {', '.join(map(repr, given))} matches some, but no node matches all."
    key, value = wrong[0], given[wrong[0]]
    for other, words in KEYS.items():
        if other != key and (isinstance(value, str) or other in ("type", "function")):
            found = [node for node in nodes if Match(**{other: value}, where=match.where)(node)]
            if found:
                return f" {_words(Match(**{key: value}))} is {words}: {_instead(match, key, other, found)}."
    name = str(getattr(value, "__name__", value))
    close = difflib.get_close_matches(name, _names(key, nodes), n=1, cutoff=0.3)
    return f" The nearest is {close[0]!r}." if close else ""


def _means_any(key: str, value: Any, nodes: list[fx.Node]) -> bool:
    return any(map(Match(**{key: value}), nodes))


def _instead(match: Match, key: str, other: str, found: list[fx.Node]) -> str:
    """Which key takes the value, or else which value the list of ``extra_quantizer_dict`` takes.

    Args:
        match: the match that means no node.
        key: under which the value was given.
        other: under which it means nodes.
        found: these nodes.
    """
    if match.where not in LISTS:
        return f"write {other!r} instead of {key!r}"
    prefix = match.where.partition("_")[0]
    if f"{prefix}_{LIST_NAMES[other]}" in LISTS:
        return f"put it into {prefix}_{LIST_NAMES[other]}"
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    names = ", ".join(repr(node.name) for node in found[:SHOWN])
    return f"put {names}{more} into {prefix}_{LIST_NAMES['node']}"


def _names(key: str, nodes: list[fx.Node]) -> list[str]:
    """What the nodes of a model can be called under a key."""
    parts: list[tuple[str, type]] = [node.meta[PART_OF] for node in nodes if PART_OF in node.meta]
    if key == "module":
        return [str(node.target) for node in nodes if node.op == "call_module"] + [path for path, _ in parts]
    if key == "type":
        modules = [module for node in nodes if (module := called_module(node)) is not None]
        layers = [module.layer if isinstance(module, FusedLayer) else module for module in modules]
        return [*(type(layer).__name__ for layer in layers), *(kind.__name__ for _, kind in parts)]
    if key == "node":
        return [node.name for node in nodes]
    targets = [node.meta.get(SPELLING, node.target) for node in nodes if node.op in ("call_function", "call_method")]
    return [target if isinstance(target, str) else getattr(target, "__name__", "") for target in targets]


def _fits(pattern: str, text: str, where: str) -> bool:
    if pattern.startswith("re:"):
        try:
            return re.fullmatch(pattern[3:], text) is not None
        except re.error as cause:
            raise ConfigError(f"{where}: {pattern!r} is not a regular expression: {cause}") from cause
    return fnmatch.fnmatchcase(text, pattern)

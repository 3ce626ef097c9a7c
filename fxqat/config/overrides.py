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
        return replace(config, scheme=replace(config.scheme, **scheme), **modules)


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
        ConfigError: one means none; the message gives the nearest name.
    """
    nodes = list(gm.graph.nodes)
    for match in matches:
        if any(match(node) for node in nodes):
            continue
        given = [value for value in (match.module, match.node, match.type, match.function) if value is not None]
        words = [str(getattr(value, "__name__", value)) for value in given]
        names = [str(n.target) for n in nodes if n.op == "call_module"] if match.module else [n.name for n in nodes]
        close = difflib.get_close_matches(words[0], names, n=1, cutoff=0.3)
        hint = f" The nearest is {close[0]!r}." if close else ""
        what = " with ".join(map(repr, words))
        raise ConfigError(f"{match.where}: {what} matches no node of the model.{hint}")


def _fits(pattern: str, text: str, where: str) -> bool:
    if pattern.startswith("re:"):
        try:
            return re.fullmatch(pattern[3:], text) is not None
        except re.error as cause:
            raise ConfigError(f"{where}: {pattern!r} is not a regular expression: {cause}") from cause
    return fnmatch.fnmatchcase(text, pattern)

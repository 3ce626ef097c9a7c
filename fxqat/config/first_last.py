"""The layers next to the inputs and the outputs of a model, which low bit widths hurt most."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import fx

from fxqat.config.overrides import Match, Override, TensorChange
from fxqat.errors import ConfigError
from fxqat.ops.families import WEIGHTED
from fxqat.ops.identify import identify
from fxqat.utils.node_meta import Kind


def first_last_overrides(
    first_last: Mapping[str, Mapping[str, TensorChange | None]], kinds: dict[fx.Node, Kind]
) -> tuple[Override, ...]:
    """The shorthands as ordinary overrides that name the nodes.

    Args:
        first_last: the changes per shorthand: ``"first"``, ``"last"`` or ``"first_last"``.
        kinds: of all nodes of the graph, in execution order.

    Raises:
        ConfigError: the model has no weighted layer to change.
    """
    overrides = []
    for key, changes in first_last.items():
        nodes = [*(first_layers(kinds) if "first" in key else ()), *(last_layers(kinds) if "last" in key else ())]
        if not nodes:
            raise ConfigError(
                f"{key}: the model has no convolution or linear layer next to its inputs or outputs; drop the key"
            )
        pattern = "re:" + "|".join(re.escape(name) for name in dict.fromkeys(node.name for node in nodes))
        overrides.append(Override(Match(node=pattern, where=key), changes))
    return tuple(overrides)


def first_layers(kinds: dict[fx.Node, Kind]) -> list[fx.Node]:
    """The weighted layers that read an input of the model, with no weighted layer in between, in execution order."""
    reached: set[fx.Node] = set()
    found = []
    for node, kind in kinds.items():
        if node.op != "placeholder" and not reached.intersection(node.all_input_nodes):
            continue
        if _is_weighted(node):
            found.append(node)
        elif kind is not Kind.OTHER:
            reached.add(node)
    return found


def last_layers(kinds: dict[fx.Node, Kind]) -> list[fx.Node]:
    """The weighted layers whose result is an output, with no weighted layer after them, in execution order."""
    reached: set[fx.Node] = set()
    found = []
    for node, kind in reversed(kinds.items()):
        if node.op != "output" and not reached.intersection(node.users):
            continue
        if _is_weighted(node):
            found.append(node)
        elif kind is not Kind.OTHER or node.op == "output":
            reached.add(node)
    return found[::-1]


def _is_weighted(node: fx.Node) -> bool:
    return identify(node).family == WEIGHTED

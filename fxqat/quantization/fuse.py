"""Fuse: layer, BatchNorm and activation become one module, by the table in ``fxqat.fuser_method_mappings``.

A chain is fused if

1. its ops match a row of the table, and each op is the only reader of the one before;
2. the layer and the BatchNorm are each called once in the whole graph (shared modules are not fused);
3. the BatchNorm tracks running statistics and has as many features as the layer has outputs;
4. the layer is called with its input only, and none of the modules has forward hooks.

The fused module gets the path of the layer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import fx, nn

from fxqat.errors import ConfigError
from fxqat.fuser_method_mappings import FUSIBLE_ACTIVATIONS, FUSIONS, LAYERS_AND_NORMS, Fusion
from fxqat.nn.weighted import WEIGHTED_TYPES
from fxqat.ops.identify import identify
from fxqat.utils.fx_graph import called_module, calls_of, only_user, set_module
from fxqat.utils.own_forward import type_of
from fxqat.utils.torch_compat import has_hooks


def fuse(gm: fx.GraphModule, fusions: Sequence[Fusion] = FUSIONS) -> fx.GraphModule:
    """Fuse all chains, in place, and return the graph module (without generating its code again).

    Args:
        gm: a standardized graph module.
        fusions: rows of the table; the first row that matches is used.
    """
    calls = {key: len(nodes) for key, nodes in calls_of(gm).items()}
    names = {node: _names(node) for node in gm.graph.nodes}
    for node in list(gm.graph.nodes):
        if type_of(called_module(node)) in WEIGHTED_TYPES:
            for row in fusions:
                chain = _match(node, row, calls, names)
                if chain is not None:
                    _fuse_chain(gm, row, chain)
                    break
    gm.delete_all_unused_submodules()
    gm.graph.lint()
    return gm


def check_left_out(gm: fx.GraphModule, patterns: Collection[tuple[str, ...]]) -> None:
    """Check that each pattern that the user leaves out would be fused somewhere.

    Args:
        gm: a standardized graph module.
        patterns: of rows of the table.

    Raises:
        ConfigError: one matches no chain, or only where a longer row is fused.
    """
    if not patterns:
        return
    calls = {key: len(nodes) for key, nodes in calls_of(gm).items()}
    names = {node: _names(node) for node in gm.graph.nodes}
    found: set[tuple[str, ...]] = set()
    for node in gm.graph.nodes:
        for row in FUSIONS if type_of(called_module(node)) in WEIGHTED_TYPES else ():
            if _match(node, row, calls, names) is not None:
                if row.pattern not in patterns:
                    break
                found.add(row.pattern)
    for pattern in sorted(set(patterns) - found):
        raise ConfigError(
            f"exclude_fusion_pattern: {list(pattern)} has no effect: no layer of the model would be fused by it (where "
            "a longer pattern is found, that one is fused). Drop it."
        )


def _names(node: fx.Node) -> frozenset[str]:
    """The names of a node in the table: the name of its op. SyncBatchNorm has the names of all BatchNorms."""
    if isinstance(called_module(node), nn.SyncBatchNorm):
        return frozenset(norm for _, norm in LAYERS_AND_NORMS)
    return frozenset((identify(node).name,))


def _match(
    node: fx.Node, row: Fusion, calls: dict[int, int], names: dict[fx.Node, frozenset[str]]
) -> list[fx.Node] | None:
    """The nodes that a row of the table matches, from a layer on; None if it does not match.

    Args:
        node: the call of the layer.
        row: a row of the table.
        calls: how often each module is called, by ``id``.
        names: the names of each node, see :func:`_names`.
    """
    chain: list[fx.Node] = []
    current: fx.Node | None = node
    for name in row.pattern:  # case 1
        if current is None or name not in names[current]:
            return None
        if chain and (not current.args or current.args[0] is not chain[-1]):
            return None
        chain.append(current)
        current = only_user(current)
    layer, bn = called_module(node), called_module(chain[1]) if row.norm else None
    if any(calls[id(module)] != 1 for module in (layer, bn) if module is not None):  # case 2
        return None
    if len(node.args) != 1 or node.kwargs or any(has_hooks(m) for m in map(called_module, chain) if m is not None):
        return None  # case 4
    if bn is not None and (bn.running_mean is None or bn.num_features != _outputs(layer)):  # case 3
        return None
    return chain


def _outputs(layer: nn.Module | None) -> int:
    features = getattr(layer, "out_channels", None) or getattr(layer, "out_features", None)
    assert isinstance(features, int)
    return features


def _fuse_chain(gm: fx.GraphModule, row: Fusion, chain: list[fx.Node]) -> None:
    layer = called_module(chain[0])
    assert layer is not None
    bn = called_module(chain[1]) if row.norm else None
    activation = FUSIBLE_ACTIVATIONS[row.activation]().train(layer.training) if row.activation else None
    set_module(gm, str(chain[0].target), row.fused(layer, bn, activation))
    for node in chain[:0:-1]:
        node.replace_all_uses_with(chain[0])
        gm.graph.erase_node(node)

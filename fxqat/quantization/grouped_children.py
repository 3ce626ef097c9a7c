"""Let a wide graph module have few children while it is exported.

torch.export (2.14) looks at all children of a module for each parameter below it, so the time of an export grows with
the square of the number of layers if all of them are children of one module. In groups of ``GROUP`` it does not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from torch import fx, nn

GROUP = 64
"""Children in a group, and the most that a module has without groups."""

NAME = "fxqat_group_"
PREFIX = re.compile(rf"\b{NAME}\d+\.")


@contextmanager
def grouped_children(module: nn.Module) -> Iterator[None]:
    """In the block, the children of a graph module are children of groups; afterwards it is as it was.

    Args:
        module: a graph module of any size; other modules are left alone.
    """
    children = dict(module.named_children())
    if not isinstance(module, fx.GraphModule) or len(children) <= GROUP:
        yield
        return
    groups = {name: f"{NAME}{number // GROUP}" for number, name in enumerate(children)}
    targets = {node: node.target for node in module.graph.nodes if node.op in ("call_module", "get_attr")}
    for name, group in groups.items():
        if not hasattr(module, group):
            module.add_module(group, nn.Module())
        delattr(module, name)
        module.get_submodule(group).add_module(name, children[name])
    for node, target in targets.items():
        group = groups.get(str(target).partition(".")[0], "")
        node.target = f"{group}.{target}" if group else target
    module.recompile()
    try:
        yield
    finally:
        for group in dict.fromkeys(groups.values()):
            delattr(module, group)
        for name, child in children.items():
            module.add_module(name, child)
        for node, target in targets.items():
            node.target = target
        module.recompile()


def without_groups(text: str) -> str:
    """A path, or a text with paths, without the names of groups."""
    return PREFIX.sub("", text)

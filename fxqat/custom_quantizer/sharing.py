"""Sharing groups: which values have one scale, solved once as a union of sets."""

from __future__ import annotations

from torch import fx

from fxqat.custom_quantizer.requests import claim_order
from fxqat.fake_quantize.fake_quantizes import not_learned
from fxqat.quantization.annotation import ValueQuant
from fxqat.scheme import TensorQConfig


class Groups:
    """Disjoint sets of names (union-find); a name that was never joined is alone.

    Example:
        >>> groups = Groups()
        >>> groups.join("a", "b"), groups.join("c", "b")
        (None, None)
        >>> groups.find("a") == groups.find("c"), groups.find("d")
        (True, 'd')
    """

    def __init__(self) -> None:
        self._parent: dict[str, str] = {}

    def find(self, name: str) -> str:
        """The name that stands for the set of ``name``."""
        root = name
        while self._parent.get(root, root) != root:
            root = self._parent[root]
        while self._parent.get(name, name) != root:
            self._parent[name], name = root, self._parent[name]
        return root

    def join(self, first: str, second: str) -> None:
        """Make two sets one."""
        self._parent[self.find(second)] = self.find(first)


def group_config(
    values: dict[fx.Node, ValueQuant], claims: list[tuple[TensorQConfig, int]], untrained: set[fx.Node]
) -> TensorQConfig:
    """One configuration for the values of one scale: the strongest claim.

    A known range holds for a value alone. A scale is learned where training moves a value: the range of the model's
    input is that of the data, and a gradient for its scale would cost a backward pass through the first layer.
    """
    config, rank = max(claims, key=claim_order)
    sources = [node for node, value in values.items() if not value.on_grid]
    alone = values[sources[0]].config.scheme.fixed_range if len(sources) == 1 else None
    if rank == 0 and untrained.issuperset(sources):
        config = not_learned(config)
    return config.with_scheme(fixed_range=alone)

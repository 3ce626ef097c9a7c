"""Sharing groups: which values have one scale, solved once as a union of sets."""

from __future__ import annotations


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

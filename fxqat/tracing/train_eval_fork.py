"""One forward traced twice, in eval mode and in training; what both compute is one node.

The nodes of the run in training are looked up among those of the run in eval mode; what is not there is put at its
place between them. So each mode's nodes stand in the graph in the order in which that mode made them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable
from itertools import takewhile
from typing import Any

from torch import fx, nn

from fxqat.utils.node_meta import MODE


class TrainEvalFork:
    """The run in training.

    Args:
        graph: the graph, in which the run in eval mode has ended.
        start: the last node before that run.
    """

    def __init__(self, graph: fx.Graph, start: fx.Node) -> None:
        self.graph = graph
        behind = list(takewhile(lambda node: node is not start, reversed(graph.nodes)))[::-1]
        reads = [node for node in behind if node.op == "get_attr"]
        for node in reversed(reads):
            start.append(node)  # first, where both modes find them
        self.in_eval = reads + [node for node in behind if node.op != "get_attr"]
        self.made: list[fx.Node] = []
        self._places: dict[str, list[int]] = defaultdict(list)
        for place, node in enumerate(self.in_eval):
            self._places[_key(node.op, node.target, node.args, node.kwargs)].append(place)
        self._next = 0
        self._last = reads[-1] if reads else start
        self._shared: set[fx.Node] = set()

    def node(self, op: str, target: Any, args: Any, kwargs: Any, make: Callable[[], fx.Node]) -> fx.Node:
        """The node of the run in eval mode that is the same, if it comes behind all others found so; else a new one."""
        places = self._places.get(_key(op, target, args, kwargs), [])
        found = 0 if op == "get_attr" else bisect_left(places, self._next)
        if found == len(places):
            with self.graph.inserting_after(self._last):
                made = make()
            self.made.append(made)
            self._last = made
            return made
        node: fx.Node = self.in_eval[places[found]]
        self._shared.add(node)
        if op != "get_attr":
            self._next, self._last = places[found] + 1, node
        return node

    def undo(self) -> None:
        """Erase what the run in training made."""
        for node in reversed(self.made):
            self.graph.erase_node(node)

    def shares_parameters(self, root: nn.Module) -> bool:
        """Whether nodes of the one mode and of the other compute with the same parameters.

        Then the modes do not part for a side branch, but each goes its own way through the same layers.
        """
        eval_only = [node for node in self.in_eval if node not in self._shared]
        return bool(_parameters(eval_only, root) & _parameters(self.made, root))

    def mark(self) -> None:
        """Tell the nodes of one mode only."""
        for node in self.in_eval:
            if node not in self._shared:
                node.meta[MODE] = False
        for node in self.made:
            node.meta[MODE] = True


def _key(op: str, target: Any, args: Any, kwargs: Any) -> str:
    return repr((op, target, args, kwargs))


def _parameters(nodes: list[fx.Node], root: nn.Module) -> set[str]:
    """The parameters that nodes compute with: of the modules they call, or as arguments."""
    found: set[str] = set()
    for node in nodes:
        if node.op == "call_module":
            path = str(node.target)
            found |= {f"{path}.{name}" for name, _ in root.get_submodule(path).named_parameters()}
        elif node.op != "get_attr":
            found |= {str(source.target) for source in node.all_input_nodes if source.op == "get_attr"}
    return found

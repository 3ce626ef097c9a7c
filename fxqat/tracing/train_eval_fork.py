"""One forward traced twice, in eval mode and then in training, into one graph.

Each node of the run in training is searched among the nodes of the run in eval mode. If it is there, both modes share
it; else it is inserted between them. The nodes of each mode stay in the order in which that mode made them.
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
    """Adds the run in training to a graph that has the run in eval mode.

    Args:
        graph: the graph; the run in eval mode is at its end.
        start: the last node before that run.
    """

    def __init__(self, graph: fx.Graph, start: fx.Node) -> None:
        self.graph = graph
        run = list(takewhile(lambda node: node is not start, reversed(graph.nodes)))[::-1]
        reads = [node for node in run if node.op == "get_attr"]
        for node in reversed(reads):
            start.append(node)  # at the start, so that both modes can use them
        self.in_eval = reads + [node for node in run if node.op != "get_attr"]
        self.made: list[fx.Node] = []
        self._positions: dict[str, list[int]] = defaultdict(list)
        for position, node in enumerate(self.in_eval):
            self._positions[_key(node.op, node.target, node.args, node.kwargs)].append(position)
        self._next = 0
        self._last = reads[-1] if reads else start
        self._shared: set[fx.Node] = set()

    def node(self, op: str, target: Any, args: Any, kwargs: Any, make: Callable[[], fx.Node]) -> fx.Node:
        """The equal node of the run in eval mode, if it comes after those found before; else a new node."""
        positions = self._positions.get(_key(op, target, args, kwargs), [])
        found = 0 if op == "get_attr" else bisect_left(positions, self._next)
        if found == len(positions):
            with self.graph.inserting_after(self._last):
                made = make()
            self.made.append(made)
            self._last = made
            return made
        node: fx.Node = self.in_eval[positions[found]]
        self._shared.add(node)
        if op != "get_attr":
            self._next, self._last = positions[found] + 1, node
        return node

    def undo(self) -> None:
        """Erase the nodes that the run in training made."""
        for node in reversed(self.made):
            self.graph.erase_node(node)

    def shares_parameters(self, root: nn.Module) -> bool:
        """Whether a node of eval mode only and a node of training only use the same parameter.

        Then training is not just an additional branch: the modes use the same layers in different ways.
        """
        eval_only = [node for node in self.in_eval if node not in self._shared]
        return bool(_parameters(eval_only, root) & _parameters(self.made, root))

    def mark(self) -> None:
        """Mark the nodes that run in one mode only."""
        for node in self.in_eval:
            if node not in self._shared:
                node.meta[MODE] = False
        for node in self.made:
            node.meta[MODE] = True


def _key(op: str, target: Any, args: Any, kwargs: Any) -> str:
    return repr((op, target, args, kwargs))


def _parameters(nodes: list[fx.Node], root: nn.Module) -> set[str]:
    """Names of the parameters that nodes use, through the modules they call or as arguments."""
    found: set[str] = set()
    for node in nodes:
        if node.op == "call_module":
            path = str(node.target)
            found |= {f"{path}.{name}" for name, _ in root.get_submodule(path).named_parameters()}
        elif node.op != "get_attr":
            found |= {str(source.target) for source in node.all_input_nodes if source.op == "get_attr"}
    return found

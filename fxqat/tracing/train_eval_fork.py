"""One forward traced twice, in eval mode and then in training, into one graph.

Each node of the run in training is searched among the nodes of the run in eval mode:

1. an equal node is shared by both modes;
2. so is a node that differs in numbers only, such as attention whose dropout is 0 in eval mode: it gets the number of
   the mode that runs (``eval_or_train``). So its value has one quantizer, and the nodes after it are equal;
3. so is a node with parameters that differs in its inputs, such as a layer after noise that training adds: it gets the
   value of the mode that runs;
4. any other node is inserted between those of the run in eval mode, and runs in training only.

The nodes of each mode stay in the order in which that mode made them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable
from itertools import takewhile
from typing import Any

from torch import fx, nn

from fxqat.utils.node_meta import MODE, VALUE
from fxqat.utils.train_eval_graph import eval_or_train

ANY_NUMBER = "<number>"
ANY_VALUE = "<value>"


class TrainEvalFork:
    """Adds the run in training to a graph that has the run in eval mode.

    Args:
        graph: the graph; the run in eval mode is at its end.
        start: the last node before that run.
        root: the model.
    """

    def __init__(self, graph: fx.Graph, start: fx.Node, root: nn.Module) -> None:
        self.graph, self.root = graph, root
        run = list(takewhile(lambda node: node is not start, reversed(graph.nodes)))[::-1]
        reads = [node for node in run if node.op == "get_attr"]
        for node in reversed(reads):
            start.append(node)  # at the start, so that both modes can use them
        self.in_eval = reads + [node for node in run if node.op != "get_attr"]
        self.made: list[fx.Node] = []
        self._positions: dict[str, list[int]] = defaultdict(list)
        self._similar: dict[str, list[int]] = defaultdict(list)
        self._with_parameters: dict[str, list[int]] = defaultdict(list)
        for position, node in enumerate(self.in_eval):
            self._positions[_key(node.op, node.target, node.args, node.kwargs)].append(position)
            self._similar[_key(node.op, node.target, *_without_numbers(node.args, node.kwargs))].append(position)
            if _parameters([node], root):
                self._with_parameters[_key(node.op, node.target, *_without_values(node.args, node.kwargs))].append(
                    position
                )
        self._of_mode: list[fx.Node] = []  # what cases 2 and 3 read
        self._before: list[tuple[fx.Node, Any, Any]] = []  # nodes of cases 2 and 3 with their arguments before
        self._next = 0
        self._last = reads[-1] if reads else start
        self._shared: set[fx.Node] = set()

    def node(self, op: str, target: Any, args: Any, kwargs: Any, make: Callable[[], fx.Node]) -> fx.Node:
        """The node of the run in eval mode by cases 1 to 3, if it comes after those found before; else a new node."""
        found = self._search(self._positions, op, _key(op, target, args, kwargs))
        if found is None and op in ("call_function", "call_method", "call_module"):
            found = self._search(self._similar, op, _key(op, target, *_without_numbers(args, kwargs)))
            if found is None:
                found = self._search(self._with_parameters, op, _key(op, target, *_without_values(args, kwargs)))
            if found is not None:
                self._follow_mode(self.in_eval[found], args, kwargs)
        if found is None:
            with self.graph.inserting_after(self._last):
                made = make()
            self.made.append(made)
            self._last = made
            return made
        node: fx.Node = self.in_eval[found]
        self._shared.add(node)
        if op != "get_attr":
            self._next, self._last = found + 1, node
        return node

    def _search(self, positions: dict[str, list[int]], op: str, key: str) -> int | None:
        """The first position of a node that comes after those found before."""
        known = positions.get(key, [])
        place = 0 if op == "get_attr" else bisect_left(known, self._next)
        return known[place] if place < len(known) else None

    def _follow_mode(self, node: fx.Node, args: Any, kwargs: Any) -> None:
        """Give a node of eval mode the numbers and values of training, too."""
        self._before.append((node, node.args, node.kwargs))
        with self.graph.inserting_before(node):
            node.args = self._both(node.args, args)
            node.kwargs = self._both(node.kwargs, kwargs)

    def _both(self, in_eval: Any, in_training: Any) -> Any:
        """Nested arguments, with :func:`eval_or_train` where their numbers or values differ."""
        if isinstance(in_eval, (tuple, list)):
            both = [self._both(a, b) for a, b in zip(in_eval, in_training, strict=True)]
            return tuple(both) if isinstance(in_eval, tuple) else both
        if isinstance(in_eval, dict):
            return {name: self._both(value, in_training[name]) for name, value in in_eval.items()}
        is_value = isinstance(in_eval, fx.Node)
        if not (is_value or _is_number(in_eval)) or (type(in_eval) is type(in_training) and in_eval == in_training):
            return in_eval
        made = self.graph.call_function(eval_or_train, (in_eval, in_training))
        made.meta |= in_eval.meta if is_value else {VALUE: "plain"}
        self._of_mode.append(made)
        return made

    def undo(self) -> None:
        """Erase the nodes that the run in training made, and what stands for the values of a mode."""
        for node, args, kwargs in reversed(self._before):
            node.args, node.kwargs = args, kwargs
        for node in (*reversed(self._of_mode), *reversed(self.made)):
            self.graph.erase_node(node)

    def shares_parameters(self) -> bool:
        """Whether a node of eval mode only and a node of training only use the same parameter.

        Then training is not just an additional branch: the modes use the same layers in different ways.
        """
        eval_only = [node for node in self.in_eval if node not in self._shared]
        return bool(_parameters(eval_only, self.root) & _parameters(self.made, self.root))

    def mark(self) -> None:
        """Mark the nodes that run in one mode only."""
        for node in self.in_eval:
            if node not in self._shared:
                node.meta[MODE] = False
        for node in self.made:
            node.meta[MODE] = True


def _key(op: str, target: Any, args: Any, kwargs: Any) -> str:
    return repr((op, target, args, kwargs))


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float))


def _without_numbers(*arguments: Any) -> list[Any]:
    """Arguments with a placeholder for each number; named tuples and slices are kept as they are."""

    def replaced(value: Any) -> Any:
        if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
            return [*map(replaced, value)]
        if isinstance(value, dict):
            return {name: replaced(item) for name, item in value.items()}
        return ANY_NUMBER if _is_number(value) else value

    return [replaced(value) for value in arguments]


def _without_values(*arguments: Any) -> list[Any]:
    """The same, with a placeholder for each computed value, too: parameters and buffers are kept."""

    def replaced(value: Any) -> Any:
        if isinstance(value, list):
            return [*map(replaced, value)]
        if isinstance(value, dict):
            return {name: replaced(item) for name, item in value.items()}
        return ANY_VALUE if isinstance(value, fx.Node) and value.op != "get_attr" else value

    return [replaced(value) for value in _without_numbers(*arguments)]


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

"""Graphs that compute differently in training: one graph for both modes, and the code of each.

A node that runs in one mode only is marked in its meta (``MODE``). :func:`eval_or_train` stands for the value of the
mode that runs. Such a graph is not run itself: each mode runs the graph that :func:`graph_of_mode` makes of it.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import fx, nn

from fxqat.utils.fx_graph import Call, calls_in, graph_of
from fxqat.utils.node_meta import MODE


def eval_or_train(in_eval: Any, in_training: Any) -> Any:
    """Stands in a graph for the first value in eval mode and for the second in training."""
    return in_eval


def follows_mode(value: Any) -> bool:
    """Whether an argument is False in eval mode and True in training, as ``self.training`` that forward passes on."""
    return isinstance(value, fx.Node) and value.target is eval_or_train and value.args == (False, True)


def nodes_only_in(graph: fx.Graph, training: bool) -> set[fx.Node]:
    """The nodes that run only in training, or only in eval mode, and the nodes that passes added after them."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        depends = node.target is not eval_or_train and any(source in found for source in node.all_input_nodes)
        if depends or node.meta.get(MODE) is training:
            found.add(node)
    return found


def differs_in_training(graph: fx.Graph) -> bool:
    """Whether a graph computes differently in training."""
    return any(node.target is eval_or_train or MODE in node.meta for node in graph.nodes)


def select_mode(graph: fx.Graph, training: bool) -> None:
    """Reduce a graph, in place, to what runs in one mode."""
    doomed = nodes_only_in(graph, not training)
    for node in [node for node in graph.nodes if node.target is eval_or_train]:
        value = node.args[training]
        for user in list(node.users):
            user.args = _with(user.args, node, value)
            user.kwargs = _with(user.kwargs, node, value)
        graph.erase_node(node)
    for node in reversed([node for node in graph.nodes if node in doomed]):
        graph.erase_node(node)
    for node in graph.nodes:
        node.meta.pop(MODE, None)


def graph_of_mode(graph: fx.Graph, training: bool) -> fx.Graph:
    """A copy of a graph, reduced to what runs in one mode; its nodes call the modules of the same owner."""
    result = fx.Graph()
    result.output(result.graph_copy(graph, {}))
    select_mode(result, training)
    result.owning_module = graph.owning_module
    return result


def _with(arguments: Any, node: fx.Node, value: Any) -> Any:
    replace: Any = lambda a: value if a is node else a  # noqa: E731  torch's types are narrower
    return fx.node.map_aggregate(arguments, replace)


class TrainEvalGraphModule(fx.GraphModule):
    """An fx GraphModule whose graph may compute differently in training."""

    def recompile(self) -> Any:
        """Generate the code from the graph."""
        code = super().recompile()
        if differs_in_training(self.graph):
            type(self).forward = _forward_of_both(self.graph)
        return code

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the graph as a list of calls. fx would pickle its code and trace that again, which can fail."""
        state = {name: value for name, value in self.__dict__.items() if name != "_graph"}
        return from_calls, (type(self).__base__, state, calls_in(self.graph), type(self).__name__)


def from_calls(cls: type[fx.GraphModule], state: dict[str, Any], calls: list[Call], name: str) -> Any:
    """Make a graph module of its attributes and the calls of its graph.

    Args:
        cls: the class of the graph module; fx derives a class of its own from it for each object.
        state: its attributes, modules and tensors included.
        calls: see :func:`fxqat.utils.fx_graph.calls_in`.
        name: name of the result's class.
    """
    holder = nn.Module()
    holder.__dict__.update(state)
    result = cls(holder, graph_of(calls), name)
    result.__dict__.update(state)  # fx takes over only the modules and tensors that the graph reads
    return result


def _forward_of_both(graph: fx.Graph) -> Any:
    """A forward that runs the code of the mode. Its parameters are written out: trainers read them by inspection."""
    in_eval, in_training = (_forward_of(graph, training) for training in (False, True))
    _, *parameters = [
        p.replace(default=p.empty, annotation=p.empty) for p in inspect.signature(in_eval).parameters.values()
    ]
    given = ", ".join(f"{p}={p}" if p.kind == p.KEYWORD_ONLY else str(p) for p in parameters)
    source = f"""
def forward({", ".join(["self", *map(str, parameters)])}):
    return _in_training(self, {given}) if self.training else _in_eval(self, {given})
"""
    forward = _run(source, {"_in_eval": in_eval, "_in_training": in_training})
    forward.__defaults__, forward.__kwdefaults__ = in_eval.__defaults__, in_eval.__kwdefaults__
    return forward


def _forward_of(graph: fx.Graph, training: bool) -> Any:
    code = graph_of_mode(graph, training).python_code("self")
    return _run(code.src, dict(code.globals))


def _run(source: str, namespace: dict[str, Any]) -> Any:
    """The function ``forward`` that Python code defines."""
    exec(source, namespace)  # noqa: S102  how fx makes a forward of its code
    return namespace["forward"]

"""Leaf sizes: fix the sizes of what functions and modules return that could not be traced.

The sizes of such a result may depend on the values of a tensor (``torch.arange(int(lengths.max()))``). Torch's exporter
does not know them, and cannot go on where the result meets a tensor of known sizes.
"""

from __future__ import annotations

import copy
import operator
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxqat.tracing.function_leaf import NOT_USER_PACKAGES, FunctionLeaf
from fxqat.utils.fx_graph import called_module, nodes_in
from fxqat.utils.torch_compat import CHECK


def leaf_calls(module: nn.Module) -> list[fx.Node]:
    """The calls of functions and modules that were not traced; none if the module is no graph."""
    return [node for node in nodes_in(module) if _is_leaf(called_module(node))]


def fix_leaf_sizes(gm: nn.Module, inputs: tuple[Any, ...]) -> fx.GraphModule:
    """A copy of a graph that demands these sizes of every tensor that a leaf returns.

    Args:
        gm: a lowered graph.
        inputs: example inputs.
    """
    assert isinstance(gm, fx.GraphModule)
    recorder = _Shapes(gm)
    with torch.no_grad():
        recorder.run(*inputs)
    work = copy.copy(gm)
    work.graph = copy.deepcopy(gm.graph)
    for node in leaf_calls(work):
        for dim, size in reversed(list(enumerate(recorder.shapes.get(node.name, ())))):
            with work.graph.inserting_after(node):
                found = work.graph.call_method("size", (node, dim))
            with work.graph.inserting_after(found):
                equal = work.graph.call_function(operator.eq, (found, size))
            with work.graph.inserting_after(equal):
                work.graph.call_function(CHECK, (equal,))
    work.recompile()
    return work


def _is_leaf(module: object) -> bool:
    package = type(module).__module__.partition(".")[0]
    return isinstance(module, FunctionLeaf) or (module is not None and package not in NOT_USER_PACKAGES)


class _Shapes(fx.Interpreter):
    """Runs a graph and keeps the shapes of the tensors that leaves return, by the name of the node."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.shapes: dict[str, tuple[int, ...]] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run a node."""
        result = super().run_node(n)
        if _is_leaf(called_module(n)) and isinstance(result, Tensor):
            self.shapes[n.name] = tuple(result.shape)
        return result

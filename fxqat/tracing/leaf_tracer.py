"""The fx tracer with float leaves where it cannot go on."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx, nn
from torchvision.ops import StochasticDepth

from fxqat.utils.node_meta import FloatLeaf
from fxqat.utils.source import innermost_line, line_of_failure

MODE_DEPENDENT_LEAVES: tuple[type[nn.Module], ...] = (StochasticDepth,)
"""Modules that compute differently in training: kept whole, so that ``train()`` and ``eval()`` go on working."""


class CallCounts(dict[str, int]):
    """How often each module was called: counted up by one, and back without a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __setitem__(self, path: str, count: int) -> None:
        super().__setitem__(path, count)
        self.calls.append(path)

    def back_to(self, total: int) -> None:
        """Take back all calls but the first ones."""
        while len(self.calls) > total:
            path = self.calls.pop()
            super().__setitem__(path, self[path] - 1)


class LeafTracer(fx.Tracer):
    """The fx tracer; what it cannot trace becomes a call of the smallest module around it.

    Args:
        leaf_modules: module types or dotted paths that are not traced into.
        untraceable: ``"leaf"`` as above, or ``"error"``.

    Attributes:
        leaves: what became a leaf, and why.
        path_of_failure: the innermost module that failed, when the trace as a whole did.
        attribute_names: of each parameter and buffer, by ``id``.
        attribute_proxies: those of them that the graph reads, by name.
    """

    num_calls: CallCounts

    def __init__(self, leaf_modules: Sequence[type[nn.Module] | str] = (), untraceable: str = "leaf") -> None:
        super().__init__(autowrap_functions=())
        self.num_calls = CallCounts()
        self.proxy_buffer_attributes = True
        self.leaf_types = (*MODE_DEPENDENT_LEAVES, *(leaf for leaf in leaf_modules if isinstance(leaf, type)))
        self.leaf_paths = {leaf for leaf in leaf_modules if isinstance(leaf, str)}
        self.untraceable = untraceable
        self.leaves: dict[str, FloatLeaf] = {}
        self.path_of_failure = ""
        self.attribute_names: dict[int, str] = {}
        self.attribute_proxies: dict[str, fx.Proxy] = {}

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        """Trace a module."""
        named = [*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False)]
        self.attribute_names = {id(tensor): name for name, tensor in reversed(named)}
        self.attribute_proxies = {}
        return super().trace(root, concrete_args)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Make a node that knows the line it comes from (fx's own stack traces take longer than all else)."""
        node = super().create_node(*args, **kwargs)
        file, _, line = self.users_line().rpartition(":")
        node.stack_trace = f'File "{file}", line {line}' if file else None
        return node

    def users_line(self) -> str:
        """The line of the user's code that is being traced."""
        return innermost_line(inspect.currentframe(), LeafTracer.trace.__code__)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module becomes one node. A module of torch that is made of others (attention) does not."""
        if isinstance(m, self.leaf_types) or module_qualified_name in self.leaf_paths:
            return True
        return super().is_leaf_module(m, module_qualified_name) and next(m.children(), None) is None

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        """A parameter or buffer that forward reads becomes a node."""
        name = self.attribute_names.get(id(attr_val)) if isinstance(attr_val, Tensor) else None
        if name is None:
            return attr_val
        if name not in self.attribute_proxies:
            self.attribute_proxies[name] = self.create_proxy("get_attr", name, (), {})
        return self.attribute_proxies[name]

    def is_made_here(self, m: nn.Module) -> bool:
        """Whether forward made the module itself, as in ``nn.ReLU()(x)``: it is not part of the model."""
        return m not in (self.submodule_paths or {}) and next(m.parameters(), None) is None

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Trace one module call; if that fails, take back what it traced and call less of it, or it, as a whole."""
        if self.is_made_here(m):
            return forward(*args, **kwargs)
        path, mark = self.path_of_module(m), self.mark_place()
        while True:
            try:
                return super().call_module(m, forward, args, kwargs)
            except Exception as error:
                self.path_of_failure = self.path_of_failure or path
                if self.untraceable == "error" or self.is_leaf_module(m, path):
                    raise
                cause = error
            self.rewind(mark)
            if not self.leaf_function(cause):
                break
        self.leaf_paths.add(path)
        try:
            result = super().call_module(m, forward, args, kwargs)
        except Exception:  # its arguments cannot be those of a node: the module around it may do
            self.leaf_paths.discard(path)
            self.rewind(mark)
            raise cause from None
        self.leaves[path] = FloatLeaf(path, explain(cause), line_of_failure(cause))
        self.path_of_failure = ""
        return result

    def leaf_function(self, cause: Exception) -> bool:
        """Make a leaf of a function in which an exception came up, and say whether there was one."""
        return False

    def last_node(self) -> fx.Node | None:
        """The newest node."""
        return next(iter(reversed(self.graph.nodes)), None)

    def take_back(self, last: fx.Node | None) -> None:
        """Erase every node behind one."""
        doomed = list(itertools.takewhile(lambda node: node is not last, reversed(self.graph.nodes)))
        for node in doomed:
            self.graph.erase_node(node)
            if node.op == "get_attr":
                self.attribute_proxies.pop(str(node.target), None)
            elif node.op == "call_module":
                self.leaves.pop(str(node.target), None)

    def mark_place(self) -> tuple[Any, ...]:
        """Where tracing stands, to come back to."""
        return self.last_node(), dict(self.module_stack), len(self.num_calls.calls)

    def rewind(self, mark: tuple[Any, ...]) -> None:
        """Come back to where tracing stood."""
        self.take_back(mark[0])
        self.restore_calls(mark)

    def restore_calls(self, mark: tuple[Any, ...]) -> None:
        """Forget which modules were called since tracing stood there."""
        self.module_stack.clear()
        self.module_stack.update(mark[1])
        self.num_calls.back_to(mark[2])


def explain(cause: BaseException) -> str:
    """What went wrong, in a line."""
    if type(cause) is fx.proxy.TraceError:
        return "its forward depends on the value of a tensor or on a size that is not known while tracing"
    text = str(cause).splitlines()[0] if str(cause) else ""
    return text if isinstance(cause, fx.proxy.TraceError) else f"{type(cause).__name__}: {text}"

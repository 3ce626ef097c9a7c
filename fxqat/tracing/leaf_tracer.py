"""The fx tracer, with float leaves where it cannot trace."""

from __future__ import annotations

import functools
import inspect
import itertools
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torchvision.ops import StochasticDepth

from fxqat.nn.parametrized import computed_tensors
from fxqat.nn.weighted import WEIGHTED_TYPES
from fxqat.tracing.layer_hooks import HookTrace, can_trace_hooks
from fxqat.tracing.value_proxy import DataProxy
from fxqat.tracing.written_arguments import WrittenArguments
from fxqat.utils.fx_graph import overwritten_state
from fxqat.utils.node_meta import WITHOUT_GRADIENTS, FloatLeaf
from fxqat.utils.own_forward import has_own_forward, type_of
from fxqat.utils.source import innermost_line, line_of_failure
from fxqat.utils.torch_compat import ASSERT
from fxqat.utils.training_only import is_idle

MODE_DEPENDENT_LEAVES: tuple[type[nn.Module], ...] = (StochasticDepth,)
"""Modules that compute differently in training. They are kept whole, so that they follow ``train()`` and ``eval()``."""

PROXY_IN_TEXT = re.compile(r"Proxy\((\w+)\)")
"""What a proxy looks like in a text, with the name of its node."""


class ComputedOutside(fx.proxy.TraceError):
    """A tensor was computed from parameters without a node of the graph."""


SEEDS = ("manual_seed", "seed", "set_rng_state")
"""Functions of torch that set the state of its random generator."""

DRAWS = ("rand", "randn", "randint", "randperm")
"""Functions of torch that draw random numbers without a tensor among their arguments."""


class RandomOutside(fx.proxy.TraceError):
    """Forward used the random generator of torch without a node of the graph."""


class ParameterOverwritten(fx.proxy.TraceError):
    """Forward overwrites a parameter, which the graph would do to a copy."""


class OwnForward(fx.proxy.TraceError):
    """The model has a forward of its own, which is not a function."""


class TextOfValue(fx.proxy.TraceError):
    """A text was made of a value that is not known while tracing."""


class TypeNotInGraph(fx.proxy.TraceError):
    """An argument of a node, or an output, is of a type that a graph cannot hold.

    Attributes:
        value_type: the type.
    """

    def __init__(self, value_type: type) -> None:
        super().__init__(f"a graph cannot hold a value of the type {value_type.__module__}.{value_type.__qualname__}")
        self.value_type = value_type


DTYPES: dict[Any, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}
"""The dtypes that torch takes Python's types for, as in ``torch.zeros(3, dtype=int)``."""


def _as_dtype(argument: Any) -> Any:
    return DTYPES.get(argument, argument) if isinstance(argument, type) else argument


class CallCounts(dict[str, int]):
    """How often each module was called. Can be rewound without having been copied."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __setitem__(self, path: str, count: int) -> None:
        super().__setitem__(path, count)
        self.calls.append(path)

    def rewind(self, total: int) -> None:
        """Uncount all calls after the first ``total``."""
        while len(self.calls) > total:
            path = self.calls.pop()
            super().__setitem__(path, self[path] - 1)


class LeafTracer(fx.Tracer):
    """The fx tracer. Where it fails, the smallest module around the failure is called as a whole.

    Args:
        leaf_modules: module types or dotted paths that are not traced into.
        untraceable: ``"leaf"`` as above, or ``"error"`` to raise instead.

    Attributes:
        leaves: the modules and functions that became leaves, and why.
        path_of_failure: the innermost module that failed, when the whole trace failed.
        thread: the thread that traces. torch.fx patches all modules meanwhile; other threads compute as always.
        attributes: the parameters and buffers by name.
        attribute_names: their names by ``id``.
        addresses: their names by the address of their memory.
        attribute_proxies: proxies of the parameters and buffers that the graph reads, by name.
        follows_gradients: whether the graph computes without gradients what forward does.
        random_functions: functions of torch that have no node, and so cannot be traced.
    """

    num_calls: CallCounts
    follows_gradients = False
    random_functions: tuple[str, ...] = (*SEEDS, *DRAWS)

    def __init__(self, leaf_modules: Sequence[type[nn.Module] | str] = (), untraceable: str = "leaf") -> None:
        super().__init__(autowrap_functions=())
        self.num_calls = CallCounts()
        self.leaf_types = tuple(leaf for leaf in leaf_modules if isinstance(leaf, type))
        self.leaf_paths = {leaf for leaf in leaf_modules if isinstance(leaf, str)}
        self.untraceable = untraceable
        self.leaves: dict[str, FloatLeaf] = {}
        self.path_of_failure = ""
        self.thread = threading.get_ident()
        self.attribute_names: dict[int, str] = {}
        self.attribute_proxies: dict[str, fx.Proxy] = {}
        self._tracing = False
        self._with_gradients = True
        self.attributes: dict[str, Tensor] = {}
        self.addresses: dict[int, str] = {}

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        """Trace a module."""
        self.thread = threading.get_ident()
        named = [*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False)]
        self.attribute_names = {id(tensor): name for name, tensor in reversed(named)}
        self.attribute_proxies = {}
        self.attributes = dict(named)
        self.addresses = {address_of(tensor): name for name, tensor in reversed(named) if address_of(tensor)}
        self._with_gradients = torch.is_grad_enabled()
        self._tracing = True
        try:
            with random_functions_refused(self.random_functions, self.is_computing):
                return super().trace(root, concrete_args)
        finally:
            self._tracing = False

    def create_proxy(
        self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *options: Any, **named: Any
    ) -> fx.Proxy:
        """Make a node and its proxy.

        The text of an assertion may hold values: nothing is computed with it. To torch, types of Python are dtypes.
        """
        if target is ASSERT:
            args = tuple(PROXY_IN_TEXT.sub("...", a) if isinstance(a, str) else a for a in args)
            kwargs = {name: PROXY_IN_TEXT.sub("...", a) if isinstance(a, str) else a for name, a in kwargs.items()}
        if kind == "call_method" or str(getattr(target, "__module__", "")).partition(".")[0] == "torch":
            args, kwargs = tuple(map(_as_dtype, args)), {name: _as_dtype(value) for name, value in kwargs.items()}
        return super().create_proxy(kind, target, args, kwargs, *options, **named)

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: dict[str, Any] | tuple[Any, ...] | None = None
    ) -> tuple[Any, list[Any]]:
        """As in torch.fx, see :meth:`with_any_keyword`; of the model's own forward if it has one."""
        if is_module and has_own_forward(self.root):
            own: Any = self.root.forward
            is_module = isinstance(own, MethodType) and own.__self__ is self.root
            root_fn = own.__func__ if is_module else own
            if not isinstance(root_fn, FunctionType) or inspect.unwrap(root_fn) is not root_fn:
                kind = type(root_fn).__name__
                raise OwnForward(f"the model's forward was replaced by a {kind}, whose arguments torch.fx cannot see")
        function, placeholders = super().create_args_for_root(root_fn, is_module, concrete_args)
        return self.with_any_keyword(function), placeholders

    def with_any_keyword(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A forward in which modules can be called with a keyword ``mod``, too, which torch.fx takes for the module."""

        def call(*proxies: Any) -> Any:
            traced = nn.Module.__call__

            def call_module(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
                if "mod" not in kwargs:
                    return traced(module, *args, **kwargs)
                original = functools.partial(inspect.unwrap(traced), module)
                return self.call_module(module, original, args, kwargs)

            nn.Module.__call__ = call_module  # type: ignore[method-assign]  # torch.fx restores it
            return forward(*proxies)

        return call

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Make a node that records its source line (fx's own stack traces would take most of the time)."""
        if not self._tracing:
            raise fx.proxy.TraceError("forward keeps a tensor for its next call outside of the model")
        node = super().create_node(*args, **kwargs)
        file, _, line = self.user_line().rpartition(":")
        node.stack_trace = f'File "{file}", line {line}' if file else None
        overwritten = overwritten_state(node)
        if isinstance(self.attributes.get(overwritten or ""), nn.Parameter):
            self.graph.erase_node(node)  # nobody else knows of it yet, who could undo it
            raise ParameterOverwritten(f"forward overwrites the parameter {overwritten}")
        return node

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """The proxy of a node, and a note if forward has switched gradients off."""
        if self._with_gradients and not self.follows_gradients and not torch.is_grad_enabled():
            node.meta[WITHOUT_GRADIENTS] = self.user_line()
        return DataProxy(node, self)

    def is_computing(self) -> bool:
        """Whether forward does not run now, but code that computes values, or another thread."""
        return self.in_other_thread()

    def create_arg(self, a: Any) -> Any:
        """Convert an argument of a node, or the output."""
        if type(a) is Tensor and a.requires_grad and not a.is_leaf:
            raise ComputedOutside(
                "a tensor was computed from parameters outside of the graph, as by iterating over self.parameters(): "
                "it would be a constant in the graph"
            )
        if type(a) is Tensor and address_of(a) in self.addresses and id(a) not in self.attribute_names:
            return self._alias(a, self.addresses[address_of(a)])
        proxies = PROXY_IN_TEXT.findall(a) if isinstance(a, str) else ()
        if proxies and any(node.name in proxies for node in self.graph.nodes):
            raise TextOfValue(f"the text {a!r} holds a value that is not known while tracing")
        if type(a) is OrderedDict:  # torch.fx would make a dict of it
            content = {name: self.create_arg(value) for name, value in a.items()}
            return self.create_node("call_function", OrderedDict, (content,), {})
        try:
            return super().create_arg(a)
        except NotImplementedError:
            raise TypeNotInGraph(type(a)) from None

    def _alias(self, tensor: Tensor, name: str) -> fx.Node:
        """The node of a tensor that has the memory of a parameter or buffer, as in a state dict."""
        source = self.attributes[name]
        if (source.shape, source.stride()) != (tensor.shape, tensor.stride()):
            raise ComputedOutside(
                f"a part of {name} was read outside of the graph: it would be a constant in the graph"
            )
        if name not in self.attribute_proxies:
            self.attribute_proxies[name] = self.create_proxy("get_attr", name, (), {})
        return self.create_proxy("call_method", "detach", (self.attribute_proxies[name],), {}).node

    def user_line(self) -> str:
        """The line of the user's code that is being traced."""
        return innermost_line(inspect.currentframe(), LeafTracer.trace.__code__)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module becomes one node. Modules of torch that have submodules (attention) do not."""
        if isinstance(m, self.leaf_types) or module_qualified_name in self.leaf_paths or is_idle(m):
            return True
        if has_own_forward(m):
            return False
        if isinstance(m, MODE_DEPENDENT_LEAVES) or (computed_tensors(m) and type_of(m) in WEIGHTED_TYPES):
            return True
        return super().is_leaf_module(m, module_qualified_name) and next(m.children(), None) is None

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        """A parameter or buffer that forward reads becomes a node."""
        if self.in_other_thread():
            return attr_val
        name = self.attribute_names.get(id(attr_val)) if isinstance(attr_val, Tensor) else None
        if name is None:
            return attr_val
        if name not in self.attribute_proxies:
            self.attribute_proxies[name] = self.create_proxy("get_attr", name, (), {})
        return self.attribute_proxies[name]

    def in_other_thread(self) -> bool:
        """Whether a patch of torch.fx was reached by a thread that does not trace."""
        return threading.get_ident() != self.thread

    def is_made_in_forward(self, m: nn.Module) -> bool:
        """Whether ``forward()`` created the module, as in ``nn.ReLU()(x)`` or ``nn.Sequential(*self.layers)(x)``.

        Its parameters must be those of modules of the model: others are no part of the model.
        """
        paths = self.submodule_paths or {}
        return m not in paths and all(
            part in paths or next(part.parameters(recurse=False), None) is None for part in m.modules()
        )

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Trace one module call. If that fails, undo it and make a leaf of a function inside, or of the module."""
        if self.in_other_thread() or self.is_made_in_forward(m):
            return forward(*args, **kwargs)
        path, mark, given = self.path_of_module(m), self.mark_position(), WrittenArguments.of((args, kwargs))
        if can_trace_hooks(m) and self.is_leaf_module(m, path):
            make_node = functools.partial(self._make_node_of_module, m)
            try:
                return HookTrace(self, m, path).call(make_node, args, kwargs)
            except Exception:  # noqa: BLE001  a hook may need values; it stays on the layer
                self.rewind(mark)
                given.restore()
        while True:
            try:
                return super().call_module(m, forward, args, kwargs)
            except Exception as error:
                self.path_of_failure = self.path_of_failure or path
                if self.untraceable == "error" or self.is_leaf_module(m, path):
                    raise
                cause = error
            self.rewind(mark)
            were_written = given.restore()
            if not self.make_function_leaf(cause):
                break
        if were_written:  # a node would write to copies of its arguments; perhaps the module around it has none
            raise cause
        self.leaf_paths.add(path)
        try:
            result = super().call_module(m, forward, args, kwargs)
        except Exception:  # its arguments do not fit into a node; perhaps those of the module around it do
            self.leaf_paths.discard(path)
            self.rewind(mark)
            raise cause from None
        self.leaves[path] = FloatLeaf(path, explain(cause), line_of_failure(cause))
        self.path_of_failure = ""
        return result

    def _make_node_of_module(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return super().call_module(module, module.forward, args, kwargs)

    def make_function_leaf(self, cause: Exception) -> bool:
        """Make a leaf of the function that raised an exception. False if there is none to make a leaf of."""
        return False

    def last_node(self) -> fx.Node | None:
        """The newest node."""
        return next(iter(reversed(self.graph.nodes)), None)

    def erase_after(self, last: fx.Node | None) -> None:
        """Erase every node after ``last``."""
        newer = list(itertools.takewhile(lambda node: node is not last, reversed(self.graph.nodes)))
        for node in newer:
            self.graph.erase_node(node)
            if node.op == "get_attr":
                self.attribute_proxies.pop(str(node.target), None)
            elif node.op == "call_module":
                self.leaves.pop(str(node.target), None)

    def mark_position(self) -> tuple[Any, ...]:
        """The current position of the trace, for :meth:`rewind`."""
        return self.last_node(), dict(self.module_stack), len(self.num_calls.calls)

    def rewind(self, mark: tuple[Any, ...]) -> None:
        """Go back to an earlier position."""
        self.erase_after(mark[0])
        self.rewind_calls(mark)

    def rewind_calls(self, mark: tuple[Any, ...]) -> None:
        """Forget the module calls since an earlier position."""
        self.module_stack.clear()
        self.module_stack.update(mark[1])
        self.num_calls.rewind(mark[2])


@contextmanager
def random_functions_refused(names: Sequence[str], is_computing: Callable[[], bool]) -> Iterator[None]:
    """Functions of torch raise :class:`RandomOutside` in the block, unless values are computed."""

    def refusing(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not is_computing() and not any(isinstance(value, fx.Proxy) for value in (*args, *kwargs.values())):
                raise RandomOutside(f"forward calls torch.{name}() outside of the graph")
            return original(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for owner in (torch, torch.random):
            for name in names:
                if hasattr(owner, name):
                    original = getattr(owner, name)
                    stack.callback(setattr, owner, name, original)
                    setattr(owner, name, refusing(name, original))
        yield


def address_of(tensor: Tensor) -> int:
    """The address of the memory that a tensor shares with its views and detached copies; 0 if it has none."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided and not tensor.is_meta else 0


def explain(cause: BaseException) -> str:
    """What went wrong, in one line."""
    if type(cause) is fx.proxy.TraceError:
        return "its forward depends on the value of a tensor or on a size that is not known while tracing"
    text = str(cause).splitlines()[0] if str(cause) else ""
    return text if isinstance(cause, fx.proxy.TraceError) else f"{type(cause).__name__}: {text}"

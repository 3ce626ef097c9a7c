"""Patches of Python and torch that are active while a model is traced with example inputs.

torch.fx itself patches ``nn.Module.__call__`` and ``__getattr__`` while it traces. Tracing with values needs more:

1. ``isinstance`` looks at the value of a proxy;
2. tensor constructors (``torch.arange(n)``, ``torch.zeros(b, 3)``) become nodes: without a tensor argument, torch would
   not call the tracer;
3. a buffer that forward assigns becomes a write to the buffer in the graph;
4. reading ``self.training`` gives a flag that reports a branch on it;
5. a function registered with ``torch.fx.wrap`` becomes one node, as in torch.fx. It is traced into instead if it works
   in place on its arguments, so that the graph shows what it overwrites, or if it gets a parameter, so that its layers
   are quantized;
6. torch's transformers do not inspect the values of a mask (they would only use them to choose a faster kernel);
7. a question for ``torch.is_grad_enabled()`` is recorded as a forced value;
8. ``torch.set_grad_enabled(self.training)`` is recorded as a forced True: the graph computes gradients in eval mode;
9. ``callable`` of a tensor is False, as of any tensor;
10. a function with a cache (``functools.lru_cache``) is called without it;
11. ``Variable(x)`` is ``x``;
12. ``module.to(x)`` takes the device and dtype of the example value;
13. ``len`` of a tensor is its first size, a node of the graph: Python would make a number of what ``__len__`` returns;
14. ``torch.Tensor(2, 3)`` is ``torch.empty(2, 3)``, ``torch.Tensor([a, b])`` is ``torch.tensor([a, b])`` of the default
    type, and ``torch.Tensor(x)`` is ``x``: torch would refuse proxies;
15. a distribution of ``torch.distributions`` does not inspect the values of its parameters, and draws as many numbers
    as they have then.

The patches have an effect in the thread that traces only.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType, TracebackType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, fx, nn

from fxqat.tracing.cached_functions import CACHED_FUNCTIONS, clear_caches_of_proxies
from fxqat.tracing.function_leaf import is_user_function, overwrites_arguments
from fxqat.tracing.value_proxy import TrainingFlag, ValueProxy, proxies_in, value_of
from fxqat.utils.containers import content_of, restore_content
from fxqat.utils.source import is_user_file
from fxqat.utils.torch_compat import CAUSAL_CHECK, DISTRIBUTION_SIZE, WRAPPER, load_compiler

CONSTRUCTORS = (
    "arange",
    "as_tensor",
    "asarray",
    "broadcast_shapes",
    "empty",
    "eye",
    "full",
    "linspace",
    "logspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "scalar_tensor",
    "tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
)


class NodeMaker(Protocol):
    """The part of the tracer that the patches use."""

    hashed: bool

    def create_proxy(self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Proxy:
        """Make a node."""

    def call_function_leaf(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Proxy:
        """Make a node that calls a function as a whole."""

    def branch_on_training(self, module: nn.Module) -> bool:
        """The value of ``self.training`` for a forward that branches on it."""

    def write_buffer(self, module: nn.Module, name: str, value: ValueProxy) -> None:
        """Make a node that writes a buffer."""

    def record_forced(self, expression: object, value: Any) -> None:
        """Record a value that is fixed in the graph."""


class Patches:
    """Applies the patches for one trace, as a context manager.

    Args:
        tracer: the tracer that makes the nodes.

    Attributes:
        assigned: for each proxy that forward assigned to an attribute of a module, a function that undoes this.
    """

    def __init__(self, tracer: NodeMaker) -> None:
        self.tracer = tracer
        self.assigned: list[Callable[[], None]] = []
        self._computing = False
        self._thread = 0
        self._restore = ExitStack()
        self._containers: list[tuple[Any, list[Any]]] = []
        self._copies: dict[str, Tensor] = {}

    @property
    def suspended(self) -> bool:
        """Whether the patches have no effect now: a value is being computed, or another thread runs."""
        return self._computing or threading.get_ident() != self._thread

    def __enter__(self) -> None:
        load_compiler()
        self._thread = threading.get_ident()
        with ExitStack() as stack:
            self._restore = stack
            self._patch(builtins, "isinstance", self._isinstance)
            self._patch(builtins, "callable", self._callable)
            self._patch(builtins, "len", self._len)
            for name in CONSTRUCTORS:
                self._patch(torch, name, self._constructor)
            self._patch(torch, "is_grad_enabled", self._is_grad_enabled)
            self._patch(torch.set_grad_enabled, "__init__", self._set_grad_enabled)
            self._patch(nn.Module, "__setattr__", self._setattr)
            self._patch(*WRAPPER, self._wrapper)
            self._patch(*CAUSAL_CHECK, self._causal_check)
            self._patch(torch.autograd.Variable, "__new__", self._variable)
            Tensor.__new__ = self._tensor(Tensor.__new__)  # type: ignore[method-assign]
            stack.callback(delattr, Tensor, "__new__")  # it is that of its base class
            self._patch(nn.Module, "to", self._module_to)
            self._patch(torch.distributions.Distribution, "__init__", self._distribution)
            self._patch(*DISTRIBUTION_SIZE, self._distribution_size)
            stack.enter_context(CACHED_FUNCTIONS.replaced(lambda: self.suspended))
            nn.Module.training = property(self._training, self._set_training)  # type: ignore[assignment]
            stack.callback(delattr, nn.Module, "training")
            self._restore = stack.pop_all()  # an error above this line removes the patches that were applied

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.undo_assignments(0)
        finally:
            self._restore.close()
        if self.tracer.hashed:
            clear_caches_of_proxies()

    def undo_assignments(self, first: int) -> None:
        """Undo the assignments from number ``first`` on, and restore the containers that modules hold."""
        while len(self.assigned) > first:
            self.assigned.pop()()
        for container, content in self._containers:
            restore_content(container, content)

    def watch(self, root: nn.Module) -> None:
        """Save the content of the dicts, lists and sets that the modules of a model hold (caches)."""
        inner = vars(nn.Module())
        held = [value for module in root.modules() for name, value in vars(module).items() if name not in inner]
        self._containers = [(value, content_of(value)) for value in held if isinstance(value, (dict, list, set))]

    @contextmanager
    def suspend(self) -> Iterator[None]:
        """Switch the patches off inside the block, to compute a value without gradients."""
        before, self._computing = self._computing, True
        try:
            with torch.no_grad():
                yield
        finally:
            self._computing = before

    def attribute(self, root: nn.Module, name: str) -> Tensor | None:
        """A parameter, or a copy of a buffer: computing values while tracing must not change the model."""
        owner, _, last = name.rpartition(".")
        tensor = getattr(root.get_submodule(owner), last)
        if isinstance(tensor, nn.Parameter) or not isinstance(tensor, Tensor):
            return tensor if isinstance(tensor, Tensor) else None
        if name not in self._copies:
            self._copies[name] = tensor.clone()
        return self._copies[name]

    def function(self, function: FunctionType, owners: list[Any]) -> None:
        """Make one node of each call of a function with proxies.

        Args:
            function: the function.
            owners: the namespaces (dicts) and classes in which to replace it.
        """

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.suspended or next(proxies_in((args, kwargs)), None) is None:
                return function(*args, **kwargs)
            return self.tracer.call_function_leaf(function, args, kwargs)

        for owner in owners:
            change = owner.__setitem__ if isinstance(owner, dict) else functools.partial(setattr, owner)
            members = owner if isinstance(owner, dict) else vars(owner)
            for name in [name for name, value in members.items() if value is function]:
                change(name, call)
                self._restore.callback(change, name, function)

    def _training(self, module: nn.Module) -> bool | TrainingFlag:
        if self.suspended:
            return bool(module.__dict__["training"])
        return TrainingFlag(functools.partial(self.tracer.branch_on_training, module))

    @staticmethod
    def _set_training(module: nn.Module, value: bool) -> None:
        module.__dict__["training"] = value

    def _patch(self, owner: Any, name: str, build: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        self._restore.callback(setattr, owner, name, original)
        setattr(owner, name, build(original))

    def _isinstance(self, original: Callable[..., bool]) -> Callable[..., bool]:
        def isinstance(value: Any, kinds: Any) -> bool:  # noqa: A001  it replaces the builtin
            if type(value) is ValueProxy and not self.suspended:
                traced = value.__dict__["fxqat_value"]
                if traced is not None and original(traced.data, kinds):
                    return True
            return original(value, kinds)

        return isinstance

    def _callable(self, original: Callable[[Any], bool]) -> Callable[[Any], bool]:
        def callable(value: Any) -> bool:  # noqa: A001  it replaces the builtin
            is_tensor = type(value) is ValueProxy and not self.suspended and isinstance(value, Tensor)
            return not is_tensor and original(value)

        return callable

    def _len(self, original: Callable[[Any], int]) -> Callable[[Any], Any]:
        def len(value: Any) -> Any:  # noqa: A001  it replaces the builtin
            traced = value.__dict__["fxqat_value"] if type(value) is ValueProxy and not self.suspended else None
            is_tensor = traced is not None and isinstance(traced.data, Tensor) and traced.data.dim() > 0
            return value.size(0) if is_tensor else original(value)

        return len

    def _variable(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def new(cls: type, data: Any = None, *args: Any, **kwargs: Any) -> Any:
            return data if type(data) is ValueProxy and not self.suspended else original(cls, data, *args, **kwargs)

        return new

    def _tensor(self, original: Callable[..., Tensor]) -> Callable[..., Any]:
        def new(cls: type, *args: Any, **kwargs: Any) -> Any:
            if cls is not Tensor or self.suspended or next(proxies_in((args, kwargs)), None) is None:
                return original(cls, *args, **kwargs)
            first = value_of(args[0]) if args else None
            if isinstance(first, Tensor):
                return args[0]
            if isinstance(first, int):
                return torch.empty(*args, **kwargs)
            if isinstance(first, list):
                return torch.tensor(args[0], dtype=torch.get_default_dtype(), **kwargs)
            return original(cls, *args, **kwargs)  # a tuple: whether of sizes or of values is not known

        return new

    def _module_to(self, original: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
            if self.suspended or next(proxies_in((args, kwargs)), None) is None:
                return original(module, *args, **kwargs)
            with self.suspend():
                return original(module, *value_of(args), **value_of(kwargs))

        return to

    def _distribution(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def init(distribution: Any, *args: Any, **kwargs: Any) -> None:
            original(distribution, *args, **kwargs if self.suspended else kwargs | {"validate_args": False})

        return init

    def _distribution_size(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def size(distribution: torch.distributions.Distribution, sample_shape: Any = ()) -> Any:
            sizes: tuple[Any, ...] = (sample_shape, distribution.batch_shape, distribution.event_shape)
            if self.suspended or next(proxies_in(sizes), None) is None:
                return original(distribution, sample_shape)
            return tuple(part[axis] for part in sizes for axis in range(builtins.len(value_of(part))))

        return size

    def _constructor(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def construct(*args: Any, **kwargs: Any) -> Any:
            if self.suspended:
                return original(*args, **kwargs)
            if args and type(args[0]) is np.ndarray:  # a graph holds lists
                kwargs = {"dtype": torch.from_numpy(np.empty(0, args[0].dtype)).dtype, **kwargs}
                args = (args[0].tolist(), *args[1:])
            return self.tracer.create_proxy("call_function", original, args, kwargs)

        return construct

    def _is_grad_enabled(self, original: Callable[[], bool]) -> Callable[[], bool]:
        def is_grad_enabled() -> bool:
            frame = inspect.currentframe()
            caller = frame.f_back if frame is not None else None
            if self.suspended or caller is None or not is_user_file(caller.f_code.co_filename):
                return original()
            self.tracer.record_forced("torch.is_grad_enabled()", original())
            return original()

        return is_grad_enabled

    def _set_grad_enabled(self, original: Callable[..., None]) -> Callable[..., None]:
        def set_grad_enabled(context: Any, mode: Any) -> None:
            if type(mode) is TrainingFlag:
                self.tracer.record_forced("torch.set_grad_enabled(self.training)", True)
                mode = True
            original(context, mode)

        return set_grad_enabled

    def _wrapper(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def call(*args: Any, **kwargs: Any) -> Any:
                if (
                    self.suspended
                    or next(proxies_in((args, kwargs)), None) is None
                    or any(isinstance(value_of(proxy), nn.Parameter) for proxy in proxies_in((args, kwargs)))
                    or self._overwrites(function, args, kwargs)
                ):
                    return function(*args, **kwargs)
                return self.tracer.create_proxy("call_function", function, args, kwargs)

            return call

        return wrapped

    def _overwrites(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        with self.suspend():
            try:
                return is_user_function(function) and overwrites_arguments(function, value_of(args), value_of(kwargs))
            except Exception:  # noqa: BLE001  it is called again to compute the node's value, and fails there
                return False

    def _causal_check(self, original: Callable[..., bool]) -> Callable[..., bool]:
        def is_causal(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
            return original(mask, is_causal, size) if self.suspended else bool(is_causal)

        return is_causal

    def _setattr(self, original: Callable[..., None]) -> Callable[..., None]:
        def assign(module: nn.Module, name: str, value: Any) -> None:
            buffers = module.__dict__.get("_buffers", {})
            if self.suspended or next(proxies_in(value), None) is None:
                original(module, name, value)
            elif name in buffers:
                self.tracer.write_buffer(module, name, value)
            else:  # undone at the end of the trace
                had, old = name in module.__dict__, module.__dict__.get(name)
                undo = functools.partial(module.__dict__.__setitem__, name, old)
                self.assigned.append(undo if had else functools.partial(module.__dict__.pop, name, None))
                module.__dict__[name] = value

        return assign

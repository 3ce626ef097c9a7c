"""Calls of ``torch.autograd.Function`` and of activation checkpointing while a model is traced.

1. A user's ``Function`` whose backward is the derivative of its forward is traced into, given example values; the line
   is reported, because the prepared model may keep more activations.
2. Any other becomes one node: traced into, its forward would lose the backward that belongs to it.
3. If ``apply`` was stored before, as in ``self.spike = Spike.apply``, its forward does what ``apply`` does here.
4. ``torch.utils.checkpoint`` is traced into. The prepared model keeps the activations of its region, which costs memory
   and changes no value; the line is reported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointFunction

from fxqat.tracing.function_leaf import FunctionLeaf
from fxqat.utils.fx_graph import called_module
from fxqat.utils.node_meta import FloatLeaf
from fxqat.utils.source import innermost_line, line_of_node
from fxqat.utils.torch_compat import CHECKPOINTS

ONE_CALL = (
    "a custom autograd.Function is one call, in float, with its own backward, unless example inputs show that this is "
    "the derivative of its forward"
)


class AutogradCall:
    """``Function.apply`` as the target of a node.

    Args:
        function: the user's ``Function``.
    """

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        self.function = function
        self.__name__ = function.__name__  # torch.fx and the report name a target by it

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AutogradCall) and self.function is other.function

    def __hash__(self) -> int:
        return hash(self.function)

    def __repr__(self) -> str:
        return f"{self.function.__qualname__}.apply"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Apply the function."""
        return self.function.apply(*args, **kwargs)


@contextmanager
def functions_as_calls() -> Iterator[list[str]]:
    """Apply the rules of this module in the block.

    Yields:
        The lines of the user's code with activation checkpointing, or with a Function that is traced into; they are
        added while the block runs.
    """
    checkpointed: list[str] = []

    def record() -> None:
        checkpointed.append(innermost_line(inspect.currentframe()))

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        tracer = next(tracers_in((args, kwargs)), None)
        if tracer is None:
            return original.__get__(None, cls)(*args, **kwargs)
        if cls is CheckpointFunction:
            record()
            return args[0](*args[2:])
        trace_function = getattr(tracer, "trace_autograd_function", None)
        if trace_function is not None:
            return trace_function(AutogradCall(cls), forwards.get(cls, cls.forward), args, kwargs, record)
        return tracer.create_proxy("call_function", AutogradCall(cls), args, kwargs)

    def traced(cls: type[torch.autograd.Function]) -> Callable[..., Any]:
        function = cls.forward
        has_context = cls.setup_context is torch.autograd.Function.setup_context

        def forward(*args: Any, **kwargs: Any) -> Any:
            if next(tracers_in((args, kwargs)), None) is None:
                return function(*args, **kwargs)
            with torch.enable_grad():  # which the stored apply has switched off
                return apply(cls, *(args[1:] if has_context else args), **kwargs)

        return forward

    def set_up(function: Callable[..., Any]) -> Callable[..., Any]:
        def setup_context(ctx: Any, inputs: Any, output: Any) -> Any:
            return None if next(tracers_in(inputs), None) is not None else function(ctx, inputs, output)

        return setup_context

    def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
        def checkpoint(*args: Any, **kwargs: Any) -> Any:
            if next(tracers_in((args, kwargs)), None) is not None:
                record()
            return function(*args, **kwargs)

        return checkpoint

    original = vars(torch.autograd.Function)["apply"]
    forwards: dict[type[torch.autograd.Function], Callable[..., Any]] = {}
    with ExitStack() as stack:
        for owner, name in CHECKPOINTS:
            function = getattr(owner, name)
            stack.callback(setattr, owner, name, function)
            setattr(owner, name, recorded(function))
        stack.callback(setattr, torch.autograd.Function, "apply", original)
        torch.autograd.Function.apply = classmethod(apply)
        for cls in list(_users_functions(torch.autograd.Function)):
            forwards[cls] = cls.forward
            _replace(stack, cls, "forward", staticmethod(traced(cls)))
            if cls.setup_context is not torch.autograd.Function.setup_context:
                _replace(stack, cls, "setup_context", staticmethod(set_up(cls.setup_context)))
        yield checkpointed


def _users_functions(function: type[torch.autograd.Function]) -> Iterator[type[torch.autograd.Function]]:
    """The subclasses of a ``Function`` that torch does not bring."""
    for cls in function.__subclasses__():
        if cls.__module__.partition(".")[0] != "torch":
            yield cls
        yield from _users_functions(cls)


def _replace(stack: ExitStack, cls: type, name: str, member: Any) -> None:
    """Replace a member of a class until the stack is closed."""
    if name in vars(cls):
        stack.callback(setattr, cls, name, vars(cls)[name])
    else:
        stack.callback(delattr, cls, name)
    setattr(cls, name, member)


def autograd_calls(gm: fx.GraphModule) -> Iterator[FloatLeaf]:
    """The custom Functions that a graph calls, once each, for the report."""
    seen: set[type[torch.autograd.Function]] = set()
    for node in gm.graph.nodes:
        module = called_module(node)
        call = module.function if isinstance(module, FunctionLeaf) else node.target
        if isinstance(call, AutogradCall) and call.function not in seen:
            seen.add(call.function)
            name = f"{call.function.__module__}.{call.function.__qualname__}"
            yield FloatLeaf(name, ONE_CALL, line_of_node(node) or "unknown source line")


def tracers_in(value: Any) -> Iterator[fx.proxy.TracerBase]:
    """The tracers of the proxies in nested arguments."""
    if isinstance(value, fx.Proxy):
        yield value.tracer
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tracers_in(item)
    elif isinstance(value, dict):
        yield from tracers_in(tuple(value.values()))

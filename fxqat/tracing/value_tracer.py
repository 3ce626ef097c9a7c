"""The tracer that computes each node on the example inputs when it makes the node."""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from fxqat.tracing.autograd_functions import AutogradCall
from fxqat.tracing.evaluate import evaluate
from fxqat.tracing.function_derivative import apply_forward, has_derivative_as_backward
from fxqat.tracing.function_leaf import FunctionLeaf, ModuleArgument, failing_functions, holds_module
from fxqat.tracing.leaf_tracer import SEEDS, LeafTracer, ParameterOverwritten, address_of, explain
from fxqat.tracing.open_int import FRACTIONS, open_ints, stays_open, without_open_int
from fxqat.tracing.patches import Patches
from fxqat.tracing.value_proxy import DataDependent, TracedValue, ValueProxy, value_of
from fxqat.utils.fx_graph import IN_PLACE_OPERATORS, unique_name, writes_state
from fxqat.utils.node_meta import (
    ADDRESS,
    IS_MASK,
    SHAPE,
    VALUE,
    FloatLeaf,
    ForcedNumber,
    describe,
    holds_infinity,
    is_additive_mask,
)
from fxqat.utils.source import is_user_file, line_of_failure, takes_dtype_of_another
from fxqat.utils.tensors import flatten_tensors


class ValueTracer(LeafTracer):
    """Computes each node on the example inputs when it makes the node (see ``fxqat.tracing.value_proxy``).

    Args:
        inputs: example values by argument of forward.
        leaf_modules: as for :class:`LeafTracer`.
        untraceable: as for :class:`LeafTracer`.

    Attributes:
        forced: the sizes that Python code needed as numbers, by source line.
        hashed: whether a size or a device was hashed: then caches of functions may hold proxies of this trace.
        written_inputs: lists and dicts among the inputs of which forward writes items, which the graph does not.
        changing: names of trained parameters, and of buffers that forward writes: their values are no constants.
    """

    follows_gradients = True
    random_functions: tuple[str, ...] = SEEDS

    def __init__(
        self,
        inputs: Mapping[str, Any],
        leaf_modules: Sequence[type[nn.Module] | str] = (),
        untraceable: str = "leaf",
    ) -> None:
        super().__init__(leaf_modules, untraceable)
        self.inputs = inputs
        self.forced: dict[str, ForcedNumber] = {}
        self.hashed = False
        self.changing: set[str] = set()
        self.written_inputs: list[str] = []
        self._numbers_from: set[str] = set()
        self._calls_int: dict[int, dict[str, Any]] = {}
        self._opened: dict[int, dict[str, Any]] = {}
        self._ints_stay_open = True
        self.patches = Patches(self)

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        """Trace a module; again with ``int`` of sizes left open, if there are such."""
        self.patches.watch(root)
        self.changing = {name for name, p in root.named_parameters(remove_duplicate=False) if p.requires_grad}
        with torch.enable_grad(), torch.random.fork_rng(devices=()), self.patches:
            graph = self._repeat(root, concrete_args)
            if self._calls_int:
                graph = self._with_open_ints(root, concrete_args)
        _drop_unread_numbers(graph)
        return graph

    def _repeat(self, root: Any, concrete_args: dict[str, Any] | None) -> fx.Graph:
        """Trace with more leaves until it succeeds."""
        while True:
            self.start_anew()
            try:
                graph = super().trace(root, concrete_args)
            except Exception as cause:
                self.patches.undo_assignments(0)
                if self.untraceable == "error" or not self.make_function_leaf(cause):
                    raise
                continue
            if not self._writes_what_it_read(graph) and not self.needs_another_trace():
                return graph
            self.patches.undo_assignments(0)

    def start_anew(self) -> None:
        """Forget what the trace before found about its graph."""
        self.forced, self._calls_int = {}, {}

    def _with_open_ints(self, root: Any, concrete_args: dict[str, Any] | None) -> fx.Graph:
        """Trace with ``int`` replaced. If that fails or keeps more of the model whole, trace with numbers again."""
        before, untraceable = self.not_followed(), self.untraceable
        self.untraceable = "error"  # instead of a leaf that is not needed without
        try:
            while self._calls_int:
                self.patches.undo_assignments(0)
                self._opened |= self._calls_int
                with open_ints(list(self._opened.values())):
                    graph = self._repeat(root, concrete_args)
            if self.not_followed() == before:
                return graph
        except Exception:  # noqa: BLE001  a user's forward raises anything
            self.path_of_failure = ""
        finally:
            self.untraceable = untraceable
        self.patches.undo_assignments(0)
        self._opened, self._ints_stay_open = {}, False
        return self._repeat(root, concrete_args)

    def not_followed(self) -> frozenset[str]:
        """The modules and functions of which the graph does not hold all that they compute."""
        return frozenset(self.leaves)

    def record_int(self, proxy: ValueProxy, frame: FrameType | None) -> None:
        """Record the module whose code calls ``int`` with a size, if that can stay open."""
        if not self._ints_stay_open or frame is None or not is_user_file(frame.f_code.co_filename):
            return
        if id(frame.f_globals) not in self._opened and stays_open(proxy):
            self._calls_int[id(frame.f_globals)] = frame.f_globals

    def check_constant(self, reads: frozenset[str], use: str) -> None:
        """Check that Python code may take a number from parameters and buffers.

        Args:
            reads: their names.
            use: what the code does, for the error.

        Raises:
            DataDependent: training moves one of them, or forward writes it.
        """
        moving = sorted(reads & self.changing)
        if moving:
            raise DataDependent(f"Python code {use}, which depends on {moving[0]}, and this changes")
        self._numbers_from |= reads

    def _writes_what_it_read(self, graph: fx.Graph) -> bool:
        """Whether the graph writes a buffer from which Python code took a number; then that is traced again."""
        written = {
            str(node.args[0].target)
            for node in graph.nodes
            if writes_state(node) and isinstance(node.args[0], fx.Node) and node.args[0].op == "get_attr"
        }
        new = written & self._numbers_from - self.changing
        self.changing |= new
        return bool(new)

    def is_computing(self) -> bool:
        """Whether a value is computed now, or another thread runs."""
        return self.patches.suspended

    def branch_on_training(self, module: nn.Module) -> bool:
        """The value of ``self.training`` for a forward that branches on it."""
        return False

    def needs_another_trace(self) -> bool:
        """Whether the trace succeeded, but found something for which it has to be repeated."""
        return False

    def trace_forward(self, path: str, forward: functools.partial[Any]) -> Any:
        """Trace the forward of a module."""
        return forward()

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: dict[str, Any] | tuple[Any, ...] | None = None
    ) -> tuple[Any, list[Any]]:
        """Make a placeholder for each example input, and fix the other arguments of forward to their values."""
        fixed = dict(concrete_args or {})
        signature = inspect.signature(self.root.forward)
        placeholders: list[fx.Proxy] = []
        structure: dict[str, range] = {}
        for name, parameter in signature.parameters.items():
            if name not in self.inputs:
                continue
            if parameter.kind == parameter.VAR_POSITIONAL:
                paths = [f"{name}_{i}" for i in range(len(self.inputs[name]))]
            else:
                paths = [name]
            structure[name] = range(len(placeholders), len(placeholders) + len(paths))
            placeholders += [self.create_proxy("placeholder", path, (), {}) for path in paths]

        def call(*proxies: Any) -> Any:
            positional: list[Any] = []
            named: dict[str, Any] = {}
            for name, parameter in signature.parameters.items():
                values = [proxies[i] for i in structure.get(name, ())]
                if name in fixed and fixed[name] is not parameter.default:
                    values = [fixed[name]]
                is_next = values and self._is_next_positional(parameter, positional)
                if parameter.kind == parameter.VAR_POSITIONAL or is_next:
                    positional += values
                elif values:
                    named[name] = values[0]
            return self.trace_forward("", functools.partial(self.root.forward, *positional, **named))

        return self.with_any_keyword(call), placeholders

    def _is_next_positional(self, parameter: inspect.Parameter, positional: list[Any]) -> bool:
        """Whether a parameter can be passed by position after the given positional arguments."""
        names = list(inspect.signature(self.root.forward).parameters)
        return parameter.kind != parameter.KEYWORD_ONLY and names.index(parameter.name) == len(positional)

    def make_function_leaf(self, cause: Exception) -> bool:
        """Make a leaf of the innermost function that raised an exception and is no leaf yet."""
        for function, owners in failing_functions(cause.__traceback__):
            name = f"{function.__module__}.{function.__qualname__}"
            if name not in self.leaves:
                self.patches.function(function, owners)
                self.leaves[name] = FloatLeaf(name, explain(cause), line_of_failure(cause))
                self.path_of_failure = ""
                return True
        return False

    def call_function_leaf(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Proxy:
        """Make a node that calls a leaf function, through a :class:`FunctionLeaf`.

        Raises:
            ModuleArgument: it gets a module; then the module around the call becomes the leaf.
        """
        constants: dict[int | str, Any] = {i: a for i, a in enumerate(args) if not self._fits_into_a_node(a)}
        constants |= {name: a for name, a in kwargs.items() if not self._fits_into_a_node(a)}
        if holds_module((args, kwargs)):
            raise ModuleArgument(f"{function.__name__} cannot be traced, and gets a module as an argument")
        path = self._path_of_leaf(function, constants)
        placed = tuple(None if i in constants else a for i, a in enumerate(args))
        return self.create_proxy("call_module", path, placed, {n: a for n, a in kwargs.items() if n not in constants})

    def trace_autograd_function(
        self,
        call: AutogradCall,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        record: Callable[[], None],
    ) -> Any:
        """Trace the forward of a custom Function if its backward is the derivative of that; else make one node.

        Args:
            call: the Function.
            forward: its forward.
            args: what ``apply`` gets.
            kwargs: the same, by name.
            record: what to call if the forward is traced.
        """
        mark = self.mark_position()
        with self.patches.suspend():
            try:
                values = value_of((args, kwargs))
            except DataDependent:
                values = None
            followed = values is not None and has_derivative_as_backward(self.root, call.function, forward, *values)
        self.rewind(mark)  # a closure may have been called that reads proxies
        if followed:
            try:
                result = apply_forward(call.function, forward, args, kwargs)
            except Exception:  # noqa: BLE001  a forward in other languages than Python takes no proxies
                if self.path_of_failure:  # a module that it calls became a leaf or could not
                    raise
                self.rewind(mark)
            else:
                record()
                return result
        return self.call_function_leaf(call, args, kwargs)

    def _path_of_leaf(self, function: Any, constants: dict[int | str, Any]) -> str:
        """The path of the leaf that calls this function with these constants; equal calls share it in both modes.

        The leaf is an attribute, but no child of the root: the forward of an ``nn.Sequential`` calls all children.
        """
        for path, leaf in vars(self.root).items():
            if isinstance(leaf, FunctionLeaf) and leaf.function == function and leaf.has_constants(constants):
                return path
        path = unique_name(self.root, f"{function.__name__}_leaf")
        object.__setattr__(self.root, path, FunctionLeaf(function, constants))
        return path

    def _fits_into_a_node(self, argument: Any) -> bool:
        with self.patches.suspend():
            before = self.last_node()
            try:
                self.create_arg(argument)
            except Exception:  # noqa: BLE001  fx raises several types; the argument stays outside of the graph
                return False
            finally:
                self.erase_after(before)
        return True

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Trace a module call. While a value is computed, or in another thread, just call the module."""
        if self.patches.suspended:
            return forward(*args, **kwargs)
        if self.is_made_in_forward(m):
            return super().call_module(m, forward, args, kwargs)
        path = self.path_of_module(m)
        return super().call_module(
            m, lambda *a, **k: self.trace_forward(path, functools.partial(forward, *a, **k)), args, kwargs
        )

    def mark_position(self) -> tuple[Any, ...]:
        """The current position of the trace, with the attributes assigned so far."""
        return *super().mark_position(), len(self.patches.assigned)

    def rewind(self, mark: tuple[Any, ...]) -> None:
        """Go back to an earlier position, and undo later assignments."""
        super().rewind(mark)
        self.patches.undo_assignments(mark[-1])

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        """A parameter or buffer becomes a node, except while a value is computed."""
        return attr_val if self.patches.suspended else super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_arg(self, a: Any) -> Any:
        """Convert an argument of a node. A dataclass keeps its type; a number of numpy becomes one of Python."""
        if isinstance(a, fx.Proxy):  # first, since isinstance also takes proxies for their values
            written = getattr(a, "fxqat_written", None) if type(a) is ValueProxy else None
            return a.node if written is None else self.create_arg(written)
        if isinstance(a, np.generic):
            return a.item()
        if is_dataclass(a) and not isinstance(a, type):
            given = {f.name: getattr(a, f.name) for f in fields(a) if f.init and getattr(a, f.name) is not None}
            return self.create_node("call_function", type(a), (), {n: self.create_arg(v) for n, v in given.items()})
        return super().create_arg(a)

    def create_proxy(
        self,
        kind: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str | None = None,
        type_expr: Any = None,
        proxy_factory_fn: Any = None,
    ) -> fx.Proxy:
        """Make a node and compute it. What forward computes without gradients is detached.

        Forward may catch what the call raises, and make another one: then there is no node.
        """
        without_gradients = not torch.is_grad_enabled() and not self.patches.suspended
        if self._opened:  # the type may be an argument, as a dtype
            args, kwargs = without_open_int(args, kwargs)
        with self.patches.suspend():
            node = super().create_proxy(kind, target, args, kwargs, name, type_expr, proxy_factory_fn).node
            try:
                value = self._evaluate(kind, target, args, kwargs)
            except BaseException:
                self.graph.erase_node(node)
                raise
        if kind == "call_method" and value is not None and self._returns_its_parameter(value, args, kwargs):
            self.graph.erase_node(node)
            return args[0]  # type: ignore[no-any-return]
        if value is not None:
            node.meta[VALUE] = describe(value.data)
            if isinstance(value.data, Tensor):
                node.meta[SHAPE] = tuple(value.data.shape)
            node.meta[ADDRESS] = next(map(address_of, flatten_tensors(value.data)), 0)
            is_mask = is_additive_mask(value.data) if kind == "placeholder" else holds_infinity(value.data, math.inf)
            node.meta[IS_MASK] = is_mask
        proxy = ValueProxy(node, self, value)
        if target in FRACTIONS and value is not None and type(value.data) is float:
            proxy.fxqat_operands = (target is operator.truediv, *args)
        if without_gradients and value is not None and _is_new_tensor(kind, target, value.data):
            return self.create_proxy("call_method", "detach", (proxy,), {})
        return proxy

    def _returns_its_parameter(self, value: TracedValue, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a method gave the parameter itself, since that has the type and device of another value already.

        That is ``self.weight.type_as(x)``, and ``to(x)``, ``to(x.device)`` or ``to(x.dtype)``.
        """
        if not isinstance(value.data, nn.Parameter) or value.data is not args[0].fxqat_value.data:
            return False
        of_another = any(isinstance(argument, ValueProxy) for argument in (*args[1:], *kwargs.values()))
        return of_another or takes_dtype_of_another(self.user_line())

    def write_buffer(self, module: nn.Module, name: str, value: ValueProxy) -> None:
        """Write a buffer that forward assigned; later reads of the buffer get the new value.

        If the new value has another shape, the buffer is a cache. Then later reads in this trace get the new value,
        and the graph does not write it.
        """
        buffer = dict(module.named_buffers(recurse=False))[name]
        path = self.attribute_names[id(buffer)]
        new = value.fxqat_value
        if new is not None and new.data.shape != buffer.shape:
            self.attribute_proxies[path] = value
            return
        if path not in self.attribute_proxies:
            self.attribute_proxies[path] = self.create_proxy("get_attr", path, (), {})
        self.create_proxy("call_method", "copy_", (self.attribute_proxies[path], value), {})

    def record_forced(self, expression: object, value: Any) -> None:
        """Record that the graph holds a value that Python code asked for."""
        source = self.user_line()
        self.forced.setdefault(source, ForcedNumber(str(expression), value, source))

    def _evaluate(self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TracedValue | None:
        if kind == "placeholder":
            return self._input(str(target))
        if kind == "get_attr":
            tensor = self.patches.attribute(self.root, str(target))
            return TracedValue(tensor, reads=frozenset([str(target)])) if tensor is not None else None
        if _overwrites(kind, target) and isinstance(args[0], ValueProxy) and args[0].fxqat_value is not None:
            self._check_overwritten(args[0].fxqat_value.data)
        return evaluate(self.root, kind, target, args, kwargs)

    def _check_overwritten(self, value: Any) -> None:
        """Check that a value that a call overwrites is no part of a parameter."""
        name = self.addresses.get(address_of(value), "") if isinstance(value, Tensor) else ""
        if isinstance(self.attributes.get(name), nn.Parameter):
            raise ParameterOverwritten(f"forward overwrites the parameter {name}")

    def _input(self, name: str) -> TracedValue | None:
        if name in self.inputs:
            return TracedValue(self.inputs[name], from_input=True, sized=True)
        several, _, position = name.rpartition("_")
        return TracedValue(self.inputs[several][int(position)], from_input=True, sized=True)


def _is_new_tensor(kind: str, target: Any, value: Any) -> bool:
    """Whether a call returns a tensor of floats that is not one of its operands."""
    if kind not in ("call_function", "call_method", "call_module") or not isinstance(value, Tensor):
        return False
    return value.is_floating_point() and not _overwrites(kind, target) and target != "detach"


def _overwrites(kind: str, target: Any) -> bool:
    """Whether a call is in place."""
    return target in IN_PLACE_OPERATORS or (kind == "call_method" and target.endswith("_") and target[-2:] != "__")


def _drop_unread_numbers(graph: fx.Graph) -> None:
    """Erase nodes whose values are numbers that no other node reads."""
    for node in reversed(list(graph.nodes)):
        if node.users or node.op not in ("call_function", "call_method") or node.is_impure():
            continue
        if node.meta.get(VALUE) == "plain":
            graph.erase_node(node)


def bind_arguments(
    model: nn.Module, inputs: tuple[Any, ...], concrete_args: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Example inputs by argument name, and the arguments that are left at their default or given as None.

    Args:
        model: the model that takes the inputs.
        inputs: the inputs, without those in ``concrete_args``.
        concrete_args: arguments that already have a value.

    Raises:
        TypeError: the inputs do not fit the signature of forward.
    """
    signature = inspect.signature(model.forward)
    free = [p for name, p in signature.parameters.items() if name not in concrete_args]
    bound = signature.replace(parameters=free).bind(*inputs)
    given = {name: value for name, value in bound.arguments.items() if value is not None}
    bound.apply_defaults()
    variable = {p.name for p in free if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    fixed = {name: value for name, value in bound.arguments.items() if name not in given and name not in variable}
    return given, fixed

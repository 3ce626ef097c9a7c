"""Trace: the user's model becomes a graph.

The model is copied first; shared modules and tied weights stay shared in the copy. Three steps are tried:

1. With example inputs, each node is computed when it is traced, so that Python code can look at sizes, lengths and
   types (``fxqat.tracing.value_proxy``).
2. Without them, or if step 1 fails as a whole, ``torch.fx`` traces symbolically.
3. Code that neither can trace becomes a call of the smallest function or module around it, which stays float.

A failure in the forward of the model itself raises :class:`~fxqat.errors.TraceError` with the source line and the
remedies.
"""

from __future__ import annotations

import copy
import difflib
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import fx, nn

from fxqat.errors import ConfigError, TraceError
from fxqat.ops.identify import works_in_place
from fxqat.tracing.autograd_functions import autograd_calls, functions_as_calls
from fxqat.tracing.batch_norm_calls import batch_norms_to_modules
from fxqat.tracing.layer_hooks import settle_hooks
from fxqat.tracing.leaf_tracer import LeafTracer, ParameterOverwritten, TypeNotInGraph, explain
from fxqat.tracing.python_state import held_objects, items_of, python_state_kept
from fxqat.tracing.scripted_functions import scripted_as_python
from fxqat.tracing.train_eval_tracer import TrainEvalTracer
from fxqat.tracing.value_tracer import bind_arguments
from fxqat.tracing.written_constants import constants_of, copy_written_constants
from fxqat.utils.closures import copy_with_closures
from fxqat.utils.contexts import buffers_kept
from fxqat.utils.fx_graph import copy_modes
from fxqat.utils.node_meta import WITHOUT_GRADIENTS, FloatLeaf, ForcedNumber, describe
from fxqat.utils.source import UNKNOWN_LINE, line_of_failure
from fxqat.utils.tensors import copies_by_hand, copy_by_hand
from fxqat.utils.torch_compat import copy_tensor_hooks, has_accumulation_hooks, without_compiler
from fxqat.utils.train_eval_graph import TrainEvalGraphModule
from fxqat.utils.training_only import mark_if_idle

OVERWRITTEN = "forward overwrites its input"
"""How a remark about an input that forward writes in place begins."""

ONE_TRACE = threading.RLock()
"""Held while a model is traced: torch.fx and fxqat patch torch meanwhile, for the thread that traces."""


class Traced(NamedTuple):
    """The result of tracing.

    Args:
        root: the copy of the model, whose tensors the graph module shares.
        gm: the graph module, in the mode of the model.
        fixed: names of the arguments of forward that torch.fx fixed to a value.
        values: of all arguments that are fixed, by name: those of the user, and defaults.
        state_changes: what forward changes outside of parameters and buffers.
        concrete_args: arguments that the user fixed to a value.
        forced: sizes that the graph holds as numbers.
        leaves: modules and functions that could not be traced.
        eval_only: modules that compute differently in training, of which the graph holds eval mode only.
        checkpointed: lines of the user's code with activation checkpointing, which the graph does not have, or with a
            custom ``autograd.Function`` that is traced into.
    """

    root: nn.Module
    gm: fx.GraphModule
    fixed: tuple[str, ...] = ()
    forced: tuple[ForcedNumber, ...] = ()
    leaves: tuple[FloatLeaf, ...] = ()
    eval_only: tuple[str, ...] = ()
    checkpointed: tuple[str, ...] = ()
    state_changes: tuple[str, ...] = ()
    concrete_args: Mapping[str, Any] = MappingProxyType({})
    values: Mapping[str, Any] = MappingProxyType({})

    @property
    def remarks(self) -> dict[str, tuple[Any, ...]]:
        """What the report says about tracing."""
        names = ("leaves", "forced", "eval_only", "checkpointed", "state_changes")
        return {name: getattr(self, name) for name in names}


class TracedGraphModule(TrainEvalGraphModule):
    """Generates its code at the first call: the passes after tracing only need the graph."""

    def recompile(self) -> Any:
        """Delete the code."""
        if "forward" in vars(type(self)):  # fx makes a class for each graph module
            del type(self).forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Generate the code, which replaces this method, and run it."""
        super().recompile()
        return type(self).forward(self, *args, **kwargs)


def trace(
    model: nn.Module,
    custom_tracer: fx.Tracer | None = None,
    *,
    leaf_modules: Sequence[type[nn.Module] | str] = (),
    concrete_args: Mapping[str, Any] | None = None,
    example_inputs: tuple[Any, ...] | None = None,
    untraceable: str = "leaf",
) -> Traced:
    """Copy a model and trace the copy in eval mode.

    Args:
        model: the user's model; not changed.
        custom_tracer: a tracer to use instead of steps 1 to 3.
        leaf_modules: module types, names of types, or paths to keep whole (not together with ``custom_tracer``).
        concrete_args: arguments of ``forward`` fixed to a value, as in ``torch.fx.symbolic_trace``.
        example_inputs: the model's inputs, for step 1. Arguments that they leave out are fixed to their defaults.
        untraceable: ``"leaf"`` (step 3) or ``"error"``.

    Raises:
        ConfigError: a leaf or an argument does not exist in the model, or leaves are given with a custom tracer.
        TraceError: the model cannot be copied or traced.
    """
    leaf_modules = _resolved_leaves(model, custom_tracer, leaf_modules)
    _check_arguments(model, concrete_args or {})
    try:
        root = copy_model(model)
    except Exception as cause:
        raise TraceError(f"cannot copy {type(model).__name__}: {cause}. Make the model deep-copyable.") from cause
    root.eval()
    for module in root.modules():
        mark_if_idle(module)
    held = constants_of(root)
    fixed = dict(concrete_args or {})
    tracers: list[fx.Tracer] = [LeafTracer(leaf_modules, untraceable)] if custom_tracer is None else [custom_tracer]
    if example_inputs is not None and custom_tracer is None:
        given, defaults = _bind(root, example_inputs, fixed)
        fixed = defaults | fixed
        tracers.insert(0, TrainEvalTracer(copy.deepcopy(given), leaf_modules, untraceable))
    remedies = partial(_remedies, model, concrete_args or {}, example_inputs is not None, custom_tracer is not None)
    with (
        ONE_TRACE,
        without_compiler(),
        buffers_kept(root),
        scripted_as_python(),
        functions_as_calls() as checkpointed,
        python_state_kept(root) as state_changes,
    ):
        graph, tracer = _first_success(model, root, tracers, fixed, remedies)
    _keep_signature(graph, root, tracer.inputs if isinstance(tracer, TrainEvalTracer) else {})
    copy_modes(model, root)
    gm = TracedGraphModule(root, graph, type(model).__name__)
    copy_written_constants(gm.graph, held)
    hooked = settle_hooks(gm)
    copy_modes(root, gm)
    batch_norms_to_modules(root, gm, tracer.batch_norms if isinstance(tracer, TrainEvalTracer) else None)
    written = tracer.written_inputs if isinstance(tracer, TrainEvalTracer) else []
    state_changes += [
        f"{OVERWRITTEN} {name}: the prepared model leaves the caller's list or dict as it is" for name in written
    ]
    state_changes += [
        f"what the forward hooks of {path} compute is in the graph: they do not run again" for path in hooked
    ]
    leaves = (*(tracer.leaves.values() if isinstance(tracer, LeafTracer) else ()), *autograd_calls(gm))
    with_values = isinstance(tracer, TrainEvalTracer)
    eval_only = tracer.eval_only if isinstance(tracer, TrainEvalTracer) else ()
    return Traced(
        root,
        gm,
        fixed=() if with_values else tuple(fixed),
        forced=tuple(tracer.forced.values()) if isinstance(tracer, TrainEvalTracer) else (),
        leaves=leaves,
        eval_only=tuple(dict.fromkeys(path or type(model).__name__ for path in eval_only)),
        checkpointed=tuple(dict.fromkeys(checkpointed)),
        state_changes=tuple(dict.fromkeys([*state_changes, *_not_followed(graph, model)])),
        concrete_args=dict(concrete_args or {}),
        values=fixed,
    )


def _not_followed(graph: fx.Graph, model: nn.Module) -> Iterator[str]:
    """What the prepared model does not do besides computing its outputs.

    1. Forward overwrites an input: the prepared model computes the same and leaves the caller's tensor.
    2. Forward switches gradients off, and was traced without values.
    3. A parameter has a hook that runs after its gradient was added: mostly it steps an optimizer of this parameter.
    """
    for node in graph.nodes:
        first = node.args[0] if node.args else None
        if isinstance(first, fx.Node) and first.op == "placeholder" and works_in_place(node):
            yield f"{OVERWRITTEN} {first.target}: the prepared model leaves the caller's tensor as it is"
    for line in filter(None, (node.meta.get(WITHOUT_GRADIENTS) for node in graph.nodes)):
        yield f"forward switches gradients off, the prepared model only if it is given example_inputs ({line})"
    for name, parameter in model.named_parameters():
        if has_accumulation_hooks(parameter):
            yield f"register_post_accumulate_grad_hook of {name} is not kept: register it on the prepared model"


def copy_model(model: nn.Module) -> nn.Module:
    """A deep copy of a model, in which shared modules and tensors stay shared.

    Three things are copied by hand: tensors kept from the last run and empty dicts and sets (see
    :func:`~fxqat.utils.tensors.copy_by_hand`), the hooks of parameters, since ``copy.deepcopy`` drops them, and
    functions that hold the model, since it leaves them with the original.
    """
    memo = copies_by_hand(model)
    for attributes in (*map(vars, model.modules()), *held_objects(model)):
        for value in (*attributes.values(), *(item for held in attributes.values() for item in items_of(held))):
            if id(value) not in memo and (copied := copy_by_hand(value)) is not None:
                memo[id(value)] = copied
    result = copy_with_closures(model, memo)
    for parameter in model.parameters():
        copy_tensor_hooks(parameter, memo[id(parameter)], memo)
    return result


def share_tensors(model: nn.Module) -> nn.Module:
    """A copy of a model that has the same parameters and buffers, not copies of them."""
    tensors = (*model.parameters(), *model.buffers())
    return copy_with_closures(model, {id(tensor): tensor for tensor in tensors})


def _first_success(
    model: nn.Module,
    root: nn.Module,
    tracers: list[fx.Tracer],
    fixed: dict[str, Any],
    remedies: Callable[[Exception], list[str]],
) -> tuple[fx.Graph, fx.Tracer]:
    """The graph of the first tracer that succeeds; the error of the first tracer if none does."""
    failures: list[tuple[fx.Tracer, Exception]] = []
    for tracer in tracers:
        try:
            return tracer.trace(root, dict(fixed) if fixed else None), tracer
        except Exception as error:  # noqa: BLE001  a user's forward raises anything
            failures.append((tracer, error))
    first, cause = failures[0]
    raise TraceError(_explain(model, first, cause, remedies(cause))) from cause


def _keep_signature(graph: fx.Graph, root: nn.Module, given: Mapping[str, Any]) -> None:
    """Give the placeholders the order and the defaults of the arguments of forward.

    A default is left out if the example inputs gave another value: it may lead to code that was not traced.

    Args:
        graph: the traced graph.
        root: the traced model.
        given: the example inputs by name, empty without them.
    """
    parameters = inspect.signature(root.forward).parameters
    placeholders = {str(node.target): node for node in graph.nodes if node.op == "placeholder"}
    for name in reversed(list(given)):
        default = parameters[name].default
        if describe(default) != "plain" or type(default) is not type(given[name]) or default != given[name]:
            break  # an argument before one without a default has none either
        placeholders[name].args = (default,)
    kinds = {f"*{name}" if p.kind == p.VAR_POSITIONAL else name: p.kind for name, p in parameters.items()}
    variadic = [node for name, node in placeholders.items() if kinds.get(name) == inspect.Parameter.VAR_POSITIONAL]
    by_keyword = [node for name, node in placeholders.items() if kinds.get(name) == inspect.Parameter.KEYWORD_ONLY]
    for node in variadic if by_keyword else ():
        by_keyword[0].prepend(node)  # fx puts *args behind them


def _bind(
    root: nn.Module, inputs: tuple[Any, ...], concrete_args: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Example inputs by name, and the arguments that are left at their defaults."""
    try:
        return bind_arguments(root, inputs, concrete_args)
    except TypeError as cause:
        raise ConfigError(
            f"example_inputs do not fit the arguments of forward (without those in concrete_args): {cause}"
        ) from cause


def _resolved_leaves(
    model: nn.Module, custom_tracer: fx.Tracer | None, leaf_modules: Sequence[type[nn.Module] | str]
) -> list[type[nn.Module] | str]:
    """The leaves as types and paths that the model has; the name of a type that is also a path means the path."""
    if custom_tracer is not None and not isinstance(custom_tracer, fx.Tracer):
        raise ConfigError(f"custom_tracer must be a torch.fx.Tracer object, got {custom_tracer!r}")
    if custom_tracer is not None and leaf_modules:
        raise ConfigError("leaf_module and custom_tracer exclude each other: choose the leaves in the custom tracer")
    modules = dict(model.named_modules())
    names = sorted({type(module).__name__ for module in modules.values()})
    found: list[type[nn.Module] | str] = []
    for leaf in leaf_modules:
        if not isinstance(leaf, (str, type)):
            raise ConfigError(f"leaf_module: expected a module type, its name, or a dotted path, got {leaf!r}")
        is_known_type = isinstance(leaf, type) and any(isinstance(module, leaf) for module in modules.values())
        if is_known_type or leaf in modules:
            found.append(leaf)
        elif leaf in names:
            found += {type(module): None for module in modules.values() if type(module).__name__ == leaf}
        else:
            name = leaf if isinstance(leaf, str) else leaf.__name__
            close = difflib.get_close_matches(name, [*modules, *names], n=1, cutoff=0.0)
            raise ConfigError(f"leaf_module: the model has no module {name!r}; did you mean {close[0]!r}?")
    return found


def _check_arguments(model: nn.Module, concrete_args: Mapping[str, Any]) -> None:
    known = list(inspect.signature(model.forward).parameters)
    for name in concrete_args:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.0)
            hint = f"did you mean {close[0]!r}? " if close else ""
            arguments = ", ".join(map(repr, known))
            raise ConfigError(f"concrete_args: forward has no argument {name!r}; {hint}It has {arguments}")


def _explain(model: nn.Module, tracer: fx.Tracer, cause: Exception, remedies: list[str]) -> str:
    """The error message: where tracing failed, why, and what to do."""
    path, line = getattr(tracer, "path_of_failure", ""), line_of_failure(cause)
    if path and isinstance(tracer, LeafTracer) and tracer.untraceable == "error":
        keep = f"prepare_custom_config_dict={{'leaf_module': [{path!r}]}}"
        remedies = [f"keep that module whole and float with untraceable='leaf' or {keep}", *remedies]
    elif not path and line != UNKNOWN_LINE:
        remedies = [*remedies, "move that line into a module of its own, which is then kept whole and float"]
    return (
        f"cannot trace {type(model).__name__}: {explain(cause)}\n  in module: {path or 'the model itself'}\n"
        f"  at: {line}\nRemedy: {'; or '.join(remedies)}."
    )


def _remedies(
    model: nn.Module, concrete_args: Mapping[str, Any], with_inputs: bool, own_tracer: bool, cause: Exception
) -> list[str]:
    """What the user has not done yet: give example inputs, fix an argument of forward, give a tracer.

    A parameter that forward overwrites, to limit its norm for example, can be overwritten in the training program.
    An argument ``use_x`` can be fixed to False if the graph cannot hold the type ``SomeX``. What a recurrent layer
    computes is one call of torch: nothing of this makes a subclass of it traceable.
    """
    if isinstance(model, nn.RNNBase):
        kind = next(c.__name__ for c in type(model).__mro__ if c.__module__ == nn.RNNBase.__module__)
        return [
            f"make a torch.nn.{kind} itself, not a subclass, a module of the model, and compute what the subclass adds "
            "in the model's forward"
        ]
    if isinstance(cause, ParameterOverwritten):
        return ["overwrite it after each step of the optimizer, not in forward"]
    parameters = inspect.signature(model.forward).parameters.values()
    options = [p.name for p in parameters if p.default is not p.empty and p.name not in concrete_args]
    unfit = cause.value_type.__name__.lower() if isinstance(cause, TypeNotInGraph) else ""
    switches = [name for name in options if name.startswith("use_") and name.removeprefix("use_") in unfit]
    if switches:
        return [f"switch it off with prepare_custom_config_dict={{'concrete_args': {{{switches[0]!r}: False}}}}"]
    remedies = [] if with_inputs or own_tracer else ["pass example_inputs, so that sizes are known while tracing"]
    if options:
        switch = "switch it off by an argument" if unfit else "fix an argument"
        remedies.append(f"{switch} of forward ({', '.join(options)}) with 'concrete_args'")
    return remedies if own_tracer else [*remedies, "pass a custom_tracer"]

"""The tracer that also traces what is computed only in training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import fx, nn

from fxqat.tracing.hooks_once import collected_kept
from fxqat.tracing.leaf_tracer import TypeNotInGraph
from fxqat.tracing.python_state import random_state
from fxqat.tracing.train_eval_fork import TrainEvalFork
from fxqat.tracing.value_proxy import ValueProxy
from fxqat.tracing.value_tracer import ValueTracer
from fxqat.tracing.written_arguments import WrittenArguments
from fxqat.utils.node_meta import describe
from fxqat.utils.torch_compat import BatchNorm
from fxqat.utils.train_eval_graph import eval_or_train


class TrainEvalTracer(ValueTracer):
    """Finds the modules that branch on ``self.training``, and traces again.

    1. A module without parameters (drop path, noise) is kept whole, and follows ``train()`` and ``eval()``; if its
       arguments do not fit into a node of the graph, 2. holds.
    2. The forward of any other module is traced in eval mode and in training. The graph holds both
       (``fxqat.utils.train_eval_graph``) if training adds something, such as an auxiliary head, or changes what layers
       get. If training uses the same layers in another order, needs more inputs, or draws random numbers of Python or
       numpy, the graph holds eval mode only.

    Attributes:
        eval_only: the modules of which the graph holds eval mode only.
        batch_norms: the BatchNorms whose own forward branches on ``self.training``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.eval_only: list[str] = []
        self.batch_norms: set[str] = set()
        self._branching: dict[str, nn.Module] = {}
        self._paths_in_both: set[str] = set()
        self._hooks_in_both: set[str] = set()
        self._whole: set[str] = set()
        self._tracing_both = False
        self._running: list[str] = []
        self._fork: TrainEvalFork | None = None

    def branch_on_training(self, module: nn.Module) -> bool:
        """Record the module whose forward branches on a ``training`` flag; True in the run in training."""
        path = self._running[-1] if self._running else self.path_of_module(module)
        running = self.root.get_submodule(path)
        if isinstance(module, BatchNorm) and running is module:  # see fxqat.tracing.batch_norm_calls
            self.batch_norms.add(path)
        elif not self._tracing_both:
            self._branching[path] = running
        return self._fork is not None

    def needs_another_trace(self) -> bool:
        """Whether this trace found new modules that branch on ``self.training``."""
        in_hooks = (self._branching.keys() & self._paths_in_both) - self._hooks_in_both
        self._hooks_in_both |= in_hooks
        new = self._branching.keys() - self._paths_in_both - self.leaf_paths
        whole = {path for path in new if path and next(self._branching[path].parameters(), None) is None}
        self.leaf_paths |= whole
        self._whole |= whole
        self._paths_in_both |= new - whole
        self._branching = {}
        return bool(new or in_hooks)

    def start_anew(self) -> None:
        """Forget what the trace before found about its graph."""
        super().start_anew()
        self.eval_only = []

    def not_followed(self) -> frozenset[str]:
        """The modules and functions of which the graph does not hold all that they compute."""
        return super().not_followed() | frozenset(self.eval_only)

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Trace a module call; one that cannot be kept whole is traced in both modes."""
        mark = self.mark_position()
        try:
            return super().call_module(m, forward, args, kwargs)
        except TypeNotInGraph:
            if self.is_made_in_forward(m) or (path := self.path_of_module(m)) not in self._whole:
                raise
        self.rewind(mark)
        self.path_of_failure = ""
        self._whole.remove(path)
        self.leaf_paths.remove(path)
        self._paths_in_both.add(path)
        return super().call_module(m, forward, args, kwargs)

    def trace_forward(self, path: str, forward: partial[Any]) -> Any:
        """Trace a forward, in both modes if it branches on ``self.training``."""
        self._running.append(path)
        try:
            if path not in self._paths_in_both or self._tracing_both:
                return super().trace_forward(path, forward)
            if not path or path in self._hooks_in_both:
                return self._run_in_both(path, forward)
            return self._run_with_hooks_once(path, forward)
        finally:
            self._running.pop()

    def _run_with_hooks_once(self, path: str, call: partial[Any]) -> Any:
        """Call a module whose forward runs in both modes. Its hooks run once: some collect values in a list."""
        attributes = vars(self.root.get_submodule(path))
        forward = self.root.get_submodule(path).forward
        own = {"forward": attributes["forward"]} if "forward" in attributes else {}
        attributes["forward"] = lambda *args, **kwargs: self._run_in_both(path, partial(forward, *args, **kwargs))
        try:
            return call()
        finally:
            del attributes["forward"]
            attributes.update(own)

    def _run_in_both(self, path: str, forward: partial[Any]) -> Any:
        start = self.last_node()
        if start is None:
            return super().trace_forward(path, forward)
        assigned, read = len(self.patches.assigned), dict(self.attribute_proxies)
        given = WrittenArguments.of((forward.args, forward.keywords))
        self._tracing_both = True
        try:
            in_eval = forward()
            written = WrittenArguments.of(given.arguments)
            given.restore()
            place = self.mark_position()
            self.patches.undo_assignments(assigned)
            self.attribute_proxies = dict(read)
            fork = TrainEvalFork(self.graph, start, self.root)
            with collected_kept():
                in_training = self._in_training(fork, forward)
            if written.restore() and in_training is not NO_RESULT:  # the graph can write one of the two
                fork.undo()
                in_training = NO_RESULT
            self.rewind_calls(place)
            self.patches.undo_assignments(assigned)
            self.attribute_proxies = read
        finally:
            self._tracing_both = False
        return self._merged_result(path, fork, in_eval, in_training)

    def create_node(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **others: Any) -> fx.Node:
        """Make a node. In the run in training, use the equal node of the run in eval mode if there is one."""

        def make() -> fx.Node:
            return super(TrainEvalTracer, self).create_node(kind, target, args, kwargs, *rest, **others)

        return make() if self._fork is None else self._fork.node(kind, target, args, kwargs, make)

    def _in_training(self, fork: TrainEvalFork, forward: Callable[[], Any]) -> Any:
        """The result in training; NO_RESULT if that cannot be traced, or uses the same layers in another order.

        The random numbers of Python and numpy that it draws would be the same in every step: that is no result either.
        """
        self._fork, untraceable, drawn = fork, self.untraceable, random_state()
        self.untraceable = "error"
        try:
            result = forward()
        except Exception:  # noqa: BLE001  it may need targets, or may not be traceable
            result = NO_RESULT
        finally:
            self._fork, self.untraceable, self.path_of_failure = None, untraceable, ""
        if result is NO_RESULT or random_state() != drawn or fork.shares_parameters():
            fork.undo()
            return NO_RESULT
        return result

    def _merged_result(self, path: str, fork: TrainEvalFork, in_eval: Any, in_training: Any) -> Any:
        """One result for both modes."""
        if in_training is NO_RESULT:
            self.eval_only.append(path)
            return in_eval
        last = self.last_node()
        try:
            result = self._merge(in_eval, in_training)
        except TypeError:
            self.erase_after(last)  # the values that were merged before the difference was found
            if path:  # the calling module gets another structure in training, so it is traced in both modes instead
                fork.undo()
                owner = self._running[-2]  # not the parent in the path: a ModuleList has no forward
                self._branching[owner] = self.root.get_submodule(owner)
                return in_eval
            result = self.create_proxy("call_function", eval_or_train, (in_eval, in_training), {})
        fork.mark()
        return result

    def _merge(self, in_eval: Any, in_training: Any) -> Any:
        """One structure for both modes, with :func:`eval_or_train` where the values differ.

        Raises:
            TypeError: their structures differ.
        """
        if isinstance(in_eval, ValueProxy) and isinstance(in_training, ValueProxy):
            if in_eval.node is in_training.node:
                return in_eval
            return self.create_proxy("call_function", eval_or_train, (in_eval, in_training), {})
        if type(in_eval) is not type(in_training):
            raise TypeError
        if isinstance(in_eval, dict) and list(in_eval) == list(in_training):
            merged = copy.copy(in_eval)  # of the same type: forward may read its attributes
            for name, value in in_eval.items():
                merged[name] = self._merge(value, in_training[name])
            return merged
        if isinstance(in_eval, (tuple, list)) and len(in_eval) == len(in_training):
            items = [self._merge(a, b) for a, b in zip(in_eval, in_training, strict=True)]
            return type(in_eval)(*items) if hasattr(in_eval, "_fields") else type(in_eval)(items)
        if describe(in_eval) == "plain" and in_eval == in_training:
            return in_eval
        raise TypeError


NO_RESULT = object()
"""Stands for the result of a run in training that is not used; None may be a result."""

"""The tracer that traces what is computed differently in training, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx, nn

from fxqat.tracing.train_eval_fork import TrainEvalFork
from fxqat.tracing.value_proxy import ValueProxy
from fxqat.tracing.value_tracer import ValueTracer
from fxqat.utils.node_meta import describe
from fxqat.utils.torch_compat import BatchNorm
from fxqat.utils.train_eval_graph import eval_or_train


class TrainEvalTracer(ValueTracer):
    """Asks who decides by ``self.training``, and traces again.

    1. Modules without parameters (drop path, noise) are kept whole, and go on switching.
    2. The forward of any other is traced in eval mode and in training. The graph has both
       (``fxqat.utils.train_eval_graph``) if what training adds is beside what is deployed: an auxiliary head.
       Where it goes another way through the same layers, or needs more inputs, the graph has what it does in eval mode.

    Attributes:
        eval_only: the modules of which the graph has eval mode only.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.eval_only: list[str] = []
        self._found: dict[str, nn.Module] = {}
        self._in_both: set[str] = set()
        self._is_parted = False
        self._running: list[str] = []
        self._fork: TrainEvalFork | None = None

    def branch_on_training(self, module: nn.Module) -> bool:
        """Remember a module whose forward decides by ``self.training``, and say which way it goes in this run."""
        if not self._is_parted and not isinstance(module, BatchNorm):  # see fxqat.tracing.batch_norm_calls
            self._found[self.path_of_module(module)] = module
        return self._fork is not None

    def is_incomplete(self) -> bool:
        """Whether modules were found that compute differently in training, and that were not known to."""
        new = self._found.keys() - self._in_both - self.leaf_paths
        whole = {path for path in new if path and next(self._found[path].parameters(), None) is None}
        self.leaf_paths |= whole
        self._in_both |= new - whole
        self._found = {}
        if new:
            self.eval_only = []
        return bool(new)

    def run(self, path: str, forward: Callable[[], Any]) -> Any:
        """Trace a forward; in both modes if it computes differently in training."""
        self._running.append(path)
        try:
            return self._run(path, forward)
        finally:
            self._running.pop()

    def _run(self, path: str, forward: Callable[[], Any]) -> Any:
        start = self.last_node()
        if path not in self._in_both or self._is_parted or start is None:
            return super().run(path, forward)
        assigned, read = len(self.patches.assigned), dict(self.attribute_proxies)
        self._is_parted = True
        try:
            in_eval = forward()
            place = self.mark_place()
            self.patches.undo_assignments(assigned)
            self.attribute_proxies = dict(read)
            fork = TrainEvalFork(self.graph, start)
            in_training = self._in_training(fork, forward)
            self.restore_calls(place)
            self.patches.undo_assignments(assigned)
            self.attribute_proxies = read
        finally:
            self._is_parted = False
        return self._joined(path, fork, in_eval, in_training)

    def create_node(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **others: Any) -> fx.Node:
        """In the run in training, a node may be one of the run in eval mode."""

        def make() -> fx.Node:
            return super(TrainEvalTracer, self).create_node(kind, target, args, kwargs, *rest, **others)

        return make() if self._fork is None else self._fork.node(kind, target, args, kwargs, make)

    def _in_training(self, fork: TrainEvalFork, forward: Callable[[], Any]) -> Any:
        """What the run in training gives; NOTHING if it cannot be traced or is not beside what is deployed."""
        self._fork, untraceable = fork, self.untraceable
        self.untraceable = "error"
        try:
            result = forward()
        except Exception:  # noqa: BLE001  it may need targets, or do what cannot be traced
            result = NOTHING
        finally:
            self._fork, self.untraceable, self.path_of_failure = None, untraceable, ""
        if result is NOTHING or fork.shares_parameters(self.root):
            fork.undo()
            return NOTHING
        return result

    def _joined(self, path: str, fork: TrainEvalFork, in_eval: Any, in_training: Any) -> Any:
        """The result of both runs."""
        if in_training is NOTHING:
            self.eval_only.append(path)
            return in_eval
        last = self.last_node()
        try:
            result = self._join(in_eval, in_training)
        except TypeError:
            self.take_back(last)  # what was joined before the difference was met
            if path:  # the module around it gets another structure in training: it computes differently, too
                fork.undo()
                owner = self._running[-2]  # who called it; a list of modules around it has no forward
                self._found[owner] = self.root.get_submodule(owner)
                return in_eval
            result = self.create_proxy("call_function", eval_or_train, (in_eval, in_training), {})
        fork.mark()
        return result

    def _join(self, in_eval: Any, in_training: Any) -> Any:
        """Two values as one.

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
            return {name: self._join(value, in_training[name]) for name, value in in_eval.items()}
        if isinstance(in_eval, (tuple, list)) and len(in_eval) == len(in_training):
            items = [self._join(a, b) for a, b in zip(in_eval, in_training, strict=True)]
            return type(in_eval)(*items) if hasattr(in_eval, "_fields") else type(in_eval)(items)
        if describe(in_eval) == "plain" and in_eval == in_training:
            return in_eval
        raise TypeError


NOTHING = object()
"""No result."""

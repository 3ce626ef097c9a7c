"""Hooks inside a module whose forward is traced twice, in eval mode and in training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx, nn

from fxqat.errors import TraceError
from fxqat.utils.torch_compat import forward_hooks


class HooksOnce:
    """Runs a hook that only notes values, as those with which transformers collects attentions, in the first run only.

    A hook only notes values if it returned None and made no node in the first run. The second run fails with a
    TraceError if such a hook would note other values in it: what it noted could then hold in one mode only.

    Args:
        last_node: gives the last node of the graph.
    """

    def __init__(self, last_node: Callable[[], fx.Node | None]) -> None:
        self._last_node = last_node
        self._hooks: dict[int, Any] = {}
        self._noted: dict[int, list[list[fx.Node]]] = {}
        self._computing: set[int] = set()

    @contextmanager
    def during_call(self, module: nn.Module, is_second_run: bool) -> Iterator[None]:
        """Call a module in the block."""
        run = self._skipping if is_second_run else self._noting
        before = [(hooks, dict(hooks)) for hooks in forward_hooks(module)]
        for hooks, kept in before:
            hooks.update({key: run(hook) for key, hook in kept.items()})
        try:
            yield
        finally:
            for hooks, kept in before:
                hooks.update({key: hook for key, hook in kept.items() if key in hooks})  # a hook may remove itself

    def _noting(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            last = self._last_node()
            result = hook(*args, **kwargs)
            self._hooks[id(hook)] = hook  # alive, so that its id stays its own
            self._noted.setdefault(id(hook), []).append(_nodes((args, kwargs)))
            if result is not None or self._last_node() is not last:
                self._computing.add(id(hook))
            return result

        return run

    def _skipping(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        if id(hook) not in self._hooks or id(hook) in self._computing:
            return hook

        def run(*args: Any, **kwargs: Any) -> None:
            noted = self._noted[id(hook)]
            if not noted or noted.pop(0) != _nodes((args, kwargs)):
                raise TraceError(f"the hook {hook} gets other values in training than in eval mode")

        return run


def _nodes(arguments: Any) -> list[fx.Node]:
    """The nodes of the traced values in the arguments of a hook."""
    found: list[fx.Node] = []
    fx.node.map_aggregate(arguments, lambda value: found.append(value.node) if isinstance(value, fx.Proxy) else None)
    return found

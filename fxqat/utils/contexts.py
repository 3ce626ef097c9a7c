"""Context managers: a model or Python itself in another state for the time of a block, and back afterwards."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """``model.eval()`` for the block; afterwards every module has the mode it had."""
    in_training = [module for module in model.modules() if module.training]
    if in_training:
        model.eval()
    try:
        yield
    finally:
        for module in in_training:
            module.training = True


@contextmanager
def without_fast_path() -> Iterator[None]:
    """Torch's transformers compute what they are made of, in eval mode, too.

    Their fast path skips tokens that are masked as padding, and gives zeros for them.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Afterwards the buffers of a model are what they were: a model may count its calls."""
    kept = [(m, name, b, b.clone()) for m in model.modules() for name, b in m.named_buffers(recurse=False)]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, content in kept:
                buffer.copy_(content)
                if getattr(module, name) is not buffer:  # forward assigned another tensor
                    setattr(module, name, buffer)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep the cyclic garbage collector from running in the block.

    For code that builds a large structure of objects that all live on: the collector would go through them again and
    again and find nothing.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def hooked(
    modules: Iterable[nn.Module], hook: Callable[..., Any], *, with_kwargs: bool = False, pre: bool = False
) -> Iterator[None]:
    """Register one hook on several modules for the block.

    Args:
        modules: the modules.
        hook: a forward hook ``(module, args, output)``; it receives ``kwargs`` after ``args`` with ``with_kwargs``, and
            no output with ``pre``.
        with_kwargs: pass the keyword arguments of each call.
        pre: call the hook before the module's forward instead of after it.
    """
    with ExitStack() as stack:
        for module in modules:
            register = module.register_forward_pre_hook if pre else module.register_forward_hook
            stack.callback(register(hook, with_kwargs=with_kwargs).remove)
        yield

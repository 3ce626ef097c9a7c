"""Context managers that put a model, or Python itself, into another state for a block."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fxqat.utils.containers import content_of, restore_content
from fxqat.utils.torch_compat import EqualRandomNumbers, without_compiler

FAST_PATH = threading.RLock()
"""Held while the fast path of torch's transformers is switched off."""

DATA: Any = Tensor.data
"""The attribute of tensors, as torch has it."""

OF_DATA = threading.Lock()
"""Held while it is replaced or put back."""

SEEN_BY: list[int] = []
"""The threads in which writes to it are seen, see :func:`writes_to_data_seen`."""


def eval_mode(model: nn.Module) -> AbstractContextManager[None]:
    """``model.eval()`` for the block; afterwards every module is back in its own mode."""
    return in_mode(model, training=False)


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Every module of a model in training, or in eval mode, for the block; afterwards each is back in its own mode."""
    changed = [module for module in model.modules() if module.training is not training]
    for module in changed:
        module.training = training
    try:
        yield
    finally:
        for module in changed:
            module.training = not training


@contextmanager
def without_fast_path() -> Iterator[None]:
    """Switch off the fast path of torch's transformers, which computes zeros for tokens that are masked as padding.

    The switch is global, so one thread at a time is in such a block.
    """
    with FAST_PATH:
        before = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def without_autocast() -> Iterator[None]:
    """Switch autocast off for the block: neither a graph nor a file has the types that it chooses."""
    on = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    with ExitStack() as stack:
        for device in on:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


@contextmanager
def random_state_kept(model: nn.Module) -> Iterator[None]:
    """Restore the states of the random generators after the block.

    Args:
        model: the model that runs in the block; tells which accelerators' generators are used.
    """
    with torch.random.fork_rng(list({tensor.device for tensor in model.parameters() if tensor.is_cuda})):
        yield


@contextmanager
def equal_random_numbers(model: nn.Module) -> Iterator[EqualRandomNumbers]:
    """Equal calls give equal random numbers in the block; afterwards the generators are in their state before it.

    It also tells whether any were drawn.

    Args:
        model: the model that runs in the block.
    """
    with without_compiler(), random_state_kept(model), EqualRandomNumbers() as numbers:
        yield numbers


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Restore the buffers of a model after the block, because a model may count its calls."""
    kept = [(m, name, b, b.detach().clone()) for m in model.modules() for name, b in m.named_buffers(recurse=False)]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, content in kept:
                if not buffer.is_leaf and content.is_leaf:  # forward wrote what has a gradient
                    buffer.detach_()
                if not _is_expanded(buffer):  # torch writes to none that is
                    buffer.copy_(content)
                if getattr(module, name) is not buffer:  # forward assigned another tensor
                    setattr(module, name, buffer)


def _is_expanded(tensor: Tensor) -> bool:
    """Whether several elements of a tensor are one number in memory, as of ``torch.ones(1).expand(4)``."""
    pairs = zip(tensor.stride(), tensor.shape, strict=True) if tensor.layout is torch.strided else ()
    return any(stride == 0 and size > 1 for stride, size in pairs)


def users_modules(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that are neither of torch nor of fxqat."""
    return [m for m in model.modules() if type(m).__module__.partition(".")[0] not in ("torch", "fxqat")]


@contextmanager
def parameters_kept(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Restore the values of parameters after the block."""
    kept = [(parameter, parameter.detach().clone()) for parameter in parameters]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, content in kept:
                parameter.copy_(content)


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Restore the attributes that a user's modules hold after the block, and what is in their lists, dicts and sets."""
    inner = vars(nn.Module())
    owners = [vars(module) for module in users_modules(model)]
    kept = [(owner, {name: value for name, value in owner.items() if name not in inner}) for owner in owners]
    held = [value for _, attributes in kept for value in attributes.values()]
    contents = [(value, content_of(value)) for value in held if isinstance(value, (dict, list, set))]
    try:
        yield
    finally:
        for owner, attributes in kept:
            for name in owner.keys() - inner.keys() - attributes.keys():
                del owner[name]
            owner.update(attributes)
        for container, content in contents:
            restore_content(container, content)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the cyclic garbage collector for the block.

    For code that builds a large structure: the collector would scan the same live objects again and again.
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


@contextmanager
def writes_to_data_seen() -> Iterator[None]:
    """Let ``x.data`` be ``x.detach()`` and ``x.data = y`` be ``x.copy_(y)`` without gradients, in this thread.

    ``weight.data.clamp_(-1, 1)`` in a module's code would end the process while ``torch.export`` captures it.
    """
    with OF_DATA:
        if not SEEN_BY:
            Tensor.data = property(_read_data, _write_data)  # type: ignore[assignment]
        SEEN_BY.append(threading.get_ident())
    try:
        yield
    finally:
        with OF_DATA:
            SEEN_BY.remove(threading.get_ident())
            if not SEEN_BY:
                del Tensor.data  # it is that of its base class


def _read_data(tensor: Tensor) -> Tensor:
    return tensor.detach() if threading.get_ident() in SEEN_BY else DATA.__get__(tensor)


def _write_data(tensor: Tensor, values: Tensor) -> None:
    if threading.get_ident() in SEEN_BY:
        with torch.no_grad():
            tensor.copy_(values)
    else:
        DATA.__set__(tensor, values)

"""Context managers: a model or Python itself in another state for the time of a block, and back afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

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

"""Putting a model into a mode for a while."""

from __future__ import annotations

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

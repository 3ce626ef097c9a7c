"""Copies of models, and models that are run without leaving a trace in them."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def copy_model(model: nn.Module) -> nn.Module:
    """A deep copy of a model, in which what is shared stays shared.

    Copied by hand are tensors that the model kept of its last run, which autograd does not let be copied, and the many
    empty dicts of a module, with which ``copy.deepcopy`` takes its time.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
            elif type(value) in (dict, OrderedDict) and not value:
                memo[id(value)] = type(value)()
    return copy.deepcopy(model, memo)


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

"""Modules that work in training only, such as the drop path of timm: in eval mode they return their input."""

from __future__ import annotations

import copy
import inspect

import torch
from torch import nn

from fxqat.utils.torch_compat import tensor_version

IDLE = "_fxqat_idle_in_eval"
"""The attribute of a module that was found to return its input in eval mode."""


def mark_if_idle(module: nn.Module) -> None:
    """Note on a module of our copy of the model that it returns its input in eval mode, if a run shows that it does.

    Modules without parameters and buffers whose forward reads ``self.training`` are tried, on one tensor of four
    dimensions.
    """
    code = getattr(inspect.unwrap(module.forward), "__code__", None)
    has_tensors = next(module.parameters(), None) is not None or next(module.buffers(), None) is not None
    if has_tensors or code is None or "training" not in code.co_names:
        return
    tried, x = copy.deepcopy(module).eval(), torch.linspace(-1000.0, 1000.0, 16).reshape(2, 2, 2, 2)
    before = tensor_version(x)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            result = tried(x)
    except Exception:  # noqa: BLE001  it wants another input
        return
    if result is x and tensor_version(x) == before:
        setattr(module, IDLE, True)


def is_idle(module: nn.Module | None) -> bool:
    """Whether :func:`mark_if_idle` has marked a module."""
    return module is not None and IDLE in vars(module)

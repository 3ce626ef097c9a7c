"""Functions of ``torch.jit.script`` and ``torch.jit.trace`` are traced as the Python that they were made from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fxqat.tracing.autograd_functions import tracers_in
from fxqat.utils.torch_compat import python_of_scripted


@contextmanager
def scripted_as_python() -> Iterator[None]:
    """In the block, a scripted function that gets a proxy runs as Python; compiled, it takes only tensors."""
    scripted: Any = torch.jit.ScriptFunction
    original = scripted.__call__

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        python = python_of_scripted(function) if next(tracers_in((args, kwargs)), None) is not None else None
        return original(function, *args, **kwargs) if python is None else python(*args, **kwargs)

    scripted.__call__ = call
    try:
        yield
    finally:
        scripted.__call__ = original

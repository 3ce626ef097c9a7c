"""Computes one call on the example values while tracing."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
from torch import Tensor, nn

from fxqat.tracing.content_watch import ContentWatch
from fxqat.tracing.value_proxy import NUMBERS, DataDependent, TracedValue, proxies_in, value_of
from fxqat.utils.torch_compat import has_hooks

SIZES = ("size", "numel", "nelement", "__len__", "len", "getattr", "is_same_size", "broadcast_shapes")
"""Functions and methods that return numbers without looking at the values of a tensor."""


def evaluate(
    root: nn.Module, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> TracedValue | None:
    """The result of a call and what it depends on; None if one of its arguments is not known.

    What the call raises is raised: the code of the model sees what it would see in a run.

    Args:
        root: the traced model.
        kind: ``"call_module"``, ``"call_method"`` or ``"call_function"``.
        target: the target of a graph node of that kind.
        args: values, and proxies with values.
        kwargs: the same, by name.
    """
    try:
        values, named = value_of(tuple(args)), value_of(dict(kwargs))
    except DataDependent:
        return None
    function = target
    if kind == "call_module":
        function = root.get_submodule(target)
    elif kind == "call_method":
        function, values = getattr(values[0], target), values[1:]
    read = [p.fxqat_value for p in proxies_in((args, kwargs)) if p.fxqat_value is not None]
    constants = [value for value in read if not (value.from_input or value.from_content)]
    data, watch = _run(function, values, named, [id(value.data) for value in constants])
    name = str(getattr(target, "__name__", target))
    size_only = name in SIZES and not isinstance(data, Tensor)
    from_input = not size_only and any(value.from_input for value in read)
    leaves_torch = any(isinstance(value.data, Tensor) for value in read) and not size_only and holds_numbers(data)
    reads, sized_by = _union(value.reads for value in read), _union(value.sized_by for value in read)
    if watch.read_constants:
        sized_by |= _union(value.reads for value in constants)
    return TracedValue(
        data,
        from_input=from_input,
        sized=any(value.from_input or value.sized for value in read),
        from_content=any(value.from_content for value in read) or ((watch.read_content or leaves_torch) and from_input),
        reads=sized_by if size_only else reads,
        sized_by=sized_by,
    )


def holds_numbers(data: Any) -> bool:
    """Whether a value holds numbers outside of tensors, also in an array of numpy or in a list."""
    if isinstance(data, (list, tuple)):
        return any(map(holds_numbers, data))
    return isinstance(data, (*NUMBERS, np.ndarray))


def _union(sets: Iterable[frozenset[str]]) -> frozenset[str]:
    return frozenset[str]().union(*sets)


def _run(function: Any, args: Any, kwargs: dict[str, Any], constants: Collection[int]) -> tuple[Any, ContentWatch]:
    """The result of a function, and what was seen of the tensors on whose values it, or its size, depends.

    Layers of torch are not watched: none of them does, and watching may take longer than running.
    """
    watch = ContentWatch(constants)
    if (
        isinstance(function, nn.Module)
        and type(function).__module__.startswith("torch.nn.")
        and not has_hooks(function)
    ):
        return function(*args, **kwargs), watch
    with watch:
        return function(*args, **kwargs), watch

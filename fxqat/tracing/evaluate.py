"""Computes one call on the example values while tracing."""

from __future__ import annotations

from typing import Any

from torch import nn

from fxqat.tracing.value_proxy import TracedValue, proxies_in, value_of
from fxqat.utils.torch_compat import ContentWatch, has_hooks


def evaluate(
    root: nn.Module, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> TracedValue | None:
    """The result of a call and what it depends on; None if the call fails.

    Args:
        root: the traced model.
        kind: ``"call_module"``, ``"call_method"`` or ``"call_function"``.
        target: the target of a graph node of that kind.
        args: values, and proxies with values.
        kwargs: the same, by name.
    """
    try:
        values, named = value_of(tuple(args)), value_of(dict(kwargs))
        if kind == "call_module":
            target = root.get_submodule(target)
        elif kind == "call_method":
            target, values = getattr(values[0], target), values[1:]
        data, read_content = _run(target, values, named)
    except Exception:  # an error of the model is raised when the graph runs; here the value just stays unknown
        return None
    read = [p.fxqat_value for p in proxies_in((args, kwargs)) if p.fxqat_value is not None]
    from_input = any(value.from_input for value in read)
    return TracedValue(
        data,
        from_input=from_input,
        sized=from_input or any(value.sized for value in read),
        from_content=any(value.from_content for value in read) or (read_content and from_input),
    )


def _run(function: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, bool]:
    """The result of a function, and whether the result or its size depends on tensor values.

    Layers of torch are not watched: none of them does, and watching may take longer than running.
    """
    if (
        isinstance(function, nn.Module)
        and type(function).__module__.startswith("torch.nn.")
        and not has_hooks(function)
    ):
        return function(*args, **kwargs), False
    with ContentWatch() as watch:
        data = function(*args, **kwargs)
    return data, watch.read_content

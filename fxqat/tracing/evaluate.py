"""Computing one call on example values while tracing."""

from __future__ import annotations

from typing import Any

from torch import nn

from fxqat.tracing.value_proxy import TracedValue, proxies_in, value_of
from fxqat.utils.torch_compat import ContentWatch, has_hooks


def evaluate(
    root: nn.Module, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> TracedValue | None:
    """The result of a call, and what it depends on; None if it cannot be computed.

    Args:
        root: the traced model.
        kind: ``"call_module"``, ``"call_method"`` or ``"call_function"``.
        target: as for a graph node of that kind.
        args: values and proxies with values.
        kwargs: the same.
    """
    try:
        values, named = value_of(tuple(args)), value_of(dict(kwargs))
        if kind == "call_module":
            target = root.get_submodule(target)
        elif kind == "call_method":
            target, values = getattr(values[0], target), values[1:]
        data, read_content = _run(target, values, named)
    except Exception:  # the model's own error comes when the graph is run; here the value is only unknown
        return None
    read = [p.fxqat_value for p in proxies_in((args, kwargs)) if p.fxqat_value is not None]
    from_input = any(known.from_input for known in read)
    return TracedValue(
        data,
        from_input=from_input,
        sized=from_input or any(known.sized for known in read),
        from_content=any(known.from_content for known in read) or (read_content and from_input),
    )


def _run(function: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, bool]:
    """What a function gives, and whether it, or its size, depends on what is in a tensor.

    No layer of torch does, and watching one may take longer than running it.
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

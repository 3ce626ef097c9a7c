"""State that forward keeps in Python, outside of parameters and buffers: it is no part of the graph."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
from torch import fx, nn

from fxqat.errors import TraceError
from fxqat.utils.containers import CONTAINERS, content_of, restore_content
from fxqat.utils.torch_compat import forward_hooks

NOT_USERS = ("torch", "fxqat", "builtins", "functools")
"""Packages whose objects keep nothing of forward."""

KEPT = "forward keeps a tensor in {}: it is as before"
"""What is told of a place in which forward keeps a value of the trace."""

PLAIN = (bool, int, float, complex, str, bytes, tuple, type(None))


@contextmanager
def python_state_kept(root: nn.Module) -> Iterator[list[str]]:
    """Restore the state that forward keeps in Python after the block.

    That is the attributes of all modules that are plain or of a class with slots, Python's and numpy's random numbers,
    and what holds a value of the trace: global names, attributes of other objects (which modules hold, or whose methods
    are hooks), and objects that forward makes and keeps in a module.

    Args:
        root: the model that is traced in the block.

    Yields:
        What changed, a line each; filled at the end of the block.

    Raises:
        TraceError: an attribute holds a value of the trace: forward keeps a tensor for its next call.
    """
    changes: list[str] = []
    before, of_python, of_numpy = _attributes(root), random.getstate(), np.random.get_state(legacy=False)
    drawn = random_state()
    namespaces = [(namespace, _contents(namespace)) for namespace in (*_globals(root), *held_objects(root))]
    modules = [(f"{path}." if path else "", vars(module), dict(vars(module))) for path, module in root.named_modules()]
    try:
        yield changes
    finally:
        after = _attributes(root)
        for (path, name), value in before.items():
            if not _equal(after.get((path, name), value), value):
                changes.append(f"forward changes {f'{path}.' if path else ''}{name}: it stays as it was while tracing")
                vars(root.get_submodule(path))[name] = value
        for namespace, contents in namespaces:
            changes += map(KEPT.format, _restored(namespace, contents))
        for owner, attributes, earlier in modules:
            made = [n for n, v in attributes.items() if v is not earlier.get(n) and _is_made_of_proxies(v)]
            changes += [KEPT.format(owner + name) for name in made]
            attributes |= {name: earlier[name] for name in made if name in earlier}
            for name in set(made) - earlier.keys():
                del attributes[name]
        if random_state() != drawn:
            changes.append("forward draws random numbers of Python or numpy: they stay as they were while tracing")
            random.setstate(of_python)
            np.random.set_state(of_numpy)
    for path, module in root.named_modules():
        held = {**vars(module), **dict(module.named_buffers(recurse=False, remove_duplicate=False))}
        for name, value in held.items():
            if isinstance(value, fx.Proxy) or any(isinstance(item, fx.Proxy) for item in items_of(value)):
                raise TraceError(
                    f"forward assigns a tensor to {f'{path}.' if path else ''}{name}, which the graph cannot hold. "
                    "Give example_inputs: with them, buffers that forward assigns are updated as in the model."
                )


def random_state() -> tuple[Any, bytes]:
    """The state of Python's and numpy's random numbers, to compare: another one means that numbers were drawn."""
    return random.getstate(), pickle.dumps(np.random.get_state(legacy=False))


def _has_slots(value: Any) -> bool:
    """Whether a value is an object of a class with slots, such as ``fractions.Fraction``: they may hold proxies."""
    return any(vars(kind).get("__slots__") for kind in type(value).__mro__)


def _attributes(root: nn.Module) -> dict[tuple[str, str], Any]:
    inner = vars(nn.Module())
    return {
        (path, name): value
        for path, module in root.named_modules()
        for name, value in vars(module).items()
        if name not in inner and (isinstance(value, PLAIN) or _has_slots(value))
    }


def _globals(root: nn.Module) -> list[dict[str, Any]]:
    """The global names of the user's code."""
    names = {type(module).__module__ for module in root.modules()}
    found = [sys.modules.get(name) for name in names if name.partition(".")[0] not in ("torch", "fxqat")]
    return [vars(module) for module in found if module is not None]


def held_objects(root: nn.Module) -> list[dict[str, Any]]:
    """The attributes of the objects of the user's classes that modules hold, or whose methods are their hooks."""
    found: dict[int, dict[str, Any]] = {}
    inner = vars(nn.Module())
    for module in root.modules():
        held = [value for name, value in vars(module).items() if name not in inner]
        called = [hook for hooks in forward_hooks(module) for hook in hooks.values()]
        hooks = [getattr(hook.func if isinstance(hook, partial) else hook, "__self__", None) for hook in called]
        for value in (*held, *hooks, *(item for container in held for item in items_of(container))):
            package = type(value).__module__.partition(".")[0]
            if hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type)) and package not in NOT_USERS:
                found[id(value)] = vars(value)
    return list(found.values())


def _contents(namespace: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The values by name, and copies of the lists, dicts and sets among them."""
    return {n: (v, content_of(v) if type(v) in CONTAINERS else None) for n, v in namespace.items() if not _is_dunder(n)}


def _is_dunder(name: str) -> bool:
    """Whether a name is Python's own, such as ``__loader__``: forward keeps nothing there."""
    return name.startswith("__") and name.endswith("__")


def _restored(namespace: dict[str, Any], contents: dict[str, tuple[Any, Any]]) -> list[str]:
    """Restore what holds a value of the trace, for which the model itself has no use; the names."""
    found = []
    for name, value in list(namespace.items()):
        if _is_dunder(name):
            continue
        items = items_of(value) if type(value) in CONTAINERS else []
        items += list(value) if isinstance(value, dict) else []  # its keys
        is_new = name not in contents or contents[name][0] is not value
        if not any(map(_is_proxy, (value, *items))) and not (is_new and _is_made_of_proxies(value)):
            continue
        found.append(name)
        if name not in contents:
            del namespace[name]
            continue
        old, content = contents[name]
        namespace[name] = old
        if content is not None:
            restore_content(old, content)
    return found


def _is_proxy(value: Any) -> bool:
    return issubclass(type(value), fx.Proxy)


def _is_made_of_proxies(value: Any, depth: int = 3) -> bool:
    """Whether an object, such as a distribution of ``torch.distributions``, has values of the trace as attributes."""
    if depth == 0 or _is_proxy(value) or isinstance(value, (nn.Module, type, ModuleType)):
        return False
    if not hasattr(value, "__dict__"):
        return False
    held = [item for attribute in vars(value).values() for item in (attribute, *items_of(attribute))]
    return any(_is_proxy(item) or _is_made_of_proxies(item, depth - 1) for item in held)


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except Exception:  # noqa: BLE001  a tuple of arrays or tensors has no truth value
        return a is b


def items_of(value: Any) -> list[Any]:
    """The items of a list, tuple or set, or the values of a dict."""
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, (list, tuple, set)) else []

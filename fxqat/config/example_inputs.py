"""The example inputs of ``prepare_by_platform``, in the forms that people have, as arguments in order."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxqat.errors import ConfigError
from fxqat.utils.batches import described
from fxqat.utils.nearest_name import nearest
from fxqat.utils.tensors import map_tensors


def inputs_in_order(
    model: nn.Module, example_inputs: Any, fixed: Collection[str] | None = None
) -> tuple[tuple[Any, ...] | None, dict[str, Any]]:
    """The example inputs as positional arguments of a model's forward, and the defaults of arguments that it skips.

    * A tensor is the first argument.
    * A tuple or list holds the arguments in order.
    * A mapping (a dict, the output of a tokenizer) holds them by name.

    Args:
        model: the float model.
        example_inputs: what the user gave.
        fixed: arguments that have a value already (``concrete_args``).

    Returns:
        The arguments in order, without those in ``fixed``, or None if there are none; a None among them is an argument
        that is None. And, by name, the defaults of arguments that a mapping skips, if they are not None.

    Raises:
        ConfigError: they have another form, or a mapping does not fit forward.
    """
    if example_inputs is None:
        return None, {}
    if isinstance(example_inputs, Tensor):
        return (example_inputs,), {}
    if not isinstance(example_inputs, (tuple, list, Mapping)) or not example_inputs:
        raise ConfigError(
            "example_inputs must be a tensor, a non-empty tuple of inputs, or a dict of the arguments of forward by "
            f"name, got {example_inputs!r}"
        )
    if isinstance(example_inputs, Mapping):
        return _by_name(model, example_inputs, fixed or ())
    return tuple(example_inputs), {}


def inputs_to_keep(inputs: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    """A copy of the example inputs that the prepared model keeps for its export, as arguments of its own forward.

    Tensors are copied to the CPU, so that neither the device's memory nor a larger tensor of which they are a part is
    kept. Arguments that are left out (None) are not arguments of the prepared model.

    Args:
        inputs: the first result of :func:`inputs_in_order`.

    Returns:
        The copy; None without inputs, or if they hold something else than ordinary tensors and plain values, which may
        not be possible to copy or to pickle.
    """
    given = tuple(value for value in inputs or () if value is not None)
    if not given or not _is_plain(given):
        return None
    copied: tuple[Any, ...] = map_tensors(given, lambda tensor: tensor.detach().to("cpu", copy=True))
    return copied


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    if isinstance(value, Tensor):
        return type(value) in (Tensor, nn.Parameter) and not value.is_meta
    return value is None or isinstance(value, (bool, int, float, complex, str, torch.dtype))


def _by_name(
    model: nn.Module, given: Mapping[str, Any], fixed: Collection[str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The values of a mapping in the order of forward's arguments, up to the last that is given."""
    parameters = inspect.signature(model.forward).parameters.values()
    only_by_name = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    free = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name not in fixed]
    names = [p.name for p in free]
    where = f"example_inputs {described(given)} do not fit forward({', '.join(names)}) of {type(model).__name__}"
    for name in given:
        if name in fixed:
            raise ConfigError(f"{where}: {name!r} has a value in concrete_args already; give it in one of the two")
        if name in only_by_name:
            raise ConfigError(
                f"{where}: {name!r} is a keyword-only argument, which a prepared model cannot have. Move it before "
                "the * in forward, or fix its value with concrete_args"
            )
        if name not in names:
            raise ConfigError(f"{where}: it has no positional argument {name!r}; {nearest(name, names)}")
    missing = [p.name for p in free if p.default is p.empty and p.name not in given]
    if missing:
        raise ConfigError(f"{where}: {', '.join(missing)} is missing")
    last = max(names.index(name) for name in given)
    left_out = {p.name: p.default for p in free[:last] if p.name not in given and p.default is not None}
    return tuple(given.get(name) for name in names[: last + 1] if name not in left_out), left_out

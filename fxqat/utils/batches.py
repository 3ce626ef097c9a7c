"""Batches of data, in the forms that people have, as the arguments of a model's forward."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from fxqat.errors import ConfigError
from fxqat.utils.tensors import flatten_tensors, map_tensors
from fxqat.utils.torch_compat import unwrap

LABELS = ("label", "labels", "target", "targets")
"""Keys of a dict that are ignored if forward has no such argument."""

REAL_INPUTS = "give tensors with values, on the CPU or on the device of the model"

REQUIRED = inspect.Parameter.empty


def read_batches(model: nn.Module, batches: Iterable[Any], caller: str) -> list[tuple[Any, ...]]:
    """All batches, each as :func:`read_batch` returns it.

    Args:
        model: as for :func:`read_batch`.
        batches: an iterable of batches.
        caller: the function that reads them, for error messages.

    Raises:
        ConfigError: there are no batches, or one does not fit the model.
    """
    check_batches(batches, caller)
    found = [read_batch(model, batch, caller) for batch in batches]
    if not found:
        raise ConfigError(f"{caller}: needs at least one batch of inputs")
    return found


def check_batches(batches: Iterable[Any], caller: str) -> None:
    """Raise ``ConfigError`` for a single batch: iterating it would give its samples or its keys."""
    if isinstance(batches, (Tensor, Mapping)) or not isinstance(batches, Iterable):
        raise ConfigError(
            f"{caller}: batches must be an iterable of batches (a list, a generator, a DataLoader), got "
            f"{described(batches)}. Put a single batch into a list: [batch]"
        )


def read_batch(model: nn.Module, batch: Any, caller: str, fixed: Collection[str] = ()) -> tuple[Any, ...]:
    """The positional arguments that a batch gives to a model's forward, on the model's device.

    * A tensor is the first argument.
    * A tuple or list holds the arguments in order. One more item than forward has arguments is a label and is ignored.
    * A dict holds the arguments by name. The keys in :data:`LABELS` are ignored if forward has no such argument.

    Args:
        model: a prepared or a float model, also wrapped.
        batch: the batch.
        caller: the function that reads it, for error messages.
        fixed: arguments of forward that have a value already (``concrete_args``).

    Raises:
        ConfigError: the batch does not fit forward, or its last item may be a label or an optional argument.
    """
    model = unwrap(model)
    forward = _Forward.of(model, fixed)
    values = forward.by_name(batch, caller) if isinstance(batch, Mapping) else forward.in_order(batch, caller)
    return to_device_of(model, tuple(values))


def example_of(
    model: nn.Module, batch: Any, caller: str, fixed: Collection[str] = ()
) -> tuple[Any, ...] | dict[str, Any]:
    """A batch as ``example_inputs`` of ``prepare_by_platform``: those of a dict by name, without its labels.

    Args and errors: as for :func:`read_batch`, of a float model.
    """
    values = read_batch(model, batch, caller, fixed)
    if not isinstance(batch, Mapping):
        return values
    names = _Forward.of(unwrap(model), fixed).defaults
    return {name: value for name, value in zip(names, values, strict=False) if name in batch}


def in_their_places(
    model: nn.Module, given: tuple[Any, ...], fixed: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments in order, with the fixed ones that forward has among them; the other fixed ones stay by name."""
    in_order, by_name = list(given), dict(fixed)
    for place, parameter in enumerate(inspect.signature(model.forward).parameters.values()):
        is_in_order = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        if is_in_order and parameter.name in by_name and place < len(in_order):
            in_order.insert(place, by_name.pop(parameter.name))
    return tuple(in_order), by_name


def to_device_of(model: nn.Module, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The values, with all tensors on the model's device; if it has several, those on none of them go to the first.

    Raises:
        ConfigError: some have no values (meta device), and the model has.
    """
    devices = list(dict.fromkeys(tensor.device for tensor in chain(model.parameters(), model.buffers())))
    if not devices or all(tensor.device in devices for tensor in flatten_tensors(values)):
        return values
    if any(tensor.is_meta for tensor in flatten_tensors(values)):
        raise ConfigError(
            f"the inputs {described(values)} are on the meta device, without values, and the model is on "
            f"{devices[0]}: {REAL_INPUTS}"
        )
    moved: tuple[Any, ...] = map_tensors(values, lambda t: t if t.device in devices else t.to(devices[0]))
    return moved


def described(value: Any) -> str:
    """Types and shapes of what a batch holds, for error messages."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} tensor {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {described(item)}' for key, item in value.items())}}}"
    if isinstance(value, (tuple, list)):
        items = ", ".join(map(described, value))
        return f"[{items}]" if isinstance(value, list) else f"({items})"
    return type(value).__name__


def forward_of(model: nn.Module) -> str:
    """Name and arguments of a model's forward, for error messages: ``"forward(x, mask=None)"``."""
    return str(_Forward.of(unwrap(model)))


@dataclass(frozen=True)
class _Forward:
    """The positional arguments of a forward.

    Args:
        defaults: the default of each argument by its name, in order; ``REQUIRED`` if it has none.
        takes_more: whether it takes any number of further ones (``*args``).
    """

    defaults: Mapping[str, Any]
    takes_more: bool

    @classmethod
    def of(cls, model: nn.Module, fixed: Collection[str] = ()) -> _Forward:
        """Read the arguments from the signature."""
        parameters = inspect.signature(model.forward).parameters.values()
        in_order = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        defaults = {p.name: p.default for p in in_order if p.name not in fixed}
        return cls(defaults, any(p.kind == p.VAR_POSITIONAL for p in parameters))

    def __str__(self) -> str:
        arguments = [name if default is REQUIRED else f"{name}={default}" for name, default in self.defaults.items()]
        return f"forward({', '.join([*arguments, *(['*args'] if self.takes_more else [])])})"

    def in_order(self, batch: Any, caller: str) -> list[Any]:
        """The arguments in a tensor, tuple or list."""
        values = list(batch) if isinstance(batch, (tuple, list)) else [batch]
        if self.takes_more:
            return values
        most = len(self.defaults)
        if len(values) > most:  # None stands for an argument that prepare_by_platform fixed to its default
            values = [value for value in values if value is not None]
        if len(values) == most + 1:
            return values[:-1]
        least = sum(default is REQUIRED for default in self.defaults.values())
        if not least <= len(values) <= most:
            raise self._misfit(batch, caller)
        if len(values) > least and _may_be_label(values[-1]):
            raise ConfigError(
                f"{caller}: a batch is {described(batch)}: its last item may be a label or the argument "
                f"{list(self.defaults)[len(values) - 1]!r} of {self}. Give the inputs without the label, or a dict of "
                "the arguments by name"
            )
        return values

    def by_name(self, batch: Mapping[str, Any], caller: str) -> list[Any]:
        """The arguments in a dict, up to the last that it holds."""
        unknown = [key for key, value in batch.items() if key not in (*self.defaults, *LABELS) and value is not None]
        missing = [name for name, default in self.defaults.items() if default is REQUIRED and name not in batch]
        if unknown or missing:
            raise self._misfit(batch, caller)
        last = max((place for place, name in enumerate(self.defaults) if name in batch), default=-1)
        return [batch.get(name, default) for name, default in list(self.defaults.items())[: last + 1]]

    def _misfit(self, batch: Any, caller: str) -> ConfigError:
        return ConfigError(
            f"{caller}: a batch does not fit {self}: it is {described(batch)}. Expected a tensor, a tuple or list of "
            "the arguments in order (a label may follow), or a dict of the arguments by name"
        )


def _may_be_label(value: Any) -> bool:
    """Whether a value looks like the classes of a batch: a vector of integers."""
    return (
        isinstance(value, Tensor) and value.dim() <= 1 and not value.is_floating_point() and value.dtype != torch.bool
    )

"""Walk through nested inputs and outputs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fxqat.utils.torch_compat import tensor_version
from fxqat.utils.unused_names import unused_name

HALF = (torch.float16, torch.bfloat16)
"""The types of half precision."""

PART = 1 << 22
"""Elements of tensors that are compared at once: copies of all in float64 would be larger than a model."""


def widened(tensor: Tensor) -> Tensor:
    """A tensor in half precision as float32; any other as it is."""
    return tensor.float() if tensor.dtype in HALF else tensor


def copies_by_hand(model: nn.Module) -> dict[int, Any]:
    """Copies of what the modules of a model hold and ``copy.deepcopy`` refuses or is slow at, as its memo.

    See :func:`copy_by_hand`.
    """
    held = (v for module in model.modules() for v in (*vars(module).values(), *module.buffers(recurse=False)))
    return {id(value): copied for value in held if (copied := copy_by_hand(value)) is not None}


def copy_by_hand(value: Any) -> Any:
    """A copy of a tensor that was kept from the last run, or of an empty dict or set; None for anything else.

    Autograd refuses to copy such tensors: results that ``forward`` stores, and the weights that the hooks of torch's
    old ``weight_norm``, of ``spectral_norm`` and of ``torch.nn.utils.prune`` compute. A module has a dozen empty dicts
    and sets, and most of the time of ``copy.deepcopy`` goes there.
    """
    if isinstance(value, Tensor):
        return None if value.is_leaf else value.detach().clone()
    return type(value)() if type(value) in (dict, OrderedDict, set) and not value else None


def call_with_tensors(
    model: nn.Module, tensors: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a model with other parameters and buffers.

    Each tensor of a module is replaced once, also where the module has several names: under the second name
    ``functional_call`` would find what it put there under the first, and take that for the model's own.

    Args:
        model: the model; it has its own tensors again afterwards.
        tensors: other tensors by their names, one for all names of a tied one; it gets the buffers that forward
            assigns.
        args: arguments of the model.
        kwargs: the same, by name.
    """
    modules = dict(model.named_modules(remove_duplicate=False))

    def place(name: str) -> tuple[int, str]:
        path, _, attribute = name.rpartition(".")
        return id(modules[path]), attribute

    own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    tied = {id(tensor): tensors[name] for name, tensor in own.items() if name in tensors}
    first = {place(name): name for name in reversed(own)}
    given = {name: tensors.get(name, tied[id(own[name])]) for name in first.values() if id(own[name]) in tied}
    result = functional_call(model, given, args, kwargs, tie_weights=False)
    tensors.update({name: given[first[place(name)]] for name in own if name in tensors})
    return result


def flatten_tensors(value: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists, mappings and dataclasses, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [t for item in value.values() for t in flatten_tensors(item)]
    if isinstance(value, (tuple, list)):
        return [t for item in value for t in flatten_tensors(item)]
    if is_dataclass(value) and not isinstance(value, type):
        return [t for f in fields(value) for t in flatten_tensors(getattr(value, f.name))]
    return []


def versions_in(value: Any) -> list[tuple[int, int]]:
    """The versions of all tensors in nested arguments; they stay equal until something writes to one of them."""
    return [tensor_version(tensor) for tensor in flatten_tensors(value)]


def named_leaves(value: Any, prefix: str = "") -> dict[str, Tensor]:
    """The tensors of :func:`flatten_tensors` by names that tell where they are.

    The names are the keys of mappings, the fields of dataclasses and the numbers of items, joined by ``_``; they begin
    with ``output`` where that would be a number.

    Example:
        >>> list(named_leaves((torch.ones(1), {"h": [torch.ones(1), torch.ones(1)]})))
        ['output_0', 'output_1_h_0', 'output_1_h_1']
    """
    found: dict[str, Tensor] = {}
    for name, tensor in _leaves(value, prefix):
        found[unused_name(name, found)] = tensor
    return found


def _leaves(value: Any, prefix: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield prefix or "output", value
    elif isinstance(value, (tuple, list)):
        for number, item in enumerate(value):
            yield from _leaves(item, f"{prefix or 'output'}_{number}")
    else:
        is_object = is_dataclass(value) and not isinstance(value, type)
        fields_of = {f.name: getattr(value, f.name) for f in fields(value)} if is_object else value
        for key, item in fields_of.items() if isinstance(fields_of, Mapping) else ():
            yield from _leaves(item, f"{prefix}_{key}" if prefix else str(key))


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Apply a function to every tensor in nested tuples, lists and mappings; other values are unchanged."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(item, function) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [map_tensors(item, function) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def copied(value: Any) -> Any:
    """A copy of a value that may be written to."""
    return map_tensors(value, torch.clone)


def is_close(a: Tensor, b: Tensor, tolerance: float, floor: float = 0.0) -> bool:
    """Whether two tensors have one shape and nearly the same values; NaN equals NaN.

    Args:
        a: the exact tensor.
        b: the other one.
        tolerance: relative to each value and to the largest of ``a``; at least 8 units in the last place of its type.
        floor: absolute, added to it.
    """
    if a.shape != b.shape or a.is_complex() != b.is_complex():
        return False
    if a.is_meta or not a.numel() or (a.dtype == b.dtype and torch.equal(a, b)):
        return True
    if a.is_floating_point() or a.is_complex():
        tolerance = max(tolerance, 8 * torch.finfo(a.dtype).eps)
    wide = torch.complex128 if a.is_complex() else torch.float64
    limit = tolerance * largest_magnitude(a) + floor
    parts = zip(a.reshape(-1).split(PART), b.reshape(-1).split(PART), strict=True)
    return all(torch.allclose(y.to(wide), x.to(wide), rtol=tolerance, atol=limit, equal_nan=True) for x, y in parts)


def largest_magnitude(tensor: Tensor) -> float:
    """The largest absolute value of a tensor; NaN and infinite values count as 0, as does an empty tensor."""
    exact = tensor if tensor.is_floating_point() or tensor.is_complex() else tensor.double()
    parts = exact.reshape(-1).split(PART)
    return max((float(torch.nan_to_num(part.abs(), posinf=0.0).max()) for part in parts if part.numel()), default=0.0)

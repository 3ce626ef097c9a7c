"""Further inputs for a model, made of given ones: of other values, and of other sizes. And other weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fxqat.quantization.graph_module import QuantGraphModule
from fxqat.utils.contexts import parameters_kept
from fxqat.utils.node_meta import INFINITE_INPUT, is_additive_mask
from fxqat.utils.tensors import flatten_tensors, map_tensors
from fxqat.utils.torch_compat import is_sharded

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""

FEW = 8
"""Samples of a batch that are enough to compare two models."""

SHARE = 0.7
"""How much of its old value a number keeps."""


def of_other_values(inputs: Arguments) -> Arguments:
    """Inputs of the same sizes with other values.

    Samples change places. Float values become smaller, with noise; what is not negative, or within 0 and 1, stays so.
    Integers and booleans change places within a sample. Masks of attention stay as they are.
    """
    generator = torch.Generator().manual_seed(0)

    def changed(tensor: Tensor) -> Tensor:
        if not tensor.dim() or not tensor.numel() or tensor.is_complex() or tensor.is_meta:
            return tensor
        if not tensor.is_floating_point():
            return tensor.flip(0, -1) if tensor.dim() > 1 else tensor.flip(0)
        low, high = (float(value) for value in torch.aminmax(tensor.detach()))
        if is_additive_mask(tensor) or not (abs(low) < INFINITE_INPUT and abs(high) < INFINITE_INPUT):
            return tensor
        noise = torch.randn(tensor.shape, generator=generator).to(tensor.device, tensor.dtype)
        spread = float(tensor.detach().float().std()) if tensor.numel() > 1 else 0.0
        result = SHARE * tensor.detach().flip(0) + (1 - SHARE) * (spread or 1.0) * noise
        result = result.abs() if low >= 0 else result
        return result.clamp(max=1.0) if low >= 0 and high <= 1 else result

    args, kwargs = inputs
    return map_tensors(args, changed), map_tensors(kwargs, changed)


def larger(inputs: Arguments) -> Arguments:
    """Inputs with one more item in each list, or without lists with one more sample in the batch; copies of the last.

    The batch is the first dimension of the first tensor; a tensor of another size there stays as it is.
    """
    if holds_lists(inputs):
        return tuple(_longer(value) for value in inputs[0]), _longer(inputs[1])
    return _batch_changed(inputs, lambda tensor: torch.cat([tensor, tensor[-1:]]))


def fewer(inputs: Arguments) -> Arguments:
    """Inputs with the first :data:`FEW` samples of the batch, as of :func:`larger`; unchanged if that has no more."""
    if holds_lists(inputs) or (_batch_of(inputs) or 0) <= FEW:
        return inputs
    return _batch_changed(inputs, lambda tensor: tensor[:FEW])


def _batch_of(inputs: Arguments) -> int | None:
    return next((tensor.shape[0] for tensor in flatten_tensors(inputs) if tensor.dim()), None)


def _batch_changed(inputs: Arguments, change: Callable[[Tensor], Tensor]) -> Arguments:
    batch = _batch_of(inputs)

    def changed(tensor: Tensor) -> Tensor:
        return change(tensor) if tensor.dim() and tensor.shape[0] == batch else tensor

    return map_tensors(inputs[0], changed), map_tensors(inputs[1], changed)


def holds_lists(inputs: Arguments) -> bool:
    """Whether there is a list among the inputs."""
    return any(isinstance(value, list) for value in _nested(inputs))


@contextmanager
def other_weights(prepared: QuantGraphModule) -> Iterator[None]:
    """Change the trained weights of the float model by up to 10 % in the block; zeros become small numbers."""
    names = {*prepared.provenance.tensor_names.values()}
    names.update(part for split in prepared.provenance.split_tensors.values() for part in split.names)
    held = dict(prepared.named_parameters(remove_duplicate=False))
    tensors = [*(held[name] for name in names & held.keys()), *prepared.provenance.unread.values()]
    trained = {id(tensor): tensor for tensor in tensors if tensor.requires_grad and tensor.is_leaf}
    if any(is_sharded(tensor) for tensor in trained.values()):
        trained = {}
    with parameters_kept(trained.values()):
        with torch.no_grad():
            for tensor in trained.values():
                last = torch.arange(tensor.shape[-1] if tensor.dim() else 1, device=tensor.device)
                wave = (0.1 * (last + 1).cos()).to(tensor.dtype).reshape(tensor.shape[-1:])
                is_zero = tensor == 0
                tensor.mul_(1 + wave)
                torch.where(is_zero, wave / 10, tensor, out=tensor)
        yield


def _longer(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _longer(item) for key, item in value.items()}
    if isinstance(value, list):
        return [*value, *value[-1:]]
    return value


def _nested(value: Any) -> list[Any]:
    """A value and the items in it."""
    items = (
        list(value.values()) if isinstance(value, Mapping) else list(value) if isinstance(value, (tuple, list)) else []
    )
    return [value, *(found for item in items for found in _nested(item))]

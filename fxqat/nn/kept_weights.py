"""Weights that are rounded once for several forward passes, for gradient accumulation."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from fxqat.errors import ConfigError
from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.utils.torch_compat import tensor_version

Tensors = TypeVar("Tensors", bound=tuple[Tensor | None, ...])


class KeptWeights:
    """The deployed weights and biases of layers, computed in the first forward pass and reused by the next ones.

    All passes get the same detached copies, which sum their gradients. :meth:`backward` runs the backward pass of the
    rounding once, with these sums.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[Any, Any]] = {}
        self._is_open = True

    def __len__(self) -> int:
        """Number of layers with kept tensors; a layer counts once for each quantizer of its input."""
        return len(self._kept)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def tensors(self, key: Hashable, make: Callable[[], Tensors]) -> Tensors:
        """The tensors of a layer; newly made and not kept if gradients are off.

        Args:
            key: the layer, and what its tensors depend on beside its parameters.
            make: computes them.
        """
        if not torch.is_grad_enabled():
            return make()
        if key not in self._kept:
            made = make()
            self._kept[key] = made, tuple(self._copy(tensor) for tensor in made)
        result: Tensors = self._kept[key][1]
        return result

    def backward(self) -> None:
        """Run the backward pass of the rounding, from the copies to the parameters."""
        pairs = [pair for kept in self._kept.values() for pair in zip(*kept, strict=True)]
        found = [(made, copy.grad) for made, copy in pairs if made is not copy and copy is not None]
        found = [(made, grad) for made, grad in found if grad is not None]
        if found:
            torch.autograd.backward(*zip(*found, strict=True))  # type: ignore[arg-type]

    def close(self) -> None:
        """Drop the tensors. A later backward pass through them is an error."""
        self._kept.clear()
        self._is_open = False

    def _copy(self, tensor: Tensor | None) -> Tensor | None:
        if tensor is None or not tensor.requires_grad:
            return tensor
        copy = tensor.detach().requires_grad_()
        copy.register_hook(self._require_open)
        return copy

    def _require_open(self, grad: Tensor) -> None:
        if not self._is_open:
            raise ConfigError(
                "round_weights_once: a backward pass ran after the context, and the gradients of weights would be "
                "lost. Call loss.backward() inside."
            )


class Keeping(Protocol):
    """A layer that can be given kept weights."""

    kept_weights: KeptWeights | None


def deployed(
    layer: Keeping,
    quants: Sequence[FakeQuantizeBase | None],
    make: Callable[[], Tensors],
    bn: nn.Module | None = None,
) -> Tensors:
    """The deployed tensors of a layer: the kept ones if its ``kept_weights`` is not None, else newly made.

    Args:
        layer: the layer.
        quants: the fake-quants that they depend on.
        make: computes them.
        bn: the BatchNorm that is folded into them; they are made again when its statistics have changed.
    """
    kept = layer.kept_weights
    if kept is None:
        return make()
    switches = [(quant, quant.fake_quant_enabled) for quant in quants if quant is not None]
    statistics = [] if bn is None else [tensor_version(buffer) for buffer in bn.buffers()]
    found: Tensors = kept.tensors((layer, *switches, *statistics), make)
    return found

"""Estimate the loss that rounding each unit causes, from derivatives of the loss.

A small change ``d`` of a tensor adds ``0.5 * d' H d`` to the loss. H is approximated by a diagonal, in one of two ways:

* ``"hessian"``: the mean of its diagonal, ``trace(H) / n``, with Hutchinson's estimator ``E[z' H z]`` over random signs
  z. Source: Dong et al. 2020, HAWQ-V2 (arXiv:1911.03852), section 3, for weights and for activations.
* ``"fisher"``: the Fisher information: the mean squared gradient of one sample, for labels drawn from the model's own
  probabilities. Source: Li et al. 2021, BRECQ (arXiv:2102.05426), section 3.3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxqat.errors import ConfigError
from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.nn.parametrized import WEIGHT, has_computed_weight
from fxqat.nn.qat import QATLayer
from fxqat.nn.recurrent import QATRecurrentLayer, unstacked
from fxqat.tools.mixed_precision.bank import WidthBank
from fxqat.tools.mixed_precision.units import Unit, layer_at
from fxqat.utils.contexts import hooked
from fxqat.utils.tensors import flatten_tensors

Loss = Callable[[Any, Any], Tensor]
"""The loss of the outputs and the batch's target, a mean over samples."""
Diagonal = Callable[[Tensor, list[Tensor], int], list[Tensor]]
"""The Hessian's diagonal from the loss, the tensors and the number of samples; broadcastable to each tensor."""


@dataclass(frozen=True)
class Tap:
    """What is rounded, in one call of the model.

    Args:
        unit: the unit that it belongs to.
        values: its tensors before rounding: an activation, or the parameters of a weight.
        variables: the tensors to differentiate by: these, or zeros that are added to them.
    """

    unit: Unit
    values: list[Tensor]
    variables: list[Tensor]


def own_cross_entropy(outputs: Any, target: Any) -> Tensor:
    """Cross entropy to the model's own probabilities (classes in dimension 1); its Hessian is the Fisher matrix."""
    logits = flatten_tensors(outputs)[0].float()
    return F.cross_entropy(logits, logits.detach().softmax(1))


def drawn_cross_entropy(outputs: Any, target: Any) -> Tensor:
    """Cross entropy to labels drawn from the model's own probabilities."""
    logits = flatten_tensors(outputs)[0].float()
    return F.cross_entropy(logits, torch.distributions.Categorical(logits=logits.detach().movedim(1, -1)).sample())


def traces(probes: int) -> Diagonal:
    """The mean of the diagonal, by Hutchinson's estimator with ``probes`` random sign vectors."""

    def diagonal(loss: Tensor, tensors: list[Tensor], samples: int) -> list[Tensor]:
        gradients = torch.autograd.grad(loss, tensors, create_graph=True)
        found = [torch.zeros((), dtype=torch.float64) for _ in tensors]
        drawn = [orthogonal_signs(tensor) for tensor in tensors]
        for _ in range(probes):
            signs = [next(draw) for draw in drawn]
            try:
                products = torch.autograd.grad(gradients, tensors, signs, retain_graph=True)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                raise ConfigError(
                    f"hessian: torch has no second derivative of an operation of the model: {error} Use 'fisher', "
                    "'alone' or 'without'."
                ) from error
            for i, (sign, product) in enumerate(zip(signs, products, strict=True)):
                found[i] += (sign * product).double().sum().cpu() / probes
        return [total / tensor.numel() for total, tensor in zip(found, tensors, strict=True)]

    return diagonal


def orthogonal_signs(like: Tensor) -> Iterator[Tensor]:
    """Endless random signs of a tensor's shape: rows of a Hadamard matrix with random signs of its columns.

    Each row by itself is uniformly random, so the estimator has no bias. As many rows as the tensor has elements,
    rounded up to a power of two, give the exact trace; independent signs need many times more.
    """
    size = 1 << max(1, like.numel() - 1).bit_length()
    columns = torch.arange(like.numel(), device=like.device)
    while True:
        random = torch.randint_like(like, 2) * 2 - 1
        for row in torch.randperm(size).tolist():
            parity = columns & row
            for shift in (32, 16, 8, 4, 2, 1):
                parity = parity ^ (parity >> shift)
            yield random * (1 - 2 * (parity & 1)).view_as(like)


def squared_gradients(loss: Tensor, tensors: list[Tensor], samples: int) -> list[Tensor]:
    """The diagonal of the Fisher information: the gradient of a mean over samples, squared, times their number."""
    return [samples * gradient.double().square().cpu() for gradient in torch.autograd.grad(loss, tensors)]


def curvature_scores(
    bank: WidthBank,
    batches: Sequence[Sequence[Any]],
    targets: Sequence[Any],
    loss: Loss,
    diagonal: Diagonal,
    seed: int = 0,
) -> dict[str, dict[int, float]]:
    """Estimate what each bit width of each unit adds to a loss.

    Args:
        bank: the model with its fake-quants.
        batches: positional arguments of the model, batch by batch.
        targets: target of each batch, for the loss.
        loss: loss of the float model.
        diagonal: :func:`traces` or :func:`squared_gradients`.
        seed: seed of the random numbers.

    Returns:
        The added loss by unit name and bits, a mean over the batches.

    Raises:
        ConfigError: the loss has no second derivative, which :func:`traces` needs.
    """
    scores = {name: dict.fromkeys(widths, 0.0) for name, widths in bank.widths.items()}
    quants = {(name, bits): bank.quants(name, bits) for name, widths in bank.widths.items() for bits in widths}
    with torch.random.fork_rng(), torch.enable_grad(), _all_trained(bank):
        torch.manual_seed(seed)
        for batch, target in zip(batches, targets, strict=True):
            outputs, taps = _run(bank, batch)
            samples = next(x.shape[0] for x in batch if isinstance(x, Tensor) and x.dim())
            found = iter(diagonal(loss(outputs, target), [tensor for tap in taps for tensor in tap.variables], samples))
            for tap in taps:
                curved = [next(found) for _ in tap.variables]
                for bits in scores[tap.unit.name]:
                    noise = _noise(bank, tap, quants[tap.unit.name, bits])
                    added = [float((one * other.square()).sum()) for one, other in zip(curved, noise, strict=True)]
                    scores[tap.unit.name][bits] += 0.5 * sum(added) / len(batches)
    return scores


@contextmanager
def _all_trained(bank: WidthBank) -> Iterator[None]:
    """Give frozen weights and buffers gradients for a while: they are rounded like the other weights."""
    layers = [layer_at(bank.model, unit.layers[0]) for unit in bank.units.values() if unit.is_weight]
    tensors = [tensor for layer in layers for found in layer.weight_tensors() for tensor in found]
    frozen = [tensor for tensor in tensors if tensor.is_leaf and not tensor.requires_grad]
    for tensor in frozen:
        tensor.requires_grad_()
    try:
        yield
    finally:
        for tensor in frozen:
            tensor.requires_grad_(False)


def _run(bank: WidthBank, batch: Sequence[Any]) -> tuple[Any, list[Tap]]:
    """The float model's outputs, and all tensors that the quantized model rounds."""
    gm, taps = bank.model, []
    changes: dict[nn.Module, Tensor] = {}  # of computed weights, by what computes them
    for unit in bank.units.values():
        if unit.is_weight:
            layer = layer_at(gm, unit.layers[0])
            tensors = [tensor for found in layer.weight_tensors() for tensor in found]
            values = [tensor.detach() for tensor in tensors]
            if has_computed_weight(layer):
                parametrizations: Any = layer.parametrizations
                tensors = [torch.zeros_like(tensor, requires_grad=True) for tensor in values]
                [changes[parametrizations[WEIGHT]]] = tensors
            taps.append(Tap(unit, values, tensors))

    units: dict[nn.Module, Unit] = {unit.quants(gm)[0]: unit for unit in bank.units.values() if not unit.is_weight}

    def tap(quant: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if not isinstance(output, Tensor) or kwargs.get("on_grid"):
            return output
        change = torch.zeros_like(output, requires_grad=True)
        taps.append(Tap(units[quant], [output.detach()], [change]))
        return output + change

    change = hooked(changes, lambda computes, args, output: output + changes[computes])
    with change, hooked(units, tap, with_kwargs=True):
        outputs = gm(*batch)
    return outputs, taps


@torch.no_grad()
def _noise(bank: WidthBank, tap: Tap, quants: list[FakeQuantizeBase]) -> list[Tensor]:
    """The rounding error of each tensor. A weight is rounded with its BatchNorm folded in, and unfolded again."""
    layer = layer_at(bank.model, tap.unit.layers[0]) if tap.unit.is_weight else None
    whole = tap.values if layer is None else layer.weight_values()
    errors = [quant.quantize(values) - values for quant, values in zip(quants, whole, strict=True)]
    if isinstance(layer, QATRecurrentLayer):
        directions = unstacked(layer.mode, len(layer.names), errors[0], errors[1], None)
        errors = [error for tensors in zip(*directions, strict=True) for error in tensors]
    elif isinstance(layer, QATLayer):
        errors = [torch.where(whole[0] == 0, 0.0, errors[0] * tap.values[0] / whole[0])]
    return [error.double().cpu() for error in errors]

"""How much a model loses by the rounding of each unit, from derivatives of a loss.

A small change ``d`` of a tensor adds ``0.5 * d' H d`` to the loss. Of H the diagonal is taken, in one of two ways:

* ``"hessian"``: its mean, ``trace(H) / n``, the trace by Hutchinson's estimator ``E[z' H z]`` over random signs z.
  Source: Dong et al. 2020, HAWQ-V2 (arXiv:1911.03852), section 3, for weights and for activations.
* ``"fisher"``: the mean square of the gradients of one sample, for labels that the model itself gives; the Fisher
  information in the place of the Hessian. Source: Li et al. 2021, BRECQ (arXiv:2102.05426), section 3.3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxqat.nn.qat import QATLayer
from fxqat.tools.mixed_precision.bank import WidthBank
from fxqat.tools.mixed_precision.units import Unit, quant_at
from fxqat.utils.tensors import flatten_tensors

Loss = Callable[[Any, Any], Tensor]
"""A mean over samples, of the outputs and the batch's target."""
Diagonal = Callable[[Tensor, list[Tensor], int], list[Tensor]]
"""Of the Hessian, from the loss, for some tensors and so many samples; each of a shape that fits the tensor's."""


@dataclass(frozen=True)
class Tap:
    """A tensor that is rounded, in one call of the model.

    Args:
        unit: what it belongs to.
        value: before rounding.
        moved: what derivatives are taken of: the weight, or zeros that are added to the value.
    """

    unit: Unit
    value: Tensor
    moved: Tensor


def own_cross_entropy(outputs: Any, target: Any) -> Tensor:
    """Cross entropy to the model's own probabilities of classes along dimension 1: curved as the Fisher information."""
    logits = flatten_tensors(outputs)[0].float()
    return F.cross_entropy(logits, logits.detach().softmax(1))


def drawn_cross_entropy(outputs: Any, target: Any) -> Tensor:
    """Cross entropy to labels that are drawn from the model's own probabilities."""
    logits = flatten_tensors(outputs)[0].float()
    return F.cross_entropy(logits, torch.distributions.Categorical(logits=logits.detach().movedim(1, -1)).sample())


def traces(probes: int) -> Diagonal:
    """The mean of the diagonal, by Hutchinson's estimator with so many random signs."""

    def diagonal(loss: Tensor, tensors: list[Tensor], samples: int) -> list[Tensor]:
        gradients = torch.autograd.grad(loss, tensors, create_graph=True)
        found = [torch.zeros((), dtype=torch.float64) for _ in tensors]
        drawn = [orthogonal_signs(tensor) for tensor in tensors]
        for _ in range(probes):
            signs = [next(draw) for draw in drawn]
            products = torch.autograd.grad(gradients, tensors, signs, retain_graph=True)
            for i, (sign, product) in enumerate(zip(signs, products, strict=True)):
                found[i] += (sign * product).double().sum().cpu() / probes
        return [total / tensor.numel() for total, tensor in zip(found, tensors, strict=True)]

    return diagonal


def orthogonal_signs(like: Tensor) -> Iterator[Tensor]:
    """Random signs of a tensor's shape, without end: rows of a Hadamard matrix, whose columns change sign at random.

    Each row alone is as random signs are, so the estimator has no bias. As many of them as the tensor has elements, up
    to a power of two, give the trace exactly; of independent signs that takes many times more.
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
    """What each width of each unit adds to a loss.

    Args:
        bank: the model with its fake-quants.
        batches: inputs of the model.
        targets: of each of them, for the loss.
        loss: of the float model.
        diagonal: :func:`traces` or :func:`squared_gradients`.
        seed: of random numbers.

    Returns:
        The loss by the unit's name and bits, a mean over the batches.
    """
    scores = {name: dict.fromkeys(widths, 0.0) for name, widths in bank.widths.items()}
    quants = {(name, bits): bank.quant(name, bits) for name, widths in bank.widths.items() for bits in widths}
    with torch.random.fork_rng(), torch.enable_grad():
        torch.manual_seed(seed)
        for batch, target in zip(batches, targets, strict=True):
            outputs, taps = _run(bank, batch)
            samples = next(x.shape[0] for x in batch if isinstance(x, Tensor) and x.dim())
            found = diagonal(loss(outputs, target), [tap.moved for tap in taps], samples)
            for tap, curved in zip(taps, found, strict=True):
                for bits, total in scores[tap.unit.name].items():
                    noise = _noise(bank, tap, quants[tap.unit.name, bits])
                    scores[tap.unit.name][bits] = total + 0.5 * float((curved * noise.square()).sum()) / len(batches)
    return scores


def _run(bank: WidthBank, batch: Sequence[Any]) -> tuple[Any, list[Tap]]:
    """The float model's outputs, and all that is rounded in the quantized one."""
    gm, taps = bank.model, []
    for unit in bank.units.values():
        if unit.layer is not None:
            weight = gm.get_submodule(unit.layer).weight
            assert isinstance(weight, nn.Parameter)
            taps.append(Tap(unit, weight.detach(), weight))

    def tap_of(unit: Unit) -> Callable[..., Any]:
        def hook(quant: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            if not isinstance(output, Tensor) or kwargs.get("on_grid"):
                return output
            taps.append(Tap(unit, output.detach(), torch.zeros_like(output, requires_grad=True)))
            return output + taps[-1].moved

        return hook

    with ExitStack() as stack:
        for unit in bank.units.values():
            if unit.layer is None:
                handle = quant_at(gm, unit.path).register_forward_hook(tap_of(unit), with_kwargs=True)
                stack.callback(handle.remove)
        outputs = gm(*batch)
    return outputs, taps


@torch.no_grad()
def _noise(bank: WidthBank, tap: Tap, quant: Any) -> Tensor:
    """What rounding adds to a tensor. A weight is rounded as it is with BatchNorm folded in, and unfolded again."""
    if tap.unit.layer is None:
        values: Tensor = quant.quantize(tap.value)
        return (values - tap.value).double().cpu()
    layer = bank.model.get_submodule(tap.unit.layer)
    assert isinstance(layer, QATLayer)
    folded = layer.folded()[0]
    factor = torch.where(folded == 0, torch.zeros_like(folded), tap.value / folded)
    rounded: Tensor = quant.quantize(folded)
    return ((rounded - folded) * factor).double().cpu()

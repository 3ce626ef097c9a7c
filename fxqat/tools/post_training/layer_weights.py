"""The weights of a layer, each with its fake-quant and with the inputs that it multiplies.

A convolution or a linear layer has one weight. A recurrent layer has two: that of the input, ``W``, multiplies the
input of every step, and that of the state, ``R``, the hidden state before every step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.nn.fold import bn_factor
from fxqat.nn.qat import QATLayer
from fxqat.nn.recurrent import QATRecurrentLayer, run_layer, unstacked
from fxqat.nn.weighted import WeightedOp
from fxqat.tools.post_training.layer_matrices import inputs_to_columns

PROBES = 4

Layer = QATLayer | QATRecurrentLayer


class LayerWeight(ABC):
    """One weight of a layer.

    Args:
        layer: the layer.
        attribute: the name of the weight's fake-quant in it.
        op: how the weight becomes matrices, see :mod:`fxqat.tools.post_training.layer_matrices`.
    """

    def __init__(self, layer: Layer, attribute: str, op: WeightedOp) -> None:
        self.layer = layer
        self.attribute = attribute
        self.op = op

    @property
    def quant(self) -> FakeQuantizeBase:
        """Its fake-quant; setting it replaces the one of the layer."""
        return getattr(self.layer, self.attribute)  # type: ignore[no-any-return]

    @quant.setter
    def quant(self, quant: FakeQuantizeBase) -> None:
        setattr(self.layer, self.attribute, quant)

    @abstractmethod
    def value(self) -> Tensor:
        """What the fake-quant rounds."""

    @abstractmethod
    def write_(self, weight: Tensor) -> None:
        """Change the layer's parameters so that :meth:`value` is ``weight``."""

    @abstractmethod
    def columns(self, args: tuple[Any, ...], output: Any) -> Tensor:
        """What the matrices multiply in one call of the layer, ``(groups, inputs per output, samples)``.

        Args:
            args: the arguments of the call.
            output: its result.
        """


class FoldedWeight(LayerWeight):
    """The weight of a convolution or a linear layer, with BatchNorm folded in."""

    layer: QATLayer

    def __init__(self, layer: QATLayer) -> None:
        super().__init__(layer, "weight_fake_quant", layer.op)

    def value(self) -> Tensor:
        """See :class:`LayerWeight`."""
        return self.layer.folded()[0]

    @torch.no_grad()
    def write_(self, weight: Tensor) -> None:
        """See :class:`LayerWeight`."""
        if self.layer.bn is not None:
            factor = self.op.per_output_channel(bn_factor(self.layer.bn), weight)
            weight = torch.where(factor == 0, self.layer.weight, weight / factor)
        self.layer.weight.copy_(weight)

    def columns(self, args: tuple[Any, ...], output: Any) -> Tensor:
        """See :class:`LayerWeight`."""
        return inputs_to_columns(self.op, self.value(), args[0])


class RecurrentWeight(LayerWeight):
    """``W`` or ``R`` of a recurrent layer; each direction is a group."""

    layer: QATRecurrentLayer
    place: int

    def __init__(self, layer: QATRecurrentLayer, attribute: str) -> None:
        groups = len(layer.names) * len(layer.cell.gates)
        super().__init__(layer, attribute, WeightedOp(F.conv1d, {"groups": groups}, type(layer), {}))

    def columns(self, args: tuple[Any, ...], output: Any) -> Tensor:
        """See :class:`LayerWeight`."""
        inputs = self.inputs(args, output)  # (D, T, N, columns)
        weights = gate_sensitivities(self.layer, *args)  # (D, G, T, N)
        columns: Tensor = (weights[..., None] * inputs[:, None]).flatten(0, 1).flatten(1, 2).mT
        return columns

    @abstractmethod
    def inputs(self, args: tuple[Any, ...], output: Any) -> Tensor:
        """What each direction multiplies at each step, ``(D, T, N, inputs per output)``."""

    def value(self) -> Tensor:
        """See :class:`LayerWeight`."""
        return self.layer.stacked()[self.place]

    @torch.no_grad()
    def write_(self, weight: Tensor) -> None:
        """See :class:`LayerWeight`."""
        tensors = list(self.layer.stacked()[:2])
        tensors[self.place] = weight
        given = unstacked(self.layer.mode, len(self.layer.names), *tensors, None)
        for names, values in zip(self.layer.names, given, strict=True):
            getattr(self.layer, names[self.place]).copy_(values[self.place])


class InputWeight(RecurrentWeight):
    """``W`` of a recurrent layer."""

    place = 0

    def __init__(self, layer: QATRecurrentLayer) -> None:
        super().__init__(layer, "weight_ih_fake_quant")

    def inputs(self, args: tuple[Any, ...], output: Any) -> Tensor:
        """See :class:`RecurrentWeight`."""
        x: Tensor = args[0]
        return x.expand(len(self.layer.names), *x.shape)


class StateWeight(RecurrentWeight):
    """``R`` of a recurrent layer."""

    place = 1

    def __init__(self, layer: QATRecurrentLayer) -> None:
        super().__init__(layer, "weight_hh_fake_quant")

    def inputs(self, args: tuple[Any, ...], output: Any) -> Tensor:
        """See :class:`RecurrentWeight`."""
        y: Tensor = output[0]
        start = args[1] if len(args) > 1 else torch.zeros_like(y[0])
        before = [torch.cat([start[:1], y[:-1, 0]])]
        if y.shape[1] == 2:  # the second direction starts at the last step
            before.append(torch.cat([y[1:, 1], start[1:]]))
        return torch.stack(before)


def gate_sensitivities(layer: QATRecurrentLayer, x: Tensor, *states: Tensor) -> Tensor:
    """How much a small error of a product of a gate changes the layer's output, at each step.

    ``W`` gets the identity as further columns, whose inputs are zeros: the gradient with respect to these is that with
    respect to the products. The output is multiplied by random signs ``v``, of which ``E (J^T v)^2`` is the sum of the
    squares of each column of the Jacobian ``J``.

    Args:
        layer: the layer; its weights are not rounded here.
        x: ``(T, N, I)``.
        states: the states at the start.

    Returns:
        The root mean square over the units of a gate, ``(D, G, T, N)``.
    """
    w, r, b = layer.stacked()
    directions, gates = len(layer.names), len(layer.cell.gates)
    found = []
    with torch.enable_grad():
        extra = x.new_zeros(directions, *x.shape[:2], gates * layer.hidden_size, requires_grad=True)
        wide = torch.cat([x, *extra], -1)
        eye = torch.eye(extra.shape[-1], dtype=w.dtype, device=w.device)
        w = torch.cat([w, torch.block_diag(*[eye] * directions)], 1)
        given = unstacked(layer.mode, directions, w, r, b)
        y = run_layer(layer.mode, wide, states, given)[0]
        for _ in range(PROBES):
            signs = torch.randint_like(y, 2) * 2 - 1
            (gradient,) = torch.autograd.grad(y, extra, signs, retain_graph=True)
            found.append(gradient.square())
    squares = torch.stack(found).mean(0).unflatten(-1, (gates, -1)).mean(-1)
    return squares.movedim(-1, 1).sqrt()


def weights_of(layer: Layer) -> list[LayerWeight]:
    """The weights of a layer, in the order of its ``quantized_weights``."""
    if isinstance(layer, QATRecurrentLayer):
        return [InputWeight(layer), StateWeight(layer)]
    return [FoldedWeight(layer)]

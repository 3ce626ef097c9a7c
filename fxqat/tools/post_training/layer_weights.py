"""The weights of a layer, each with its fake-quant and with the inputs that it multiplies.

A convolution or a linear layer has one weight. A recurrent layer has two: that of the input, ``W``, multiplies the
input of every step, and that of the state, ``R``, the hidden state before every step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fxqat.errors import ConfigError
from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.nn.fold import bn_factor
from fxqat.nn.parametrized import has_computed_weight
from fxqat.nn.qat import QATLayer
from fxqat.nn.recurrent import QATRecurrentLayer, step_mask, unstacked
from fxqat.nn.weighted import WeightedOp
from fxqat.tools.post_training.layer_matrices import inputs_to_columns

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
    def read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Tensor:
        """The values that the weight multiplies in one call of the layer.

        Args:
            args: the arguments of the call.
            kwargs: its arguments by name.
            output: its result.
        """

    def columns(self, read: Tensor) -> Tensor:
        """What the matrices multiply, ``(groups, inputs per output, samples)``, of what :meth:`read` gave."""
        return read

    def pieces(self, read: Tensor) -> Sequence[Tensor]:
        """The values in pieces, in order, whose columns take much less memory than those of all together."""
        return [read]


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

    def read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Tensor:
        """See :class:`LayerWeight`."""
        return args[0]  # type: ignore[no-any-return]

    def columns(self, read: Tensor) -> Tensor:
        """See :class:`LayerWeight`."""
        return inputs_to_columns(self.op, self.value(), read)

    def pieces(self, read: Tensor) -> Sequence[Tensor]:
        """See :class:`LayerWeight`; columns of a convolution repeat an input as often as its kernel has weights."""
        dims = self.layer.weight.dim()
        return [read] if dims == 2 or read.dim() < dims else read.split(1)


class RecurrentWeight(LayerWeight):
    """``W`` or ``R`` of a recurrent layer; each direction is a group."""

    layer: QATRecurrentLayer
    place: int

    def __init__(self, layer: QATRecurrentLayer, attribute: str) -> None:
        groups = len(layer.names)
        super().__init__(layer, attribute, WeightedOp(F.conv1d, {"groups": groups}, type(layer), {}))

    def value(self) -> Tensor:
        """See :class:`LayerWeight`."""
        w, r, _ = self.layer.stacked()
        return (w, r)[self.place]

    @torch.no_grad()
    def write_(self, weight: Tensor) -> None:
        """See :class:`LayerWeight`."""
        w, r, _ = self.layer.stacked()
        w, r = (weight, r) if self.place == 0 else (w, weight)
        given = unstacked(self.layer.mode, len(self.layer.names), w, r, None)
        for names, values in zip(self.layer.names, given, strict=True):
            getattr(self.layer, names[self.place]).copy_(values[self.place])


class InputWeight(RecurrentWeight):
    """``W`` of a recurrent layer."""

    place = 0

    def __init__(self, layer: QATRecurrentLayer) -> None:
        super().__init__(layer, "weight_ih_fake_quant")

    def read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Tensor:
        """See :class:`LayerWeight`."""
        x: Tensor = args[0]
        columns = x[step_mask(x, kwargs.get("lengths"))].T
        return columns.expand(len(self.layer.names), *columns.shape)


class StateWeight(RecurrentWeight):
    """``R`` of a recurrent layer."""

    place = 1

    def __init__(self, layer: QATRecurrentLayer) -> None:
        super().__init__(layer, "weight_hh_fake_quant")

    def read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Tensor:
        """See :class:`LayerWeight`."""
        y: Tensor = output[0]
        start = args[1] if len(args) > 1 else torch.zeros_like(y[0])
        before = [torch.cat([start[:1], y[:-1, 0]])]
        steps = step_mask(args[0], kwargs.get("lengths"))
        if y.shape[1] == 2:  # the second direction starts at the last step
            has_next = torch.cat([steps[1:], torch.zeros_like(steps[:1])]).unsqueeze(-1)
            before.append(torch.where(has_next, y[:, 1].roll(-1, 0), start[1]))
        return torch.stack([states[steps] for states in before]).mT


def weights_of(layer: Layer) -> list[LayerWeight]:
    """The weights of a layer, in the order of its ``quantized_weights``; none if its weight is computed."""
    if has_computed_weight(layer):
        return []
    if isinstance(layer, QATRecurrentLayer):
        return [InputWeight(layer), StateWeight(layer)]
    return [FoldedWeight(layer)]


def require_plain(path: str, weight: LayerWeight, caller: str) -> None:
    """Raise if a weight's fake-quant rounds a function of the weight: no result could be written into the weight.

    Args:
        path: of the layer.
        weight: one of its weights.
        caller: names the function in the error.

    Raises:
        ConfigError: it does.
    """
    if type(weight.quant).target is not FakeQuantizeBase.target:
        raise ConfigError(
            f"{caller}: {type(weight.quant).__name__} of {path} rounds a function of the weight; "
            "prepare the model with another w_fakequantize, such as Fixed or Learnable"
        )

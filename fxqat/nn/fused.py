"""The fused float layer: layer, BatchNorm and activation, which are quantized as one."""

from __future__ import annotations

from torch import Tensor, nn

from fxqat.nn.fold import fold_bn
from fxqat.nn.weighted import WeightedLayer, weighted_op
from fxqat.utils.torch_compat import BatchNorm


class FusedLayer(nn.Module):
    """A weighted layer with the BatchNorm and the activation after it.

    Args:
        layer: one of ``fxqat.nn.weighted.WEIGHTED_TYPES``.
        bn: the BatchNorm after the layer, or None.
        activation: the activation after both, or None.
    """

    def __init__(self, layer: WeightedLayer, bn: BatchNorm | None = None, activation: nn.Module | None = None) -> None:
        super().__init__()
        self.layer = layer
        self.bn = bn
        self.activation = activation
        self.training = layer.training

    def forward(self, x: Tensor) -> Tensor:
        """``activation(bn(layer(x)))``."""
        y: Tensor = self.layer(x)
        if self.bn is not None:
            y = self.bn(y)
        if self.activation is not None:
            y = self.activation(y)
        return y

    def folded(self) -> FusedLayer:
        """The same function with the BatchNorm folded into the weights, for a frozen copy of the layer."""
        if self.bn is None:
            return self
        weight, bias = fold_bn(weighted_op(self.layer), self.layer.weight, self.layer.bias, self.bn)
        self.layer.weight = nn.Parameter(weight.detach())
        self.layer.bias = nn.Parameter(bias.detach())
        return FusedLayer(self.layer, None, self.activation)

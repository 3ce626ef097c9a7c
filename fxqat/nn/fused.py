"""The fused float layer: layer, BatchNorm and activation, which are quantized as one."""

from __future__ import annotations

from torch import Tensor, nn

from fxqat.nn.fold import fold_bn
from fxqat.nn.weighted import WeightedLayer, weighted_layer, weighted_op
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
        """A layer that computes the same with BatchNorm folded into the weights; itself if it has no BatchNorm."""
        if self.bn is None:
            return self
        op = weighted_op(self.layer)
        folded = fold_bn(op, self.layer.weight, self.layer.bias, self.bn)
        weight, bias = (nn.Parameter(tensor.detach()) for tensor in folded)
        layer = weighted_layer(op.layer, op.options, weight, bias).train(self.training)
        return FusedLayer(layer, None, self.activation)

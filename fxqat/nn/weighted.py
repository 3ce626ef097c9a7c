"""Every weighted layer as a function of input, weight and bias, with a few plain numbers.

All differences between Conv1d, ConvTranspose3d, Linear and ProductLayer are here, so that QAT layers, folding and
lowering need no cases.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from fxqat.nn.product_layer import ProductLayer, linear_product
from fxqat.utils.own_forward import type_of

CONVS: dict[type[nn.Module], Callable[..., Tensor]] = {nn.Conv1d: F.conv1d, nn.Conv2d: F.conv2d, nn.Conv3d: F.conv3d}
TRANSPOSED: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.ConvTranspose1d: F.conv_transpose1d,
    nn.ConvTranspose2d: F.conv_transpose2d,
    nn.ConvTranspose3d: F.conv_transpose3d,
}
WEIGHTED_TYPES: tuple[type[nn.Module], ...] = (*CONVS, *TRANSPOSED, nn.Linear, ProductLayer)
WeightedLayer = (
    nn.Conv1d
    | nn.Conv2d
    | nn.Conv3d
    | nn.ConvTranspose1d
    | nn.ConvTranspose2d
    | nn.ConvTranspose3d
    | nn.Linear
    | ProductLayer
)


@dataclass(frozen=True)
class WeightedOp:
    """A weighted layer without its tensors.

    Args:
        function: a function such as ``F.conv2d``, called with ``(input, weight, bias, **arguments)``.
        arguments: its keyword arguments.
        axis: the weight axis of the output channels (of one group, for transposed convolutions).
        groups: number of groups if the weight axis holds the channels of one group only, else 1.
        padding: padding to apply before the function, as ``(pads, mode)`` of ``F.pad``, or None.
        layer: the type of the layer.
        options: arguments of its constructor, without channels and kernel size.
    """

    function: Callable[..., Tensor]
    arguments: dict[str, Any]
    layer: type[nn.Module]
    options: dict[str, Any]
    axis: int = 0
    groups: int = 1
    padding: tuple[tuple[int, ...], str] | None = None

    @property
    def is_linear(self) -> bool:
        """Whether it multiplies the last dimension by a matrix."""
        return not self.arguments

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Apply the layer."""
        if self.padding is not None:
            x = F.pad(x, self.padding[0], mode=self.padding[1])
        return self.function(x, weight, bias, **self.arguments)

    def per_output_channel(self, values: Tensor, weight: Tensor) -> Tensor:
        """Reshape ``(out_channels,)`` values to multiply the weight channel by channel.

        The weight of a grouped transposed convolution is ``(in, out / groups, ...)``, and its row i belongs to group
        ``i // (in / groups)``: the result is then ``(in, out / groups, 1, ...)``.
        """
        tail = [1] * (weight.dim() - self.axis - 1)
        if self.groups == 1:
            return values.reshape(*[1] * self.axis, -1, *tail)
        rows = values.reshape(self.groups, -1).repeat_interleave(weight.shape[0] // self.groups, dim=0)
        return rows.reshape(*rows.shape, *tail)


def weighted_op(layer: WeightedLayer) -> WeightedOp:
    """Describe a layer of one of ``WEIGHTED_TYPES`` (exactly these types, or parametrized, but no other subclasses)."""
    kind: Any = type_of(layer)
    if isinstance(layer, nn.Linear):
        return WeightedOp(F.linear, {}, kind, {})
    if isinstance(layer, ProductLayer):
        return WeightedOp(linear_product, {}, kind, {}, axis=1)
    names = ("stride", "padding", "dilation", "groups")
    arguments = {name: getattr(layer, name) for name in names}
    if kind in CONVS:
        padding, options = None, arguments | {"padding_mode": layer.padding_mode}
        if layer.padding_mode != "zeros":
            padding = (_explicit_padding(layer), str(layer.padding_mode))
            arguments["padding"] = 0
        return WeightedOp(CONVS[kind], arguments, kind, options, padding=padding)
    arguments["output_padding"] = layer.output_padding
    return WeightedOp(TRANSPOSED[kind], arguments, kind, dict(arguments), axis=1, groups=layer.groups)


def weighted_layer(
    kind: type[nn.Module], options: dict[str, Any], weight: nn.Parameter, bias: nn.Parameter | None
) -> WeightedLayer:
    """A layer of one of ``WEIGHTED_TYPES`` with the given parameters, which are not copied.

    Args:
        kind: its type.
        options: arguments of its constructor, without channels and kernel size.
        weight: in the shape of that type, e.g. ``(out, in / groups, *kernel)``.
        bias: ``(out,)`` or None.
    """
    channels = list(weight.shape) if kind is ProductLayer else [weight.shape[1], weight.shape[0]]
    if weight.dim() > 2:
        per_group = weight.shape[1] * options.get("groups", 1)
        channels = [weight.shape[0], per_group] if kind in TRANSPOSED else [per_group, weight.shape[0]]
        options = {"kernel_size": tuple(weight.shape[2:])} | options
    layer: Any = kind(*channels, bias=bias is not None, device="meta", **options)
    layer.weight, layer.bias = weight, bias
    return layer  # type: ignore[no-any-return]


def _explicit_padding(conv: Any) -> tuple[int, ...]:
    """The padding of a convolution as ``F.pad`` takes it: last axis first, (before, after) for each."""
    pads: list[int] = []
    for d in reversed(range(len(conv.kernel_size))):
        if conv.padding == "same":
            total = conv.dilation[d] * (conv.kernel_size[d] - 1)
            pads += [total // 2, total - total // 2]
        else:
            amount = 0 if conv.padding == "valid" else conv.padding[d]
            pads += [amount, amount]
    return tuple(pads)

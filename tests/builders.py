"""Small things that several tests need: fake-quants, one layer of every kind, names for what is parametrized."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from fxqat.fake_quantize.base import ACTIVATION, WEIGHT, FakeQuantizeBase
from fxqat.fake_quantize.learnable import LearnableFakeQuantize
from fxqat.fake_quantize.tqt import TQTFakeQuantize
from fxqat.nn.product_layer import ProductLayer
from fxqat.nn.qat import QATLayer
from fxqat.nn.weighted import weighted_op
from fxqat.observer.base import ObserverBase
from fxqat.observer.min_max import MinMaxObserver
from fxqat.scheme import QuantizeScheme
from tests.reference import as_float64, away_from_ties, on_axis

INT8 = QuantizeScheme()
UINT8 = QuantizeScheme(signed=False, symmetric=False)
INT8_WEIGHT = QuantizeScheme(per_channel=True, narrow_range=True)


class LayerCase(NamedTuple):
    """A layer, the shape of an input, and the type of BatchNorm that fits after it."""

    name: str
    layer: Callable[[], nn.Module]
    shape: tuple[int, ...]
    norm: type[nn.Module]


def product_layer(inputs: int, outputs: int) -> ProductLayer:
    """A product with a random weight."""
    layer = ProductLayer(inputs, outputs)
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    return layer


LAYERS: tuple[LayerCase, ...] = (
    LayerCase("conv1d", lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1), (4, 4, 12), nn.BatchNorm1d),
    LayerCase(
        "conv1d_same_reflect",
        lambda: nn.Conv1d(4, 6, 4, padding="same", padding_mode="reflect", dilation=2, bias=False),
        (4, 4, 12),
        nn.BatchNorm1d,
    ),
    LayerCase("conv2d_groups", lambda: nn.Conv2d(4, 6, 3, groups=2, dilation=2), (4, 4, 7, 9), nn.BatchNorm2d),
    LayerCase("conv2d_depthwise", lambda: nn.Conv2d(4, 8, 3, groups=4, bias=False), (4, 4, 7, 5), nn.BatchNorm2d),
    LayerCase("conv2d_same", lambda: nn.Conv2d(3, 5, (5, 3), padding="same"), (4, 3, 6, 5), nn.BatchNorm2d),
    LayerCase(
        "conv2d_valid_replicate",
        lambda: nn.Conv2d(3, 5, 3, padding="valid", padding_mode="replicate"),
        (4, 3, 6, 5),
        nn.BatchNorm2d,
    ),
    LayerCase(
        "conv2d_circular",
        lambda: nn.Conv2d(3, 5, 3, padding=(2, 1), padding_mode="circular"),
        (4, 3, 6, 5),
        nn.BatchNorm2d,
    ),
    LayerCase("conv3d", lambda: nn.Conv3d(3, 5, (1, 3, 3), stride=(1, 2, 1)), (4, 3, 2, 6, 5), nn.BatchNorm3d),
    LayerCase(
        "conv3d_replicate",
        lambda: nn.Conv3d(2, 4, 3, padding="same", padding_mode="replicate", bias=False),
        (4, 2, 3, 4, 4),
        nn.BatchNorm3d,
    ),
    LayerCase(
        "conv_transpose1d",
        lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1),
        (4, 4, 7),
        nn.BatchNorm1d,
    ),
    LayerCase(
        "conv_transpose2d_groups",
        lambda: nn.ConvTranspose2d(4, 6, 3, groups=2, dilation=2, padding=1),
        (4, 4, 4, 5),
        nn.BatchNorm2d,
    ),
    LayerCase(
        "conv_transpose3d_groups",
        lambda: nn.ConvTranspose3d(6, 3, 2, groups=3, stride=2, bias=False),
        (4, 6, 2, 3, 2),
        nn.BatchNorm3d,
    ),
    LayerCase("linear", lambda: nn.Linear(7, 5), (16, 7), nn.BatchNorm1d),
    LayerCase("linear_no_bias", lambda: nn.Linear(7, 5, bias=False), (16, 7), nn.BatchNorm1d),
    LayerCase("product", lambda: product_layer(7, 5), (16, 7), nn.BatchNorm1d),
)
LAYER_IDS = [case.name for case in LAYERS]


def make_fake_quant(
    scheme: QuantizeScheme = INT8,
    kind: str = ACTIVATION,
    axis: int | None = None,
    channels: int | None = None,
    fake_quantize: type[FakeQuantizeBase] = LearnableFakeQuantize,
    observer: type[ObserverBase] = MinMaxObserver,
    **arguments: Any,
) -> FakeQuantizeBase:
    """A fake-quant with its observer, both off."""
    watching = observer(scheme, axis if scheme.per_channel else None, channels)
    return fake_quantize(scheme, watching, kind, axis, **arguments)


def make_suitable(
    fake_quantize: type[FakeQuantizeBase],
    scheme: QuantizeScheme = INT8,
    kind: str = ACTIVATION,
    axis: int | None = None,
    channels: int | None = None,
) -> FakeQuantizeBase:
    """A fake-quant of any row: for a weight, or with power-of-two scales, where it takes no other."""
    scheme = replace(scheme, scale_bits=1) if fake_quantize is TQTFakeQuantize else scheme
    kind = WEIGHT if fake_quantize.weights_only else kind
    return make_fake_quant(scheme, kind, axis, channels, fake_quantize)


def make_problem(
    fake_quantize: type[FakeQuantizeBase],
    scheme: QuantizeScheme,
    axis: int = 1,
    seed: int = 0,
    **arguments: Any,
) -> tuple[FakeQuantizeBase, torch.Tensor, torch.Tensor]:
    """``(quant, x, grad)``: a weight's fake-quant with random parameters; x (7, 3, 20) away from ties, partly outside.

    A few of the values are above the range, below it, and inside.
    """
    random = np.random.default_rng(seed)
    quant = make_fake_quant(scheme, WEIGHT, axis, 3, fake_quantize, **arguments)
    size = tuple(quant.scale.shape)
    scale = np.exp2(np.rint(random.uniform(-6, 2, size)) if scheme.scale_bits == 1 else random.uniform(-6, 2, size))
    zero_point = np.full(size, scheme.symmetric_zero_point)
    if not scheme.symmetric:
        zero_point = random.integers(scheme.quant_min, scheme.quant_max + 1, size)
    quant.set_qparams(*(torch.from_numpy(np.asarray(values, np.float32)) for values in (scale, zero_point)))
    used, offset = (as_float64(values) for values in quant.qparams())
    steps = away_from_ties((7, 3, 20), (scheme.quant_min, scheme.quant_max), seed)
    x = (steps - on_axis(offset, 3, axis)) * on_axis(used, 3, axis)
    grad = random.standard_normal(x.shape)
    return quant, *(torch.from_numpy(values.astype(np.float32)) for values in (x, grad))


def calibrate(quant: FakeQuantizeBase, *batches: torch.Tensor) -> FakeQuantizeBase:
    """Show batches to a fake-quant, switch its rounding on, and return it."""
    for batch in batches:
        quant.observe(batch)
    quant.fake_quant_enabled = True
    return quant


def random_norm(case: LayerCase, layer: nn.Module, seed: int = 0) -> nn.Module:
    """A BatchNorm for a layer, with random statistics and parameters, one gamma negative."""
    generator = torch.Generator().manual_seed(seed)
    channels = getattr(layer, "out_channels", None) or layer.out_features
    bn = case.norm(channels)
    with torch.no_grad():
        bn.weight.copy_(torch.rand(channels, generator=generator) + 0.5)
        bn.weight[0] *= -1
        bn.bias.copy_(torch.randn(channels, generator=generator))
        bn.running_mean.copy_(torch.randn(channels, generator=generator))
        bn.running_var.copy_(torch.rand(channels, generator=generator) + 0.5)
    return bn


def make_qat_layer(
    case: LayerCase,
    *,
    with_bn: bool = True,
    activation: nn.Module | None = None,
    bn_mode: str | int = "train",
    scheme: QuantizeScheme = INT8_WEIGHT,
    seed: int = 0,
) -> QATLayer:
    """A QAT layer of a kind, in training mode, weight quantizer off."""
    torch.manual_seed(seed)
    layer = case.layer()
    axis = weighted_op(layer).axis
    quant = make_fake_quant(scheme, WEIGHT, axis, layer.weight.shape[axis])
    bn = random_norm(case, layer, seed) if with_bn else None
    return QATLayer(layer, bn, activation, quant, bn_mode).train()


def layer_input(case: LayerCase, seed: int = 1) -> torch.Tensor:
    """Random input of a layer."""
    return torch.randn(case.shape, generator=torch.Generator().manual_seed(seed))


def switch_on(layer: QATLayer) -> QATLayer:
    """Calibrate a layer's weight quantizer on its folded weight and switch it on."""
    calibrate(layer.weight_fake_quant, layer.folded()[0].detach())
    return layer


def spelling(value: object) -> str:
    """A value as the name of a test, which must be the same in every process: without addresses of objects."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


class Again(torch.autograd.Function):
    """Computes layers again in its backward, which adds to the gradients of their parameters."""

    @staticmethod
    def forward(ctx, x, layers):
        ctx.layers = layers
        ctx.save_for_backward(x)
        return layers(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.layers(x).backward(gradient)
        return x.grad, None

"""The weighted layers as functions: the same numbers as the modules, for every kind and padding."""

import pytest
import torch
from torch import nn

from fxqat.nn.weighted import CONVS, WEIGHTED_TYPES, weighted_op
from tests.builders import LAYER_IDS, LAYERS, LayerCase, layer_input

EVERY_LAYER = pytest.mark.parametrize("case", LAYERS, ids=LAYER_IDS)


@EVERY_LAYER
def test_function_equals_module(case: LayerCase) -> None:
    layer, x = case.layer(), layer_input(case)
    op = weighted_op(layer)
    assert torch.equal(op(x, layer.weight, layer.bias), layer(x))
    twice = op(x, layer.weight * 2, None)
    assert not torch.allclose(twice, layer(x))


@EVERY_LAYER
def test_values_per_output_channel_scale_the_outputs(case: LayerCase) -> None:
    layer, x = case.layer().double(), layer_input(case).double()
    op = weighted_op(layer)
    y = op(x, layer.weight, None)
    values = torch.rand(y.shape[1], dtype=torch.float64) + 0.5
    wide = values.reshape(1, -1, *[1] * (y.dim() - 2))
    scaled = op(x, layer.weight * op.per_output_channel(values, layer.weight), None)
    torch.testing.assert_close(scaled, y * wide, rtol=1e-12, atol=1e-12)
    assert values.numel() == (getattr(layer, "out_channels", None) or layer.out_features)


@EVERY_LAYER
def test_weight_axis_holds_the_output_channels_of_a_group(case: LayerCase) -> None:
    layer = case.layer()
    op = weighted_op(layer)
    outputs = getattr(layer, "out_channels", None) or layer.out_features
    assert layer.weight.shape[op.axis] * op.groups == outputs
    assert op.axis == (0 if type(layer) in (*CONVS, nn.Linear) else 1)


def test_every_weighted_type_is_among_the_tested_layers() -> None:
    assert {type(case.layer()) for case in LAYERS} == set(WEIGHTED_TYPES)
    assert len(WEIGHTED_TYPES) == 8


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
@pytest.mark.parametrize("padding", ["same", "valid", 2, (1, 3)])
@pytest.mark.parametrize("kernel", [(3, 3), (2, 4)])
@pytest.mark.parametrize("dilation", [1, 2])
def test_padding_modes(mode: str, padding: str | int | tuple[int, int], kernel: tuple[int, int], dilation: int) -> None:
    conv = nn.Conv2d(2, 3, kernel, padding=padding, padding_mode=mode, dilation=dilation)
    x = torch.randn(2, 2, 9, 8)
    op = weighted_op(conv)
    assert op.padding is not None
    assert op.padding[1] == mode
    assert torch.equal(op(x, conv.weight, conv.bias), conv(x))


def test_an_operation_is_a_value() -> None:
    first, second = (weighted_op(nn.Conv2d(2, 3, 3, stride=2)) for _ in range(2))
    assert first == second
    assert first != weighted_op(nn.Conv2d(2, 3, 3, stride=1))

"""Every weighted layer as a product of matrices."""

import pytest
import torch
from torch import nn

from fxqat.nn.weighted import weighted_op
from fxqat.tools.post_training.layer_matrices import (
    inputs_to_columns,
    sum_along_axis,
    weight_from_matrices,
    weight_to_matrices,
)
from tests.builders import product_layer

LAYERS = {
    "Linear": (nn.Linear(6, 5), (4, 6)),
    "3-D Linear": (nn.Linear(6, 5), (2, 3, 6)),
    "ProductLayer": (product_layer(6, 5), (2, 3, 6)),
    "Conv1d": (nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), (2, 4, 9)),
    "Conv2d": (nn.Conv2d(4, 6, (3, 2), padding=(2, 1), dilation=2), (2, 4, 7, 8)),
    "depthwise": (nn.Conv2d(4, 8, 3, padding="same", groups=4), (2, 4, 7, 8)),
    "reflected": (nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), (2, 4, 7, 8)),
    "Conv3d": (nn.Conv3d(2, 3, 2, padding=1), (2, 2, 4, 5, 3)),
    "ConvTranspose1d": (nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1), (2, 4, 6)),
    "ConvTranspose2d": (nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, groups=2), (2, 4, 5, 6)),
    "ConvTranspose3d": (nn.ConvTranspose3d(2, 4, 2, groups=2), (2, 2, 3, 3, 3)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_is_a_product_of_matrices(name):
    layer, shape = LAYERS[name]
    op, weight, x = weighted_op(layer), layer.weight.detach(), torch.randn(shape)
    assert torch.equal(weight_from_matrices(op, weight_to_matrices(op, weight), weight.shape), weight)
    product = (weight_to_matrices(op, weight) @ inputs_to_columns(op, weight, x)).flatten(
        0, 1
    )  # (out_channels, samples)
    expected = op(x, weight, None).movedim(-1 if weight.dim() == 2 else 1, 0)
    torch.testing.assert_close(product, expected.flatten(1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_sums_along_an_axis_of_the_weight(name):
    layer, _ = LAYERS[name]
    op, weight = weighted_op(layer), layer.weight.detach()
    values = torch.arange(layer.bias.numel(), dtype=torch.float64).view(weight_to_matrices(op, weight).shape[:2])
    inputs = weight.numel() // values.numel()
    assert float(sum_along_axis(op, values, weight.shape, None)) == inputs * float(values.sum())
    transposed = op.axis == 1  # there the groups share the indices of the axis
    expected = values.sum(0) if transposed else values.flatten()
    assert torch.equal(sum_along_axis(op, values, weight.shape, int(transposed)), inputs * expected)

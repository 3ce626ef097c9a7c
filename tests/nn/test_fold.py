"""Folding: the folded layer equals the layer with its BatchNorm."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fxqat.fake_quantize import kernels
from fxqat.nn.fold import bn_factor, fold_bias, fold_bn, grid_factor
from fxqat.nn.weighted import weighted_op
from tests.builders import LAYER_IDS, LAYERS, LayerCase, layer_input, random_norm

PROPERTY = settings(max_examples=60, deadline=None, derandomize=True)


@st.composite
def convolutions(draw: st.DrawFn) -> nn.Module:
    """A 1d or 2d convolution, plain or transposed, of any groups, in float64."""
    kind = draw(st.sampled_from([nn.Conv1d, nn.Conv2d, nn.ConvTranspose1d, nn.ConvTranspose2d]))
    groups = draw(st.integers(1, 3))
    channels = [groups * draw(st.integers(1, 3)) for _ in range(2)]
    options = {"stride": draw(st.integers(1, 2)), "padding": draw(st.integers(0, 1)), "bias": draw(st.booleans())}
    return kind(*channels, draw(st.integers(2, 3)), groups=groups, **options).double()


def randomised(bn: nn.Module, seed: int) -> nn.Module:
    """A BatchNorm in eval mode and float64 with random statistics and parameters of both signs."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in (bn.running_mean, bn.running_var, bn.weight, bn.bias):
        if tensor is not None:
            tensor.data.copy_(torch.randn(tensor.shape, generator=generator))
    bn.running_var.abs_().add_(0.01)
    return bn.double().eval()


@PROPERTY
@given(convolutions(), st.booleans(), st.integers(0, 2**31 - 1))
def test_any_folded_convolution_equals_layer_and_norm(conv: nn.Module, affine: bool, seed: int) -> None:
    is_1d = conv.weight.dim() == 3
    bn = randomised((nn.BatchNorm1d if is_1d else nn.BatchNorm2d)(conv.out_channels, affine=affine, eps=1e-3), seed)
    x = torch.randn(2, conv.in_channels, *(6,) if is_1d else (6, 5), dtype=torch.float64)
    op = weighted_op(conv)
    weight, bias = fold_bn(op, conv.weight, conv.bias, bn)
    assert weight.shape == conv.weight.shape
    assert bias.shape == (conv.out_channels,)
    torch.testing.assert_close(op(x, weight, bias), bn(conv(x)), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", LAYERS, ids=LAYER_IDS)
def test_folding_is_right_for_every_kind_and_differentiable(case: LayerCase) -> None:
    layer = case.layer()
    bn = random_norm(case, layer).double().eval()
    layer, x = layer.double(), layer_input(case).double()
    op = weighted_op(layer)
    parameters = [p for p in (layer.weight, layer.bias, bn.weight, bn.bias) if p is not None]
    folded, exact = op(x, *fold_bn(op, layer.weight, layer.bias, bn)), bn(layer(x))
    torch.testing.assert_close(folded, exact, rtol=1e-9, atol=1e-9)
    direction = torch.randn_like(exact)
    for a, b in zip(
        torch.autograd.grad(folded, parameters, direction),
        torch.autograd.grad(exact, parameters, direction),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


def test_factor_and_bias_by_hand() -> None:
    bn = nn.BatchNorm1d(2, eps=0.0)
    with torch.no_grad():
        bn.running_var.copy_(torch.tensor([4.0, 0.25]))
        bn.running_mean.copy_(torch.tensor([1.0, -1.0]))
        bn.weight.copy_(torch.tensor([3.0, -2.0]))
        bn.bias.copy_(torch.tensor([0.5, 0.0]))
    factor = bn_factor(bn)
    assert factor.tolist() == [1.5, -4.0]
    assert fold_bias(None, bn, factor).tolist() == [-1.0, -4.0]
    assert fold_bias(torch.tensor([1.0, 2.0]), bn, factor).tolist() == [0.5, -12.0]


def test_without_affine_parameters_the_factor_is_the_inverse_deviation() -> None:
    bn = nn.BatchNorm1d(2, eps=0.0, affine=False)
    bn.running_var.copy_(torch.tensor([4.0, 0.25]))
    assert bn_factor(bn).tolist() == [0.5, 2.0]
    assert fold_bias(torch.tensor([1.0, 1.0]), bn, bn_factor(bn)).tolist() == [0.5, 2.0]


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("channels", [1, 7, 64, 1000])
def test_a_grid_is_divided_by_the_factor_or_where_that_is_nothing_by_the_largest(
    channels: int, affine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bn = randomised(nn.BatchNorm2d(channels, affine=affine, eps=1e-3), channels).float()
    bn.running_var.mul_(10.0 ** torch.randint(-9, 9, (channels,)))
    bn.running_var[-1] = torch.nan if channels == 7 else -1.0 if channels == 64 else 0.0
    if affine:
        with torch.no_grad():
            bn.weight[::3] = 0.0
            bn.weight[::6] = -0.0
            bn.weight[1::6] = 1e-9
    expected = bn_factor(bn).detach().numpy()
    finite = np.abs(expected[np.isfinite(expected)])
    largest = finite.max() if finite.any() else 1.0
    dead = np.abs(expected) <= 2.0**-24 * largest
    assert dead.any() == affine
    found = grid_factor(bn)
    monkeypatch.setattr(kernels, "LIBRARY", None)
    for factor in (found, grid_factor(bn)):
        assert not factor.requires_grad
        assert np.array_equal(factor.numpy(), np.where(dead, largest, expected), equal_nan=True)


def test_the_factor_of_a_norm_in_half_precision_is_float32() -> None:
    bn = randomised(nn.BatchNorm2d(7, eps=1e-3), 0).float()
    expected = grid_factor(bn)
    found = grid_factor(bn.half())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=0)

"""GPTQ: the paper's equations, every type of layer, and the deployed integers are the solution."""

import importlib

import numpy as np
import pytest
import torch
from torch import nn

import fxqat
from fxqat.errors import ConfigError
from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.nn.qat import QATLayer
from fxqat.numerics import valid_scale
from fxqat.tools import Reconstruction, ptq, reconstruct
from fxqat.tools.post_training.gptq import (
    BLOCK,
    SCALE_FACTORS,
    Grid,
    QuadraticError,
    coordinate_descent,
    gptq,
    gptq_weight,
)
from fxqat.tools.post_training.input_moments import damped
from fxqat.tools.post_training.reconstruct import METHODS
from tests.models import build, calibrate, inputs

gptq_module = importlib.import_module("fxqat.tools.post_training.gptq")
reconstruct_module = importlib.import_module(
    "fxqat.tools.post_training.reconstruct"
)  # the package has a function of this name


def random(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Product(nn.Module):
    """``x @ weight``."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)

    def forward(self, x):
        return x @ self.weight


def correlated(columns, samples, seed=0):
    return random(columns, columns, seed=seed) @ random(columns, samples, seed=seed + 1)


def optimal_brain_quantizer(weight, gram, scale, low, high):
    """Equations 2 and 3 literally: the inverse Hessian of the remaining columns is computed for each column."""
    scale = np.broadcast_to(scale, weight.shape)
    weight, found = weight.copy(), np.zeros_like(weight)
    left = list(np.argsort(-np.diag(gram), kind="stable"))
    while left:
        inverse = np.linalg.inv(gram[np.ix_(left, left)])
        j = left[0]
        found[:, j] = scale[:, j] * np.clip(np.rint(weight[:, j] / scale[:, j]), low, high)
        weight[:, left] -= np.outer((weight[:, j] - found[:, j]) / inverse[0, 0], inverse[0])
        left = left[1:]
    return found


def grid(scale, low, high):
    return Grid(scale, torch.zeros_like(scale), low, high)


def quadratic(distance, gram):
    return torch.einsum("gij,gjk,gik->gi", distance, gram, distance)


@pytest.fixture(scope="module")
def toy():
    """The weights, grams and scales of two groups, with more columns than one block."""
    count = BLOCK + 12
    grams = [(x @ x.T) / 400 for x in (correlated(count, 400, seed=group) for group in range(2))]
    weight = torch.stack([random(5, count, seed=10 + group) for group in range(2)])
    return weight, torch.stack(grams), 0.2 + random(2, 5, 1, seed=20).abs()


@pytest.mark.parametrize("bits", [2, 4])
def test_it_is_that_of_the_paper(bits, toy):
    weight, gram, scale = toy
    values = grid(scale, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    found = values.nearest(gptq(QuadraticError.of(weight, damped(gram, 0.01)), values))
    extended = gram + 0.01 * gram.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] * torch.eye(gram.shape[1])
    for group in range(2):
        tensors = (t[group].numpy() for t in (weight, extended, scale))
        expected = optimal_brain_quantizer(*tensors, values.quant_min, values.quant_max)
        np.testing.assert_allclose(found[group].numpy(), expected, rtol=1e-9)
    nearest = values.nearest(weight)
    assert (found != nearest).any()
    assert quadratic(found - weight, extended).sum() < quadratic(nearest - weight, extended).sum()


def test_no_single_column_is_better_after_coordinate_descent(toy, monkeypatch):
    weight, gram, scale = toy
    error, values = QuadraticError.of(weight, damped(gram, 0.01)), grid(scale, -2, 1)
    first = gptq(error, values)
    before = error.after_rounding(first, values)
    torch.testing.assert_close(before, quadratic(values.nearest(first) - weight, error.gram))
    assert (error.after_rounding(coordinate_descent(error, first, values), values) <= before + 1e-12).all()
    assert error.after_rounding(coordinate_descent(error, first, values), values).sum() < before.sum()
    monkeypatch.setattr(gptq_module, "DESCENT_PASSES", 50)
    last = values.nearest(coordinate_descent(error, first, values))
    least = quadratic(last - weight, error.gram)
    for j in range(weight.shape[-1]):
        for step in (-1, 1):
            other = last.clone()
            other[..., j] = torch.clamp(last[..., j] / scale[..., 0] + step, -2, 1) * scale[..., 0]
            assert (quadratic(other - weight, error.gram) >= least - 1e-9).all()


def test_inputs_that_are_always_zero_leave_the_weights_alone():
    weight, zeros = random(1, 3, 4), torch.zeros(1, 4, 4, dtype=torch.float64)
    values = grid(torch.full((1, 3, 1), 0.5, dtype=torch.float64), -8, 7)
    error = QuadraticError.of(weight, damped(zeros, 0.01))
    assert torch.equal(gptq(error, values), weight)
    assert torch.equal(values.nearest(coordinate_descent(error, weight, values)), values.nearest(weight))


def low_bit(name, backend="TSQAT", observer="MSE", **scheme):
    model = build(name)
    qconfig = {"w_qscheme": {"bit": 3, **scheme}, "w_observer": observer}
    gm = fxqat.prepare_by_platform(model, backend, {"extra_qconfig_dict": qconfig})
    batches = [inputs(name, seed=i) for i in range(2)]
    return model, calibrate(gm, *batches).eval(), batches


@torch.no_grad()
def error(gm, model, batches):
    return sum(float((gm(*batch) - model(*batch)).square().sum()) for batch in batches)


def layers_of(gm):
    return [module for module in gm.modules() if isinstance(module, QATLayer)]


def integers(gm):
    return [layer.weight_fake_quant.quantize(layer.folded()[0].detach()) for layer in layers_of(gm)]


@pytest.mark.parametrize("name", ["residual", "conv_bn_relu", "attention", "transpose_convs", "conv3d"])
def test_the_error_falls_and_the_integers_are_the_solution(name, monkeypatch):
    _, gm, batches = low_bit(name)
    found = {}

    def remember(segment, path, *args, **kwargs):
        found[path] = gptq_weight(segment, path, *args, **kwargs)
        return found[path]

    monkeypatch.setattr(reconstruct_module, "gptq_weight", remember)
    errors = reconstruct(gm, batches, "GPTQ")
    before, after = (sum(values) for values in zip(*errors.values(), strict=True))
    assert 0 < after < before
    layers = {path: module for path, module in gm.named_modules() if isinstance(module, QATLayer)}
    assert set(found) == set(layers)
    for path, layer in layers.items():
        wanted = layer.weight_fake_quant.quantize(found[path][0])
        assert torch.equal(layer.weight_fake_quant.used_scale(), found[path][1])
        torch.testing.assert_close(
            layer.weight_fake_quant.quantize(layer.folded()[0].detach()), wanted, rtol=0, atol=1e-6
        )


SCHEMES = {
    "per channel": {},
    "per tensor": {"per_channel": False},
    "asymmetric": {"symmetry": False, "signed": False, "narrow_range": True},
    "power of two": {"pot_scale": True},
}


@pytest.mark.parametrize("name", ["residual", "transpose_convs"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_scales_are_those_of_the_least_error(name, scheme, monkeypatch):
    errors = {}
    for factors in ((1.0,), SCALE_FACTORS):
        model, gm, batches = low_bit(name, observer="MinMax", **SCHEMES[scheme])
        before = [layer.weight_fake_quant.used_scale().clone() for layer in layers_of(gm)]
        zero_points = [layer.weight_fake_quant.qparams()[1] for layer in layers_of(gm)]
        monkeypatch.setattr(gptq_module, "SCALE_FACTORS", factors)
        reconstruct(gm, batches, "GPTQ")
        errors[factors] = error(gm, model, batches)
        for layer, scale, zero_point in zip(layers_of(gm), before, zero_points, strict=True):
            quant = layer.weight_fake_quant
            assert (scale.dim() == 0) == (scheme == "per tensor")
            tried = torch.stack([valid_scale(scale * factor, quant.scale_bits) for factor in factors])
            assert (tried == quant.used_scale()).any(0).all()
            assert torch.equal(quant.qparams()[1], zero_point)
            assert bool((zero_point != 0).any()) == (scheme == "asymmetric")
    if scheme not in ("per tensor", "power of two"):  # with few choices, later layers may undo a layer's gain
        assert errors[SCALE_FACTORS] < 0.9 * errors[1.0,]


@pytest.mark.parametrize("correct_bias", [False, True])
def test_the_number_of_layers_in_a_segment_changes_nothing(correct_bias):
    found = []
    for max_layers in (1, 6):
        _, gm, batches = low_bit("residual")
        setting = Reconstruction(gptq=True, iterations=0, max_layers=max_layers)
        reconstruct(gm, batches, setting, correct_bias=correct_bias)
        found.append(integers(gm))
    assert len(found[0]) == len(found[1]) == 7
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*found, strict=True))


def test_it_works_with_bias_correction():
    errors = {}
    for correct_bias in (False, True):
        model, gm, batches = low_bit("residual")
        before = error(gm, model, batches)
        reconstruct(gm, batches, "GPTQ", correct_bias=correct_bias)
        errors[correct_bias] = error(gm, model, batches)
    assert errors[False] < 0.5 * before
    assert errors[True] < 0.5 * errors[False]


def test_learning_starts_from_its_result():
    def second_layer(setting):  # the first one has the float model's inputs
        _, gm, batches = low_bit("conv_bn_relu")
        reconstruct(gm, batches, setting)
        return integers(gm)[1]

    found = second_layer(METHODS["GPTQ"])
    shares = [
        float(torch.isclose(second_layer(Reconstruction(gptq=gptq, iterations=1)), found).float().mean())
        for gptq in (True, False)
    ]
    assert shares[0] > 0.97
    assert shares[1] < 0.9


def test_the_result_is_exported(tmp_path):
    model, gm, batches = low_bit("residual", "ONNXRuntime")
    before = error(gm, model, batches)
    reconstruct(gm, batches, "GPTQ")
    assert error(gm, model, batches) < before
    report = fxqat.convert_export(gm, batches[0], tmp_path / "model.onnx")
    assert report.certificate.passed


def test_settings():
    assert METHODS["GPTQ"] == Reconstruction(max_layers=1, gptq=True, iterations=0)
    with pytest.raises(ConfigError, match="iterations must be at least 1 with gptq=False, got 0"):
        Reconstruction(iterations=0)
    with pytest.raises(ConfigError, match="iterations must be at least 0 with gptq=True, got -1"):
        Reconstruction(gptq=True, iterations=-1)
    with pytest.raises(ConfigError, match="damping must be positive, got 0.0"):
        Reconstruction(gptq=True, damping=0.0)


def test_with_scales_of_blocks_it_solves_the_equations_of_the_paper(toy):
    weight, gram, scale = toy
    columns = weight.shape[-1]
    wide = scale.repeat(1, 1, columns) * torch.linspace(0.5, 2.0, columns)
    values = Grid(wide, torch.zeros_like(wide), -2, 1)
    error = QuadraticError.of(weight, damped(gram, 0.01))
    found = values.nearest(gptq(error, values))
    for group in range(len(weight)):
        expected = optimal_brain_quantizer(*(t[group].numpy() for t in (weight, error.gram, wide)), -2, 1)
        np.testing.assert_allclose(found[group].numpy(), expected, rtol=1e-9)
    improved = coordinate_descent(error, gptq(error, values), values)
    before = quadratic(found - weight, error.gram)
    assert (error.after_rounding(improved, values) <= before + 1e-12).all()
    assert quadratic(values.nearest(weight) - weight, error.gram).sum() > before.sum()


@pytest.mark.parametrize("method", ["GPTQ", "AdaRound"])
@pytest.mark.parametrize("size", [None, 4])
def test_it_helps_layers_of_any_form_with_and_without_blocks(method, size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), Product(24, 12), nn.Tanh(), nn.Linear(12, 4)).eval()
    batches = [(torch.randn(64, 16) @ torch.randn(16, 16),) for _ in range(4)]
    weight = {"bit": 3, "block_size": size, "narrow_range": True}
    config = {"extra_qconfig_dict": {"w_qscheme": weight}}
    errors = []
    for reconstruction in (None, method):
        gm = ptq(model, batches, "Experimental", config, reconstruct=reconstruction, compare=False)
        errors.append(sum((gm(*batch) - model(*batch)).square().mean() for batch in batches).item())
        shapes = {tuple(part.scale.shape) for part in gm.modules() if isinstance(part, FakeQuantizeBase)} - {()}
        assert shapes == ({(24,), (12,), (4,)} if size is None else {(96,), (72,), (12,)})
    assert errors[1] < 0.7 * errors[0]

"""GPTQ: the paper's equations, every kind of layer, and that what was found is what is deployed."""

import importlib

import numpy as np
import pytest
import torch
from torch import nn

import fxqat
from fxqat.errors import ConfigError
from fxqat.nn.qat import QATLayer
from fxqat.nn.weighted import weighted_op
from fxqat.tools import Reconstruction, reconstruct
from fxqat.tools.gptq import columns, compensated, from_rows, gptq, rows
from fxqat.tools.reconstruct import METHODS
from tests.models import build, calibrate, inputs

reconstruct_module = importlib.import_module("fxqat.tools.reconstruct")  # the package has the function by this name
LOW_BITS = {"extra_qconfig_dict": {"w_qscheme": {"bit": 3}, "w_observer": "MSE"}}


def random(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def correlated(columns, samples, seed=0):
    return random(columns, columns, seed=seed) @ random(columns, samples, seed=seed + 1)


def optimal_brain_quantizer(weight, gram, scale, low, high):
    """Equations 2 and 3 as they stand: the inverse Hessian of what is left, anew for each column."""
    weight, found = weight.copy(), np.zeros_like(weight)
    left = list(np.argsort(-np.diag(gram), kind="stable"))
    while left:
        inverse = np.linalg.inv(gram[np.ix_(left, left)])
        j = left[0]
        found[:, j] = scale[:, 0] * np.clip(np.rint(weight[:, j] / scale[:, 0]), low, high)
        weight[:, left] -= np.outer((weight[:, j] - found[:, j]) / inverse[0, 0], inverse[0])
        left = left[1:]
    return found


@pytest.mark.parametrize("bits", [2, 4])
def test_it_is_the_papers(bits):
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    weights, scales, grams, expected = [], [], [], []
    for group in range(2):
        x = correlated(12, 200, seed=group)
        gram = x @ x.T / 200
        weight, scale = random(5, 12, seed=10 + group), 0.2 + random(5, 1, seed=20 + group).abs()
        damped = gram + 0.01 * gram.diagonal().mean() * torch.eye(12)
        expected.append(optimal_brain_quantizer(*(t.numpy() for t in (weight, damped, scale)), low, high))
        weights, scales, grams = [*weights, weight], [*scales, scale], [*grams, gram]
    weight, scale, gram = (torch.stack(tensors) for tensors in (weights, scales, grams))
    found = gptq(weight, gram, torch.zeros_like(gram), 0.01, scale, torch.zeros_like(scale), low, high)
    integers = torch.clamp(torch.round(found / scale), low, high)
    np.testing.assert_allclose((integers * scale).numpy(), np.stack(expected), rtol=1e-9)
    nearest = scale * torch.clamp(torch.round(weight / scale), low, high)
    assert (integers * scale != nearest).any()
    losses = [torch.einsum("gij,gjk,gik->", d, gram, d) for d in (integers * scale - weight, nearest - weight)]
    assert losses[0] < losses[1]


def test_it_goes_towards_what_the_float_model_gives():
    x, weight = correlated(6, 300), random(4, 6, seed=3)
    changed = x + 0.3 * correlated(6, 300, seed=5)
    gram, cross = (a @ changed.T for a in (changed, x - changed))
    fine = torch.full((1, 4, 1), 1e-7, dtype=torch.float64)
    found = gptq(weight[None], gram[None], cross[None], 1e-9, fine, torch.zeros_like(fine), -(2**40), 2**40)
    expected = np.linalg.lstsq(changed.T.numpy(), (weight @ x).T.numpy(), rcond=None)[0].T
    np.testing.assert_allclose(found[0].numpy(), expected, atol=1e-5)
    assert not np.allclose(found[0].numpy(), weight.numpy(), atol=0.05)


def test_inputs_that_are_always_zero_leave_the_weights_alone():
    weight, zeros = random(1, 3, 4), torch.zeros(1, 4, 4, dtype=torch.float64)
    scale = torch.full((1, 3, 1), 0.5, dtype=torch.float64)
    assert torch.equal(gptq(weight, zeros, zeros, 0.01, scale, torch.zeros_like(scale), -8, 7), weight)


LAYERS = {
    "Linear": (nn.Linear(6, 5), (4, 6)),
    "3-D Linear": (nn.Linear(6, 5), (2, 3, 6)),
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
    assert torch.equal(from_rows(op, rows(op, weight), weight.shape), weight)
    product = (rows(op, weight) @ columns(op, weight, x)).flatten(0, 1)  # (out_channels, samples)
    expected = op(x, weight, None).movedim(-1 if isinstance(layer, nn.Linear) else 1, 0)
    torch.testing.assert_close(product, expected.flatten(1), atol=1e-5, rtol=1e-5)


def low_bit(name, backend="TSQAT"):
    model = build(name)
    gm = fxqat.prepare_by_platform(model, backend, LOW_BITS)
    batches = [inputs(name, seed=i) for i in range(4)]
    return model, calibrate(gm, *batches).eval(), batches


@torch.no_grad()
def error(gm, model, batches):
    return sum(float((gm(*batch) - model(*batch)).square().sum()) for batch in batches)


def integers(gm):
    layers = [module for module in gm.modules() if isinstance(module, QATLayer)]
    return [layer.weight_fake_quant.quantize(layer.folded()[0].detach()) for layer in layers]


@pytest.mark.parametrize("name", ["residual", "conv_bn_relu", "attention", "transpose_convs", "conv3d"])
def test_the_error_falls_and_the_integers_are_those_that_were_found(name, monkeypatch):
    _, gm, batches = low_bit(name)
    found = {}

    def remember(segment, path, *args, **kwargs):
        found[path] = compensated(segment, path, *args, **kwargs)
        return found[path]

    monkeypatch.setattr(reconstruct_module, "compensated", remember)
    errors = reconstruct(gm, batches, "GPTQ")
    before, after = (sum(values) for values in zip(*errors.values(), strict=True))
    assert 0 < after < before
    layers = {path: module for path, module in gm.named_modules() if isinstance(module, QATLayer)}
    assert set(found) == set(layers)
    for path, layer in layers.items():
        wanted = layer.weight_fake_quant.quantize(found[path])
        torch.testing.assert_close(
            layer.weight_fake_quant.quantize(layer.folded()[0].detach()), wanted, rtol=0, atol=1e-6
        )


@pytest.mark.parametrize("correct_bias", [False, True])
def test_how_many_layers_a_segment_has_changes_nothing(correct_bias):
    found = []
    for max_layers in (1, 6):
        _, gm, batches = low_bit("residual")
        setting = Reconstruction(gptq=True, iterations=0, max_layers=max_layers)
        reconstruct(gm, batches, setting, correct_bias=correct_bias)
        found.append(integers(gm))
    assert len(found[0]) == len(found[1]) == 7
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*found, strict=True))


def test_the_correction_of_biases_goes_with_it():
    errors = {}
    for correct_bias in (False, True):
        model, gm, batches = low_bit("residual")
        before = error(gm, model, batches)
        reconstruct(gm, batches, "GPTQ", correct_bias=correct_bias)
        errors[correct_bias] = error(gm, model, batches)
    assert errors[False] < 0.5 * before
    assert errors[True] < 0.1 * errors[False]


def test_learning_goes_on_from_it():
    def second_layer(setting):  # the first one reads what the float model's does
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


def test_what_it_gives_is_exported(tmp_path):
    model, gm, batches = low_bit("residual", "ONNXRuntime")
    before = error(gm, model, batches)
    reconstruct(gm, batches, "GPTQ")
    assert error(gm, model, batches) < before
    report = fxqat.convert_export(gm, batches[0], tmp_path / "model.onnx")
    assert report.certificate.passed


def test_settings():
    assert METHODS["GPTQ"] == Reconstruction(max_layers=1, gptq=True, iterations=0)
    for wrong in ({"iterations": 0}, {"gptq": True, "iterations": -1}, {"gptq": True, "damping": 0.0}):
        with pytest.raises(ConfigError, match=r"iterations \(at least 1, or 0 with gptq=True\) and damping"):
            Reconstruction(**wrong)

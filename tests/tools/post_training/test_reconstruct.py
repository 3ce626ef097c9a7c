"""Reconstruction: the formulas of AdaRound, and the deployed integers are the learned ones."""

import copy
import importlib
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import fxqat
from fxqat.errors import CalibrationError, ConfigError
from fxqat.nn.qat import QATLayer
from fxqat.tools import Reconstruction, reconstruct
from fxqat.tools.post_training import segments
from fxqat.tools.post_training.adaround import AdaRoundFakeQuantize
from fxqat.tools.post_training.adaround_loop import _mix_randomly
from fxqat.tools.post_training.reconstruct import METHODS
from fxqat.tools.post_training.segments import named_inputs, split
from tests.builders import INT8_WEIGHT, make_fake_quant
from tests.models import build, calibrate, inputs

reconstruct_module = importlib.import_module(
    "fxqat.tools.post_training.reconstruct"
)  # the package has a function of this name
LOW_BITS = {"extra_qconfig_dict": {"w_qscheme": {"bit": 3}, "w_observer": "MSE"}}
QUICK = Reconstruction(iterations=60, drop=0.2)


def low_bit(name="residual", config=LOW_BITS):
    gm = fxqat.prepare_by_platform(build(name), "TSQAT", config)
    batches = [inputs(name, seed=i) for i in range(4)]
    return calibrate(gm, *batches).eval(), batches


def test_adaround_is_that_of_the_paper():
    weight = torch.randn(4, 3, 3, 3, generator=torch.Generator().manual_seed(0))
    quant = calibrate_quant(make_fake_quant(INT8_WEIGHT, "weight_fake_quant", 0, 4), weight)
    soft = AdaRoundFakeQuantize(quant, weight)
    torch.testing.assert_close(soft.quantize(weight), weight, rtol=0, atol=1e-5)  # at the start nothing is rounded
    with torch.no_grad():
        soft.rounding.add_(torch.randn(soft.rounding.shape, generator=torch.Generator().manual_seed(1)))
    v, w = soft.rounding.detach().double().numpy(), weight.double().numpy()
    scale = quant.used_scale().double().numpy().reshape(4, 1, 1, 1)
    h = np.clip(1 / (1 + np.exp(-v)) * 1.2 - 0.1, 0, 1)
    np.testing.assert_allclose(
        soft.quantize(weight).detach().numpy(), scale * np.clip(np.floor(w / scale) + h, -127, 127), atol=1e-5
    )
    np.testing.assert_allclose(soft.regularization(3.0).item(), (1 - np.abs(2 * h - 1) ** 3).sum(), rtol=1e-5)
    np.testing.assert_allclose(
        soft.decided(weight.shape).numpy(), scale * np.clip(np.floor(w / scale) + (h >= 0.5), -127, 127), atol=1e-6
    )


def calibrate_quant(quant, weight):
    quant.observe(weight)
    return quant


def test_the_exponent_falls_from_beta_to_beta():
    setting = Reconstruction(iterations=100, warmup=0.2, beta=(20.0, 2.0))
    assert setting.beta_at(0) is setting.beta_at(19) is None
    assert setting.beta_at(20) == 20.0
    assert setting.beta_at(60) == pytest.approx(11.0)
    assert setting.beta_at(99) == pytest.approx(2.0, abs=0.02)
    assert setting.scale_lr_factor(50) == pytest.approx(0.5)


@pytest.mark.parametrize("name", ["residual", "conv_bn_relu", "attention", "transpose_convs"])
def test_the_error_falls_and_the_integers_are_the_learned_ones(name, monkeypatch):
    gm, batches = low_bit(name)
    learned = {}
    decided = AdaRoundFakeQuantize.decided

    def remember(soft, shape):
        learned[id(soft.observer)] = decided(soft, shape)
        return decided(soft, shape)

    monkeypatch.setattr(AdaRoundFakeQuantize, "decided", remember)
    layers = [m for m in gm.modules() if isinstance(m, QATLayer)]
    nearest = [layer.weight_fake_quant.quantize(layer.folded()[0].detach()) for layer in layers]
    found = reconstruct(gm, batches, QUICK)
    before, after = (sum(errors) for errors in zip(*found.values(), strict=True))
    assert 0 < after < before
    assert len(learned) == len(layers)
    kept = []
    for layer, old in zip(layers, nearest, strict=True):  # rounded to the nearest
        weight = layer.weight_fake_quant.quantize(layer.folded()[0].detach())
        kept.append(torch.allclose(weight, learned[id(layer.weight_fake_quant.observer)], rtol=0, atol=1e-6))
        assert kept[-1] or torch.allclose(weight, old, rtol=0, atol=1e-6)  # learning did not improve it
    assert sum(kept) > len(layers) / 2


@pytest.mark.parametrize("correct", [False, True])
def test_a_segment_that_learning_makes_worse_is_restored(correct, monkeypatch):
    gm, batches = low_bit()
    before = copy.deepcopy(gm.state_dict())

    def spoil(segment, *args):
        with torch.no_grad():
            for layer in segment.layers.values():
                layer.weight.mul_(3)
        for quant in segment.quantizers.values():
            quant.set_qparams(2 * quant.used_scale(), quant.qparams()[1])

    monkeypatch.setattr(reconstruct_module, "learn_rounding", spoil)
    found = reconstruct(gm, batches, QUICK, correct_bias=correct)
    changed = changed_since(before, gm)
    assert all(key.endswith(".bias") for key in changed)
    assert bool(changed) == correct
    assert all(after == error for error, after in found.values()) or correct


def changed_since(before, gm):
    now = {key: value for key, value in gm.state_dict().items() if torch.is_tensor(value)}
    return {key for key, value in now.items() if not torch.equal(value, before[key])}


def test_only_weights_and_scales_change_and_only_where_asked():
    gm, batches = low_bit()
    before = copy.deepcopy(gm.state_dict())
    reconstruct(gm, batches, Reconstruction(iterations=5, scale_lr=0.0, max_layers=1))
    changed = changed_since(before, gm)
    assert changed
    assert all(key.endswith(".weight") and ".bn" not in key for key in changed)
    assert all(parameter.requires_grad for parameter in gm.parameters())
    assert not gm.training
    gm, batches = low_bit()
    before = copy.deepcopy(gm.state_dict())
    reconstruct(gm, batches, Reconstruction(iterations=5))
    assert any(key.endswith("act_fake_quant.relative_scale") for key in changed_since(before, gm))


@pytest.mark.parametrize("least", [0, 1, 2])
def test_the_best_state_of_a_segment_is_kept(least):
    gm, batches = low_bit()
    fxqat.enable_quantization(gm)
    segment = split(gm)[0]
    values = [named_inputs(gm, batch) for batch in batches]
    layer = next(iter(segment.layers.values()))
    weights = [layer.weight.detach() * factor for factor in (1.0, 2.0, 3.0)]

    @torch.no_grad()
    def become(i):
        layer.weight.copy_(weights[i])

    become(least)
    targets = segment.run(values, quantized=True)
    become(0)
    found = reconstruct_module._keep_best_(segment, values, targets, [lambda: become(1), lambda: become(2)])
    assert found == 0.0
    assert torch.equal(layer.weight, weights[least])


class Shared(nn.Module):
    """A layer that is called twice, and two layers with one weight."""

    def __init__(self):
        super().__init__()
        self.first, self.twice, self.a, self.b, self.last = (nn.Linear(8, 8) for _ in range(5))
        self.b.weight = self.a.weight

    def forward(self, x):
        y = self.twice(self.first(x).relu()).relu()
        y = self.twice(y).relu()
        return self.last((self.a(y).tanh() + self.b(y)).relu())


@pytest.mark.parametrize("correct", [False, True])
@pytest.mark.parametrize("method", ["GPTQ", Reconstruction(max_layers=1, iterations=40, scale_lr=0.0)])
def test_what_is_called_again_is_compared_with_the_float_model_and_learned_once(method, correct):
    torch.manual_seed(0)
    model, batches = Shared().eval(), [torch.randn(16, 8) for _ in range(4)]
    config = {"extra_qconfig_dict": {"w_qscheme": {"bit": 3}}, "activation": "float"}
    gm = calibrate(fxqat.prepare_by_platform(model, "TSQAT", config), *[(batch,) for batch in batches]).eval()
    errors = reconstruct(gm, batches, method, correct_bias=correct)
    assert list(errors) == ["first", "twice", "a", "last"]
    with torch.no_grad():
        pairs = [(gm(batch), model(batch)) for batch in batches]
    error = sum(float((a - b).square().sum()) for a, b in pairs) / sum(float(b.square().sum()) for _, b in pairs)
    assert errors["last"][1] == pytest.approx(error, rel=1e-4)


class Head(nn.Module):
    """A head that reads two levels, whose values lie in different channels."""

    def __init__(self):
        super().__init__()
        self.levels = nn.ModuleList(nn.Linear(8, 16) for _ in range(2))
        self.head = nn.Linear(16, 16)
        for place, level in enumerate(self.levels):
            nn.init.zeros_(level.bias)
            level.weight.data[8 * place : 8 * place + 8] *= 0.3

    def forward(self, x):
        return torch.cat([self.head(level(x)).tanh() for level in self.levels], -1)


@pytest.mark.parametrize("method", ["GPTQ", "AdaRound"])
def test_a_layer_is_learned_from_the_inputs_of_all_its_calls(method, monkeypatch):
    setting = replace(METHODS[method], iterations=min(METHODS[method].iterations, 400))
    torch.manual_seed(0)
    model, batches = Head().eval(), [torch.randn(64, 8) for _ in range(4)]
    config = {"extra_qconfig_dict": {"w_qscheme": {"bit": 3}}, "activation": "float"}
    errors = []
    for most in (0, segments.MOST_IN_A_LOOP):
        monkeypatch.setattr(segments, "MOST_IN_A_LOOP", most)
        gm = calibrate(fxqat.prepare_by_platform(model, "TSQAT", config), *[(batch,) for batch in batches]).eval()
        reconstruct(gm, batches, setting)
        with torch.no_grad():
            errors.append(sum(float((gm(batch) - model(batch)).square().sum()) for batch in batches))
    assert errors[1] < 0.7 * errors[0]


def test_gradients_and_what_requires_them_are_as_before():
    gm, batches = low_bit()
    parameters = dict(gm.named_parameters())
    scales = [name for name in parameters if name.endswith("act_fake_quant.relative_scale")]
    frozen, kept = scales[:2]
    parameters[frozen].requires_grad_(False)
    parameters[kept].grad = torch.ones_like(parameters[kept])
    required = {name: parameter.requires_grad for name, parameter in parameters.items()}
    reconstruct(gm, batches, QUICK)
    assert {name: parameter.requires_grad for name, parameter in parameters.items()} == required
    assert [name for name, parameter in parameters.items() if parameter.grad is not None] == [kept]
    assert torch.equal(parameters[kept].grad, torch.ones_like(parameters[kept]))


def test_the_same_seed_gives_the_same_model_and_the_caller_s_random_state_is_kept():
    state = torch.random.get_rng_state()
    models = []
    for _ in range(2):
        gm, batches = low_bit()
        torch.random.set_rng_state(state)
        reconstruct(gm, batches, Reconstruction(iterations=10, drop=0.2), seed=3)
        assert torch.equal(torch.random.get_rng_state(), state)
        models.append(gm)
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))


def test_a_reconstructed_model_is_exported(tmp_path):
    gm, batches = low_bit(config=None)
    reconstruct(gm, batches[:1], Reconstruction(iterations=5, drop=0.2))
    report = fxqat.convert_export(gm, batches[0], tmp_path / "model.onnx")
    assert report.certificate.passed


@pytest.mark.parametrize("method", ["GPTQ", "AdaRound", "QDrop"])
def test_a_computed_weight_stays_as_it_is_and_is_told(method, caplog):
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 1)), nn.Conv2d(4, 2, 3)]
    gm = fxqat.prepare_by_platform(nn.Sequential(*layers).eval(), "TSQAT", LOW_BITS)
    batches = [(torch.randn(4, 3, 8, 8),)]
    calibrate(gm, *batches)
    before = copy.deepcopy(gm.state_dict())
    errors = reconstruct(gm, batches, replace(METHODS[method], **({} if method == "GPTQ" else {"iterations": 20})))
    changed = {name for name, value in gm.state_dict().items() if not torch.equal(value, before[name])}
    assert changed >= {"0.weight", "2.weight"}
    assert not any("parametrizations" in name for name in changed)
    assert all(after <= first for first, after in errors.values())
    assert "reconstruct: the weights of 1 are computed" in caplog.text


def test_the_comparison_from_before_is_dropped():
    gm, batches = low_bit()
    fxqat.compare_with_float(gm, batches)
    assert gm.quantization_noise is not None
    reconstruct(gm, batches, QUICK)
    assert gm.quantization_noise is None


def test_methods():
    assert set(METHODS) == {"GPTQ", "AdaRound", "BRECQ", "QDrop"}
    assert METHODS["AdaRound"].max_layers == 1
    assert METHODS["AdaRound"].scale_lr == METHODS["BRECQ"].drop == 0
    gm, batches = low_bit()
    with pytest.raises(ConfigError, match="unknown reconstruction 'Adaround'; known: GPTQ, AdaRound, BRECQ, QDrop"):
        reconstruct(gm, batches, "Adaround")
    with pytest.raises(ConfigError, match="at least one batch"):
        reconstruct(gm, [])
    gm, batches = low_bit(config={"extra_qconfig_dict": {"w_fakequantize": "DoReFa"}})
    with pytest.raises(ConfigError, match="DoReFaFakeQuantize of stem rounds a function of the weight"):
        reconstruct(gm, batches)
    with pytest.raises(CalibrationError, match="saw no data"):
        reconstruct(fxqat.prepare_by_platform(nn.Linear(3, 3)), [(torch.randn(2, 3),)])


@pytest.mark.parametrize(
    ("name", "value"),
    [("drop", 1.5), ("warmup", 1.0), ("iterations", 0), ("scale_lr", -1.0), ("rounding_lr", 0.0), ("drop", math.nan)],
)
def test_wrong_settings_are_errors(name, value):
    with pytest.raises(ConfigError, match=name):
        Reconstruction(**{name: value})


@pytest.mark.parametrize(("share", "expected"), [(1.0, 1.0), (0.5, 0.5), (0.25, 0.25), (1e-4, 1 / 256)])
def test_the_fraction_of_dropped_values(share, expected):
    torch.manual_seed(0)
    a, b = torch.zeros(301, 333), torch.ones(301, 333)
    chosen = _mix_randomly(a, b, share)
    assert set(chosen.unique().tolist()) <= {0.0, 1.0}
    assert abs(float(chosen.mean()) - expected) <= 4 * math.sqrt(expected * (1 - expected) / a.numel())

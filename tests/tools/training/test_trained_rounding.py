"""Learned rounding in a training loop: it starts at the float weights and ends on the grid."""

import copy
import logging

import pytest
import torch
from torch import nn

from fxqat import (
    calibrate,
    convert_export,
    disable_all,
    enable_quantization,
    prepare_by_platform,
    save_checkpoint,
)
from fxqat.errors import CalibrationError, CheckpointError, ConfigError, ExportError
from fxqat.tools import train_rounding
from fxqat.tools.post_training.adaround import AdaRoundFakeQuantize


def weights(bits, **scheme):
    return {"extra_qconfig_dict": {"w_observer": "MSE", "w_qscheme": {"bit": bits, **scheme}}}


def quantized(model, config, x, backend="Experimental"):
    gm = prepare_by_platform(model.eval(), backend, config, example_inputs=x)
    calibrate(gm, [x], progress=False)
    enable_quantization(gm)
    return gm


def convolutions():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.Flatten(),
        nn.Linear(8 * 4 * 4, 5),
    )  # fmt: skip
    model[1].running_var.uniform_(0.5, 2.0)
    model[1].weight.data.uniform_(0.5, 2.0)
    return model, torch.randn(16, 3, 6, 6)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(16, 16, batch_first=True, bidirectional=True)
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


def train(gm, x, target, steps=200):
    """Train the rounding; returns what the model computed in the last step."""
    with train_rounding(gm, steps) as rounding:
        optimizer = torch.optim.Adam(rounding.parameter_groups(relative_lr=1e-3))
        for _ in range(steps):
            optimizer.zero_grad()
            (gm(x) - target).square().mean().backward()
            rounding.pull()
            optimizer.step()
        assert rounding.undecided() == 0
        return gm(x).detach()


def test_inside_the_weights_are_those_of_the_float_model() -> None:
    model, x = convolutions()
    scheme = {"w_qscheme": {"bit": 6, "symmetry": False}, "w_observer": "MinMax"}  # which clips nothing
    gm = quantized(model, {"activation": "float", "extra_qconfig_dict": scheme}, x)
    target = model(x).detach()
    rounded = float((gm(x) - target).detach().square().mean())
    with train_rounding(gm, 60) as rounding:
        assert float((gm(x) - target).detach().square().mean()) < 0.02 * rounded
        assert rounding.undecided() > 0.9


@pytest.mark.parametrize(
    "scheme",
    [{}, {"symmetry": False}, {"per_channel": False}, {"scale_bits": 24}],
    ids=["rows", "zeros", "tensor", "scales"],
)
def test_convolutions_are_nearer_to_the_float_model(tmp_path, scheme) -> None:
    model, x = convolutions()
    gm = quantized(model, weights(3, **scheme), x)
    target = model(x).detach()
    before = float((gm(x) - target).detach().square().mean())
    last = train(gm, x, target)
    after = float((gm(x) - target).detach().square().mean())
    assert after < 0.5 * before
    torch.testing.assert_close(gm(x), last, rtol=0.05, atol=0.05 * float(last.abs().max()))  # of the last step
    assert convert_export(gm, (x,), tmp_path / "m.onnx").certificate.passed


@pytest.mark.parametrize("scheme", [{}, {"block_size": 8, "symmetry": False, "scale_bits": 24}], ids=["rows", "blocks"])
def test_recurrent_layers_are_nearer_to_the_float_model(tmp_path, scheme) -> None:
    model, x = Recurrent(), torch.randn(16, 7, 16)
    gm = quantized(model, weights(3, **scheme), x)
    target = model(x).detach()
    before = float((gm(x) - target).detach().square().mean())
    train(gm, x, target)
    assert float((gm(x) - target).detach().square().mean()) < 0.5 * before
    assert convert_export(gm, (x,), tmp_path / "m.onnx").certificate.passed


def test_integers_and_scales_are_those_that_were_learned() -> None:
    model, x = convolutions()
    gm = quantized(model, weights(4, scale_bits=24), x)
    target = model(x).detach()
    scales = {name: quant.scale.clone() for name, quant in gm.named_modules() if name.endswith("weight_fake_quant")}
    with train_rounding(gm, 60) as rounding:
        optimizer = torch.optim.Adam(rounding.parameter_groups())
        for _ in range(60):
            optimizer.zero_grad()
            (gm(x) - target).square().mean().backward()
            rounding.pull()
            optimizer.step()
        inside = gm(x).detach()
        learned = {name: gm.get_submodule(name).qparams()[0] for name in scales}
    for name, scale in scales.items():
        assert not torch.equal(learned[name], scale)
        torch.testing.assert_close(gm.get_submodule(name).qparams()[0], learned[name], rtol=0, atol=0)
    torch.testing.assert_close(gm(x), inside, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scheme", [{}, {"pot_scale": True}], ids=["of_the_backend", "powers_of_two"])
def test_scales_of_few_bits_stay(scheme) -> None:
    model, x = convolutions()
    gm = quantized(model, weights(4, **scheme), x)
    scales = [quant.scale.clone() for name, quant in gm.named_modules() if name.endswith("weight_fake_quant")]
    train(gm, x, model(x).detach(), steps=50)
    found = [quant.scale for name, quant in gm.named_modules() if name.endswith("weight_fake_quant")]
    assert all(map(torch.equal, scales, found))


def test_batch_norm_is_frozen_inside_and_as_before_afterwards() -> None:
    model, x = convolutions()
    gm = quantized(model, weights(4), x).train()
    layer = next(module for module in gm.modules() if getattr(module, "bn", None) is not None)
    mean, gamma = layer.bn.running_mean.clone(), layer.bn.weight.detach().clone()
    train(gm, x, model(x).detach(), steps=50)
    assert torch.equal(layer.bn.running_mean, mean)
    assert torch.equal(layer.bn.weight, gamma)
    gm(x)
    assert not torch.equal(layer.bn.running_mean, mean)
    assert all(parameter.requires_grad for parameter in (layer.weight, layer.bn.weight, layer.bn.bias))


def test_few_steps_do_no_harm() -> None:
    """The first step of Adam goes in the direction of all gradients at once, by the learning rate."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.ReLU())))
    x = torch.randn(256, 64)
    target = model(x).detach()
    gm = quantized(model, weights(4), x)
    before = (gm(x) - target).square().mean()
    for steps, rate in ((20, 0.02), (2000, 0.02), (4000, 0.01)):
        with train_rounding(copy.deepcopy(gm), steps) as rounding:
            assert rounding.parameter_groups()[0]["lr"] == rate
    train(gm, x, target, steps=20)
    assert (gm(x) - target).square().mean() < before


@pytest.mark.parametrize("pulls", [True, False])
def test_the_pull_decides_most_weights(pulls) -> None:
    model, x = convolutions()
    gm = quantized(model, weights(4), x)
    target = model(x).detach()
    with train_rounding(gm, 200) as rounding:
        optimizer = torch.optim.Adam(rounding.parameter_groups(rounding_lr=0.2))
        for _ in range(89):  # none is rounded yet
            optimizer.zero_grad()
            (gm(x) - target).square().mean().backward()
            if pulls:
                rounding.pull()
            optimizer.step()
        assert (rounding.undecided() < 0.8) == pulls


@pytest.mark.parametrize(
    ("steps", "expected"), [(20, [(10, 100), (16, 3)]), (40, [(19, 100), (20, 84)]), (400, [(20, 100)])]
)
def test_weights_that_are_not_decided_are_told(caplog, steps, expected) -> None:
    model, x = convolutions()
    gm = quantized(model, weights(4), x)
    with caplog.at_level(logging.WARNING, "fxqat"), train_rounding(gm, steps) as rounding:
        optimizer = torch.optim.SGD(rounding.parameter_groups(), lr=1e-6)
        for _ in range(20):
            optimizer.zero_grad()
            gm(x).square().mean().backward()
            rounding.pull()
            optimizer.step()
    told = [f"after {done} of {steps} steps, {left} % of the weights were not decided" for done, left in expected]
    assert [record.getMessage().partition(": ")[2].partition(", and")[0] for record in caplog.records] == told


def test_more_and_more_weights_are_rounded_and_stay() -> None:
    model, x = convolutions()
    gm = quantized(model, weights(4), x)
    target, decided = model(x).detach(), {}
    with train_rounding(gm, 100) as rounding:
        optimizer = torch.optim.Adam(rounding.parameter_groups(rounding_lr=0.003))
        for step in range(80):
            optimizer.zero_grad()
            (gm(x) - target).square().mean().backward()
            rounding.pull()
            optimizer.step()
            if step in (44, 46, 60, 70, 75):
                limit = (1 - max(0.0, min(1.0, (step / 100 - 0.45) / 0.3))) ** 2
                assert rounding.undecided() <= limit + 1e-6
                assert rounding.undecided() > limit - (0.5 if step == 44 else 0.1)
            for quant in (module for module in gm.modules() if isinstance(module, AdaRoundFakeQuantize)):
                fraction = quant.fraction().detach()
                before = decided.get(quant, torch.full_like(fraction, 0.5))
                is_decided = (before == 0) | (before == 1) if step > 45 else torch.zeros_like(before, dtype=bool)
                assert torch.equal(fraction[is_decided], before[is_decided])
                decided[quant] = fraction


def test_an_error_leaves_the_weights_as_before() -> None:
    model, x = convolutions()
    gm = quantized(model, weights(4), x)
    before = copy.deepcopy(gm.state_dict())

    def fail() -> None:
        with train_rounding(gm, 60) as rounding:
            optimizer = torch.optim.Adam([group for group in rounding.parameter_groups() if group["lr"] > 1e-3])
            gm(x).sum().backward()
            optimizer.step()
            raise KeyError("of the user")

    with pytest.raises(KeyError, match="of the user"):
        fail()
    after = gm.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in after.items())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.last(torch.relu(self.second(torch.relu(self.first(x)))))


def test_shared_weights_stay_and_are_told(caplog) -> None:
    model, x = Tied(), torch.randn(16, 8)
    gm = quantized(model, weights(3), x)
    with caplog.at_level(logging.WARNING, "fxqat"):
        train(gm, x, model(x).detach())
    assert "the weights of first, second are trained as in QAT, rounded to the nearest" in caplog.text
    assert gm.first.weight is gm.second.weight

    def is_on_grid(layer) -> bool:
        return torch.allclose(layer.weight_fake_quant.quantize(layer.weight), layer.weight, atol=1e-5)

    assert is_on_grid(gm.last)
    assert not is_on_grid(gm.first)


def test_the_model_is_not_finished_inside(tmp_path) -> None:
    model, x = convolutions()
    gm = quantized(model, weights(4), x)
    with train_rounding(gm, 60):
        for made in (gm, copy.deepcopy(gm)):
            with pytest.raises(ExportError, match="Leave the block of train_rounding first"):
                convert_export(made, (x,), tmp_path / "m.onnx")
            with pytest.raises(CheckpointError, match="Leave the block of train_rounding first"):
                save_checkpoint(made, tmp_path / "m.pth")
            with pytest.raises(ConfigError, match="Leave the block of train_rounding first"):
                train_rounding(made, 60).__enter__()
        with pytest.raises(ConfigError, match="being learned: calibrate before or after it"):
            calibrate(gm, [x], progress=False)
    assert list(tmp_path.iterdir()) == []
    calibrate(gm, [x], progress=False)
    enable_quantization(gm)
    assert convert_export(gm, (x,), tmp_path / "m.onnx").certificate.passed


def test_what_cannot_be_learned_is_refused() -> None:
    model, x = convolutions()
    gm = quantized(model, weights(4), x)
    with train_rounding(gm, 60) as rounding:
        with pytest.raises(ConfigError, match="after loss.backward"):
            rounding.pull()
        with pytest.raises(ConfigError, match="learning rates must be positive, got 0"):
            rounding.parameter_groups(0)
    with pytest.raises(ConfigError, match="steps must be at least 1, got 0"):
        train_rounding(gm, 0).__enter__()
    with pytest.raises(ConfigError, match="wrapped by DistributedDataParallel already"):
        train_rounding(nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel), 60).__enter__()
    disable_all(gm)
    with pytest.raises(CalibrationError, match="none of 3 layers has a weight of its own with its fake-quant on"):
        train_rounding(gm, 60).__enter__()
    other = {"extra_qconfig_dict": {"w_fakequantize": "DoReFa"}}
    with pytest.raises(ConfigError, match="train_rounding: DoReFaFakeQuantize of .* rounds a function of the weight"):
        train_rounding(quantized(convolutions()[0], other, x), 60).__enter__()

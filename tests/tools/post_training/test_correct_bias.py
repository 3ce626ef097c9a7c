"""Bias correction: afterwards no channel has a mean error before its activation."""

import importlib
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import fxqat
from fxqat.errors import CalibrationError, ConfigError
from fxqat.tools import Reconstruction, correct_bias, profile, reconstruct
from tests.models import BasicBlock, calibrate

TWO_BITS = {"extra_qconfig_dict": {"w_qscheme": {"bit": 2, "narrow_range": False}}}


def model_and_data():
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        BasicBlock(8, 8),
        *(nn.Conv2d(8, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)),
    )
    batches = [(torch.randn(16, 3, 8, 8) + 0.5,) for _ in range(3)]
    with torch.no_grad():
        for batch in batches:
            model.train()(*batch)
    return model.eval(), batches


def means(gm, batches, quantized, path):
    """The mean of each channel before the activation, measured with a separate hook."""
    (fxqat.enable_quantization if quantized else fxqat.disable_all)(gm)
    layer, found = gm.get_submodule(path), []
    activation, layer.activation = layer.activation, nn.Identity()
    handle = layer.register_forward_hook(lambda module, args, y: found.append(y.transpose(0, 1).flatten(1).double()))
    with torch.no_grad():
        for batch in batches:
            gm(*batch)
    handle.remove()
    layer.activation = activation
    return torch.cat(found, 1).mean(1)


def test_every_layer_has_the_mean_of_the_float_model():
    model, batches = model_and_data()
    gm = calibrate(fxqat.prepare_by_platform(model, "TSQAT", TWO_BITS), *batches).eval()
    paths = ["0", "3.conv1", "3.conv2", "4", "7"]
    expected = {path: means(gm, batches, False, path) for path in paths}
    before = {path: means(gm, batches, True, path) for path in paths}
    found = correct_bias(gm, batches)
    assert list(found) == paths
    assert all(quant.fake_quant_enabled for quant in gm.modules() if hasattr(quant, "fake_quant_enabled"))
    for path in paths:
        error = (before[path] - expected[path]).abs().max()
        left = (means(gm, batches, True, path) - expected[path]).abs().max()
        assert left < 0.2 * error  # the rest is the rounding of the bias to a step of s_x * s_w
        assert error > 1e-2


def test_a_model_that_is_not_calibrated_is_an_error():
    model, batches = model_and_data()
    with pytest.raises(CalibrationError, match="saw no data"):
        correct_bias(fxqat.prepare_by_platform(model), batches)


def test_a_corrected_model_is_refused_where_the_float_model_is_needed():
    model, batches = model_and_data()
    gm = calibrate(fxqat.prepare_by_platform(model, "TSQAT", TWO_BITS), *batches).eval()
    correct_bias(gm, batches)
    for again in (correct_bias, reconstruct, profile):
        with pytest.raises(ConfigError, match=f"{again.__name__}: the biases of this model were corrected"):
            again(gm, batches)


def test_a_checkpoint_remembers_the_correction(tmp_path):
    model, batches = model_and_data()
    gm = calibrate(fxqat.prepare_by_platform(model, "TSQAT", TWO_BITS), *batches).eval()
    fxqat.save_checkpoint(gm, tmp_path / "plain.pth")
    correct_bias(gm, batches)
    fxqat.save_checkpoint(gm, tmp_path / "corrected.pth")
    found = fxqat.prepare_by_platform(model, "TSQAT", TWO_BITS)
    fxqat.load_checkpoint(found, tmp_path / "corrected.pth")
    with pytest.raises(ConfigError, match="were corrected"):
        reconstruct(found, batches)
    fxqat.load_checkpoint(found, tmp_path / "plain.pth")
    correct_bias(found, batches)


def reconstruct_and_correct(gm, batches):
    reconstruct(gm, batches, Reconstruction(iterations=1), correct_bias=True)


@pytest.mark.parametrize("tool", [correct_bias, reconstruct_and_correct])
def test_an_interrupted_correction_counts_as_a_correction(tool, monkeypatch):
    model, batches = model_and_data()
    gm = calibrate(fxqat.prepare_by_platform(model, "TSQAT", TWO_BITS), *batches).eval()
    with monkeypatch.context() as patch:
        patch.setattr(gm.get_submodule("4"), "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tool(gm, batches)
    with pytest.raises(ConfigError, match="were corrected"):
        correct_bias(gm, batches)


def interrupted(*args, **options):
    raise KeyboardInterrupt


def test_reconstruction_corrects_each_segment_before_it_is_learned(monkeypatch):
    model, batches = model_and_data()
    gm = calibrate(fxqat.prepare_by_platform(model, "TSQAT", TWO_BITS), *batches).eval()
    paths = ["0", "3.conv1", "3.conv2", "4", "7"]
    expected = {path: means(gm, batches, False, path) for path in paths}
    before = {path: means(gm, batches, True, path) for path in paths}
    monkeypatch.setattr(
        importlib.import_module("fxqat.tools.post_training.reconstruct"), "learn_rounding", lambda *args: None
    )
    found = reconstruct(gm, batches, Reconstruction(iterations=30), correct_bias=True)
    assert all(after < before for before, after in found.values())
    for path in paths:
        error = (before[path] - expected[path]).abs().max()
        assert (means(gm, batches, True, path) - expected[path]).abs().max() < 0.2 * error, path


def test_reconstruction_with_correction_approaches_the_float_model():
    model, batches = model_and_data()
    gm = calibrate(fxqat.prepare_by_platform(model, "TSQAT", TWO_BITS), *batches).eval()
    with torch.no_grad():
        fxqat.disable_all(gm)
        targets = [gm(*batch) for batch in batches]
    found = reconstruct(gm, batches, Reconstruction(iterations=30), correct_bias=True)
    with torch.no_grad():
        error = sum(float((gm(*batch) - y).square().sum()) for batch, y in zip(batches, targets, strict=True))
    relative = error / sum(float(y.square().sum()) for y in targets)
    assert found["7"][1] == pytest.approx(relative, rel=1e-4)
    assert found["7"][1] < found["7"][0]
    with pytest.raises(ConfigError, match="were corrected"):
        correct_bias(gm, batches)


def with_nan(batches):
    spoilt = batches[0][0].clone()
    spoilt[0, 0, 0, 0] = torch.nan
    return [batches[0], (spoilt,)]


@pytest.mark.parametrize("tool", ["correct_bias", "GPTQ", "AdaRound", "QDrop"])
def test_nan_in_the_batches_is_an_error_and_no_parameter_becomes_nan(tool):
    model, batches = model_and_data()
    gm = calibrate(fxqat.prepare_by_platform(model, "TSQAT", TWO_BITS), *batches)
    call = correct_bias if tool == "correct_bias" else partial(reconstruct, method=tool)
    with pytest.raises(CalibrationError, match="Look for NaN"):
        call(gm, with_nan(batches))
    assert all(parameter.isfinite().all() for parameter in gm.parameters())


@pytest.mark.parametrize("tool", [correct_bias, reconstruct, profile], ids=lambda tool: tool.__name__)
def test_a_wrapped_model_is_taken_and_a_float_model_is_refused(tool):
    model, batches = model_and_data()
    with pytest.raises(ConfigError, match="expected a model that prepare_by_platform returned, got Sequential"):
        tool(model, batches)
    gm = calibrate(fxqat.prepare_by_platform(model, "TSQAT", TWO_BITS), *batches)
    wrapped = AveragedModel(gm)
    arguments = ("GPTQ",) if tool is reconstruct else ()
    found, expected = tool(wrapped, batches, *arguments), tool(gm, batches, *arguments)
    assert str(found) == str(expected)

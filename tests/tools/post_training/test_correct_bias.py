"""Bias correction: afterwards no shift of a channel makes the error after its activation smaller."""

import copy
import importlib
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

import fxqat
from fxqat.errors import CalibrationError, ConfigError
from fxqat.tools import Reconstruction, correct_bias, profile, reconstruct
from fxqat.tools.post_training.correct_bias import best_shift, channel_values
from fxqat.tools.post_training.segments import named_inputs, split
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


PATHS = {"0": nn.ReLU(), "3.conv1": nn.ReLU(), "3.conv2": None, "4": None, "7": None}
"""The layers of the model and what reads their outputs; after 3.conv2 the skip connection is added first."""


def outputs(gm, batches, quantized, path):
    """The values of each channel before the activation, ``(channels, values)``, measured with a separate hook."""
    (fxqat.enable_quantization if quantized else fxqat.disable_all)(gm)
    layer, found = gm.get_submodule(path), []
    activation, layer.activation = layer.activation, nn.Identity()
    handle = layer.register_forward_hook(lambda module, args, y: found.append(y.transpose(0, 1).flatten(1).double()))
    with torch.no_grad():
        for batch in batches:
            gm(*batch)
    handle.remove()
    layer.activation = activation
    return torch.cat(found, 1)


def shifts_left(gm, batches, expected):
    """The largest shift that would still lower the error of a channel, by layer."""
    return {
        path: best_shift(outputs(gm, batches, True, path), expected[path], activation).abs().max().item()
        for path, activation in PATHS.items()
    }


def test_no_channel_of_any_layer_can_be_shifted_closer_to_the_float_model():
    model, batches = model_and_data()
    gm = calibrate(fxqat.prepare_by_platform(model, "TSQAT", TWO_BITS), *batches).eval()
    expected = {path: outputs(gm, batches, False, path) for path in PATHS}
    before = shifts_left(gm, batches, expected)
    found = correct_bias(gm, batches)
    assert list(found) == list(PATHS)
    assert all(quant.fake_quant_enabled for quant in gm.modules() if hasattr(quant, "fake_quant_enabled"))
    left = shifts_left(gm, batches, expected)
    for path in PATHS:
        assert left[path] < 0.2 * before[path], path  # the rest is the rounding of the bias to a step of s_x * s_w
        assert before[path] > 1e-2


@pytest.mark.parametrize("activation", [F.silu, F.gelu, F.hardswish, F.relu, F.relu6, F.sigmoid, nn.ReLU(inplace=True)])
def test_the_best_shift_is_the_best_of_a_fine_grid(activation):
    generator = torch.Generator().manual_seed(0)
    wanted = 4 * torch.randn(8, 500, generator=generator, dtype=torch.float64)
    values = wanted + 0.3 * torch.randn(8, 500, generator=generator, dtype=torch.float64) + 0.2
    values[wanted < -3] -= 2  # what is flat hides this, which the mean of all errors does not

    def errors(shift):
        return (activation(values + shift) - activation(wanted.clone())).square().sum(1)

    shift = best_shift(values, wanted, activation)
    least = torch.stack([errors(step) for step in torch.linspace(-1, 2, 601)]).min(0).values
    assert (errors(shift.unsqueeze(1)) <= least * 1.001).all()
    mean = best_shift(values, wanted, None)
    torch.testing.assert_close(mean, (wanted - values).mean(1).float())
    assert (errors(mean.unsqueeze(1)) > 1.1 * errors(shift.unsqueeze(1))).all()


def test_a_channel_of_which_nothing_passes_the_activation_stays():
    wanted = -1 - torch.rand(2, 50)
    assert best_shift(wanted - 0.5, wanted, F.relu).tolist() == [0, 0]
    torch.testing.assert_close(best_shift(wanted - 0.5, wanted, None), torch.tensor([0.5, 0.5]))
    assert (best_shift(wanted + 1.5, wanted, F.relu) < -1).all()  # where they passed, they are shifted back


@pytest.mark.parametrize("backend", ["TSQAT", "ONNXRuntime"])
def test_errors_where_silu_is_flat_do_not_shift_the_rest(backend):
    """Inputs of very negative outputs are clipped: their error is large, and SiLU hides it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.SiLU(), nn.Conv2d(8, 8, 1)).eval()
    with torch.no_grad():
        model[0].weight[:, 0] = -1.0  # channel 0 of the input is large at some places
    x = torch.randn(4, 3, 16, 16)
    calibrated = x.clone()
    x[:, 0, :4] += 30
    gm = calibrate(fxqat.prepare_by_platform(model, backend, example_inputs=(x,)), (calibrated,)).eval()
    with torch.no_grad():
        before = (gm(x) - model(x)).square().mean()
        assert list(correct_bias(gm, [x])) == ["0", "2"]
        assert (gm(x) - model(x)).square().mean() < before


def test_inputs_without_a_batch_dimension():
    """A convolution's output is then ``(channels, H, W)``, a linear layer's ``(channels,)``."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(0), nn.Linear(4, 3)).eval()
    batches = [(torch.randn(3, 8, 8),) for _ in range(4)]
    gm = calibrate(fxqat.prepare_by_platform(model, "TSQAT", TWO_BITS), *batches).eval()
    with torch.no_grad():
        wanted = torch.stack([model(*batch) for batch in batches])
        before = torch.stack([gm(*batch) for batch in batches]) - wanted
        assert list(correct_bias(gm, batches)) == ["0", "4"]
        after = torch.stack([gm(*batch) for batch in batches]) - wanted
    assert after.mean(0).abs().sum() < 0.8 * before.mean(0).abs().sum()  # the rest is the rounding of the output


def test_the_comparison_from_before_is_dropped():
    model, batches = model_and_data()
    gm = calibrate(fxqat.prepare_by_platform(model, "TSQAT"), *batches)
    fxqat.compare_with_float(gm, batches)
    assert gm.quantization_noise is not None
    correct_bias(gm, batches)
    assert gm.quantization_noise is None


def test_the_squares_of_many_float16_values_do_not_overflow():
    wanted = 100 * torch.randn(2, 4000, generator=torch.Generator().manual_seed(0))
    shift = best_shift((wanted + 8).half(), wanted.half(), F.relu)
    assert shift.dtype == torch.float32
    torch.testing.assert_close(shift, torch.tensor([-8.0, -8.0]), atol=0.1, rtol=0)


@pytest.mark.parametrize("limit", [64, 2**13])
def test_of_a_large_layer_some_values_are_compared(limit, monkeypatch):
    monkeypatch.setattr(importlib.import_module("fxqat.tools.post_training.correct_bias"), "COMPARED", limit)
    model, batches = model_and_data()
    gm = calibrate(fxqat.prepare_by_platform(model, "TSQAT", TWO_BITS), *batches).eval()
    fxqat.enable_quantization(gm)
    segment = split(gm, max_layers=1)[0]
    found = channel_values(segment, [named_inputs(gm, batch) for batch in batches], quantized=True)["0"]
    assert found.shape == (8, min(limit // 3 * 3, 3 * 16 * 36))
    again = channel_values(segment, [named_inputs(gm, batch) for batch in batches], quantized=True)["0"]
    assert torch.equal(found, again)  # the float and the quantized run are compared value by value
    everything = outputs(gm, batches, True, "0")
    assert all(torch.isin(row.double(), whole).all() for row, whole in zip(found, everything, strict=True))


def test_a_model_that_is_not_calibrated_is_an_error():
    model, batches = model_and_data()
    with pytest.raises(CalibrationError, match="saw no data"):
        correct_bias(fxqat.prepare_by_platform(model), batches)


def reconstruct_by_gptq(gm, batches):
    reconstruct(gm, batches, "GPTQ")


FITTING = {"correct_bias": correct_bias, "reconstruct": reconstruct_by_gptq}


@pytest.mark.parametrize("tool", FITTING)
def test_a_fitted_model_is_refused_where_the_float_model_is_needed(tool):
    model, batches = model_and_data()
    gm = calibrate(fxqat.prepare_by_platform(model, "TSQAT", TWO_BITS), *batches).eval()
    FITTING[tool](gm, batches)
    before = copy.deepcopy(gm.state_dict())
    for again in (correct_bias, reconstruct, profile, fxqat.compare_with_float):
        with pytest.raises(ConfigError, match=f"^{again.__name__} compares with the float model.* {tool} fitted"):
            again(gm, batches)
    after = gm.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items() if isinstance(tensor, torch.Tensor))


@pytest.mark.parametrize("tool", FITTING)
def test_a_checkpoint_remembers_what_was_fitted(tool, tmp_path):
    model, batches = model_and_data()
    gm = calibrate(fxqat.prepare_by_platform(model, "TSQAT", TWO_BITS), *batches).eval()
    fxqat.save_checkpoint(gm, tmp_path / "plain.pth")
    FITTING[tool](gm, batches)
    fxqat.save_checkpoint(gm, tmp_path / "fitted.pth")
    found = fxqat.prepare_by_platform(model, "TSQAT", TWO_BITS)
    fxqat.load_checkpoint(found, tmp_path / "fitted.pth")
    with pytest.raises(ConfigError, match=f"{tool} fitted weights or biases"):
        reconstruct(found, batches)
    fxqat.load_checkpoint(found, tmp_path / "plain.pth")
    correct_bias(found, batches)
    assert found.provenance.fitted_by == "correct_bias"


def test_a_checkpoint_of_before_says_that_biases_were_corrected(tmp_path):
    model, batches = model_and_data()
    gm = calibrate(fxqat.prepare_by_platform(model, "TSQAT", TWO_BITS), *batches).eval()
    fxqat.save_checkpoint(gm, tmp_path / "now.pth")
    content = torch.load(tmp_path / "now.pth", weights_only=True)
    for was in (True, False):
        older = {key: value for key, value in content.items() if key != "fitted_by"} | {"bias_corrected": was}
        torch.save(older, tmp_path / "before.pth")
        fxqat.load_checkpoint(gm, tmp_path / "before.pth")
        assert gm.provenance.fitted_by == ("correct_bias" if was else "")


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
    with pytest.raises(ConfigError, match="fitted weights or biases"):
        correct_bias(gm, batches)


def interrupted(*args, **options):
    raise KeyboardInterrupt


def test_reconstruction_corrects_each_segment_before_it_is_learned(monkeypatch):
    model, batches = model_and_data()
    gm = calibrate(fxqat.prepare_by_platform(model, "TSQAT", TWO_BITS), *batches).eval()
    expected = {path: outputs(gm, batches, False, path) for path in PATHS}
    before = shifts_left(gm, batches, expected)
    monkeypatch.setattr(
        importlib.import_module("fxqat.tools.post_training.reconstruct"), "learn_rounding", lambda *args: None
    )
    found = reconstruct(gm, batches, Reconstruction(iterations=30), correct_bias=True)
    assert all(after < before for before, after in found.values())
    left = shifts_left(gm, batches, expected)
    assert all(left[path] < 0.2 * before[path] for path in PATHS)


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
    with pytest.raises(ConfigError, match="fitted weights or biases"):
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

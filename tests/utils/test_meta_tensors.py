"""Models and inputs without values: prepare gives a report, everything else a clear error."""

import copy

import pytest
import torch
from torch import nn

import fxqat
from fxqat.errors import CalibrationError, CheckpointError, ConfigError, ExportError
from fxqat.utils.meta_tensors import require_values

X = torch.ones(2, 4)
WORDS = "are on the meta device, without values"


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


@pytest.fixture
def calibrated():
    gm = fxqat.prepare_by_platform(net(), "TSQAT")
    fxqat.calibrate(gm, [X], progress=False)
    fxqat.enable_quantization(gm)
    return gm


CALLS = {
    "calibrate": (lambda gm, _: fxqat.calibrate(gm, [X]), CalibrationError),
    "calibrate on meta": (lambda gm, _: fxqat.calibrate(gm, [X.to("meta")]), CalibrationError),
    "enable_calibration": (lambda gm, _: fxqat.enable_calibration(gm), CalibrationError),
    "enable_quantization": (lambda gm, _: fxqat.enable_quantization(gm), CalibrationError),
    "compare_with_float": (lambda gm, _: fxqat.compare_with_float(gm, [X]), CalibrationError),
    "convert_export": (lambda gm, path: fxqat.convert_export(gm, X, path / "m.onnx"), CalibrationError),
    "save_checkpoint": (lambda gm, path: fxqat.save_checkpoint(gm, path / "m.pth"), CheckpointError),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_prepared_model_on_the_meta_device_is_told_to_load_its_weights(call, calibrated, tmp_path):
    run, error = CALLS[call]
    with pytest.raises(error, match=rf"0\.weight, 0\.bias, .* and \d+ more of the model {WORDS}: load the weights"):
        run(calibrated.to("meta"), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_was_prepared_on_the_meta_device_has_a_report_only():
    gm = fxqat.prepare_by_platform(net().to("meta"), "TSQAT", example_inputs=X.to("meta"))
    assert gm.quant_report.num_quantized == 3
    with pytest.raises(CalibrationError, match=WORDS):
        fxqat.calibrate(gm, [X])
    fxqat.disable_all(gm)


def test_one_layer_without_values_is_named(calibrated, tmp_path):
    fxqat.save_checkpoint(calibrated, tmp_path / "m.pth")
    gm = copy.deepcopy(calibrated)
    gm.get_submodule("2").to("meta")
    with pytest.raises(CalibrationError, match=rf"the tensors 2\.weight, 2\.bias, .* {WORDS}"):
        fxqat.calibrate(gm, [X])
    with pytest.raises(CheckpointError, match=WORDS):
        fxqat.load_checkpoint(gm, tmp_path / "m.pth")
    require_values(calibrated, ConfigError)


def test_a_model_that_is_partly_on_the_meta_device_is_refused():
    model = net()
    model[2].to("meta")
    for inputs in (None, X):
        with pytest.raises(ConfigError, match=f"the tensors 2.weight, 2.bias of Sequential {WORDS}: load the weights"):
            fxqat.prepare_by_platform(model, example_inputs=inputs)
    with pytest.raises(ConfigError, match="0.weight, 0.bias of Sequential have values, but other parameters and"):
        fxqat.prepare_by_platform(model, example_inputs=X.to("meta"))


def test_inputs_without_values_are_refused_where_the_model_has_values(calibrated, tmp_path):
    with pytest.raises(ConfigError, match=rf"the inputs \(float32 tensor \(2, 4\)\) {WORDS}, and the model is on cpu"):
        fxqat.prepare_by_platform(net(), example_inputs=X.to("meta"))
    with pytest.raises(ConfigError, match=rf"the inputs .* {WORDS}"):
        fxqat.calibrate(calibrated, [X.to("meta")])
    with pytest.raises(ExportError, match=rf"example_inputs \(float32 tensor \(2, 4\)\) {WORDS}: give tensors with"):
        fxqat.convert_export(calibrated, X.to("meta"), tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []

"""The certificate's figures from the float model to the file."""

import json

import pytest
import torch
from torch import nn

from fxqat import calibrate, convert_export, enable_quantization, prepare_by_platform
from fxqat.tools import correct_bias, reconstruct
from tests.quantization.damaged_models import damaged


def ready(name):
    model, inputs, nodes = damaged(name)
    gm = prepare_by_platform(model, "TSQAT", example_inputs=inputs)
    calibrate(gm, [inputs])
    enable_quantization(gm)
    return model, gm, inputs, nodes


def test_the_certificate_has_the_figures(tmp_path, caplog):
    model, gm, (x,), _ = ready("outlier")
    caplog.clear()
    example = torch.randn(2, 3, 16, 16)
    report = convert_export(gm, example, tmp_path / "m.onnx")
    found = json.loads(report.certificate_path.read_text())["end_to_end"]
    with torch.no_grad():
        exact, quantized = model(example).double(), gm(example).double()
    error = (exact - quantized).square().sum()
    (output,) = found["example_inputs"]
    assert output["name"] == "output"
    assert output["fake_quant"]["sqnr"] == pytest.approx(
        float(10 * torch.log10(exact.square().sum() / error)), abs=1e-3
    )
    assert output["file"]["sqnr"] == pytest.approx(output["fake_quant"]["sqnr"], abs=0.1)
    assert output["file"]["cosine"] < 0.95  # the scale is that of the outlier
    (calibration,) = found["calibration"]
    assert calibration["cosine"] == gm.quantization_noise.outputs[0].difference.cosine > 0.99
    assert f"output output, float to file: cosine {output['file']['cosine']:.5f}" in str(report)
    assert "output output, float to fake-quant, calibration data: cosine 0.99" in str(report)
    assert "cosine below 0.95" in caplog.text
    assert "x: rounding its values" in caplog.text


def test_a_damaged_function_is_warned_about(tmp_path, caplog):
    _, gm, inputs, nodes = ready("phases")
    caplog.clear()
    noise = gm.quantization_noise
    report = convert_export(gm, inputs, tmp_path / "m.onnx")
    assert report.certificate.passed
    assert all(f"  {node}: " in caplog.text for node in nodes)
    assert str(list(noise.overrides)) in caplog.text
    assert gm.quantization_noise is noise


class Outputs(nn.Module):
    """Outputs of floats and integers."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        y = self.fc(x)
        return {"y": y, "class": y.argmax(-1)}


def test_a_healthy_model_without_the_calibration_figure(tmp_path, caplog):
    x = torch.randn(64, 8)
    gm = prepare_by_platform(Outputs().eval(), "TSQAT", example_inputs=x)
    calibrate(gm, [x], compare=False)
    report = convert_export(gm, x, tmp_path / "m.onnx")
    found = report.certificate.end_to_end
    assert found["calibration"] is None
    assert [output["name"] for output in found["example_inputs"]] == ["y", "class"]
    assert found["example_inputs"][0]["file"]["cosine"] > 0.999
    assert 0 <= found["example_inputs"][1]["file"]["changed"] < 0.2
    assert [record for record in caplog.records if record.name == "fxqat"] == []
    assert "of the values differ" in str(report)


def test_raw_inputs(tmp_path):
    x = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    model, *_ = damaged("outlier")
    normalized = (x - 127.0) / 60
    gm = prepare_by_platform(model, "TSQAT", example_inputs=normalized)
    calibrate(gm, [normalized])
    report = convert_export(gm, x, tmp_path / "m.onnx", input_stats=[(127.0, 60.0)])
    (output,) = report.certificate.end_to_end["example_inputs"]
    assert output["file"]["cosine"] > 0.999
    assert output["fake_quant"]["cosine"] == pytest.approx(gm.quantization_noise.cosine, abs=1e-4)


@pytest.mark.parametrize("tool", [correct_bias, reconstruct])
def test_a_model_that_was_fitted_has_no_float_model(tool, tmp_path):
    _, gm, inputs, _ = ready("tangent")
    tool(gm, [inputs])
    report = convert_export(gm, inputs, tmp_path / "m.onnx")
    assert report.certificate.end_to_end is None
    assert json.loads(report.certificate_path.read_text())["end_to_end"] is None
    assert "float to" not in str(report)

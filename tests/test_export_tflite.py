"""The way out to LiteRT: the file computes what the model computes, in every form, or nothing is written."""

import importlib
import json
import sys

import jsonschema
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fxqat import export_tflite, prepare_by_platform
from fxqat.errors import CalibrationError, ExportError, ParityError
from fxqat.onnx.quant_params import schema
from fxqat.tflite.flatbuffer import graph_of, operators, quantization_of, read_model, write_model
from fxqat.tflite.run_tflite import run_tflite
from tests.litert_models import Small, converted, needs_litert, small
from tests.models import calibrate

EXPORT = importlib.import_module("fxqat.export_tflite")  # the package has the function under this name


@pytest.fixture
def converts_once(monkeypatch):
    """The file of the small model is made once; what the converter gets is checked elsewhere."""
    needs_litert()
    monkeypatch.setattr(EXPORT, "run_converter", lambda *_: converted())


def test_without_the_packages_the_error_names_the_extra(monkeypatch, tmp_path):
    gm, x = small()
    monkeypatch.setitem(sys.modules, "litert_torch", None)
    with pytest.raises(ExportError, match="pip install") as caught:
        export_tflite(gm, x, tmp_path / "model.tflite")
    assert "fxqat[litert]" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("integer_io", [False, True])
def test_file_parameters_and_certificate(converts_once, integer_io, tmp_path):
    gm, x = small()
    report = export_tflite(gm, (x,), tmp_path / "m.tflite", tmp_path / "m.json", integer_io=integer_io)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.json", "m.tflite", "m.tflite.parity.json"]
    document = json.loads((tmp_path / "m.json").read_text())
    jsonschema.validate(document, schema())
    assert (document["backend"], document["opset"]) == ("LiteRT", None)
    certificate = json.loads(report.certificate_path.read_text())
    assert certificate["passed"]
    assert certificate["format"] == "fxqat.tflite_parity"
    assert report.float_operators == certificate["float_operators"] == {}
    content = report.tflite_path.read_bytes()
    given, expected = x.numpy(), gm(x).detach().numpy()
    if integer_io:
        graph = graph_of(read_model(content))
        (scale,), (zero_point,) = quantization_of(graph.tensors[graph.inputs[0]])
        given = np.clip(np.rint(given / scale) + zero_point, -128, 127).astype(np.int8)
        expected = np.rint(expected * 256) - 128  # softmax is on the scale 1/256
    for kernels in ("reference", "default"):
        (found,) = run_tflite(content, [given], kernels)
        assert found.dtype == given.dtype
        assert np.abs(found - expected).max() <= (2 if integer_io else 2 / 256)
    assert set(report.certificate.kernels) == {"reference", "default"}
    assert "LiteRT parity passed" in str(report)


def test_channels_last_is_the_layout_of_the_input_only(tmp_path):
    needs_litert()
    gm, x = small()
    report = export_tflite(gm, x, tmp_path / "m.tflite", channels_last=True)
    (found,) = run_tflite(report.tflite_path.read_bytes(), [x.movedim(1, -1).contiguous().numpy()])
    assert np.abs(found - gm(x).detach().numpy()).max() <= 2 / 256
    assert report.certificate.passed


class Half(nn.Module):
    """Layers of which the second is left float, a transposed one, and a power."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3)
        self.up, self.c = nn.ConvTranspose2d(4, 4, 2, stride=2), nn.Conv2d(4, 2, 1)

    def forward(self, x):
        return self.c(self.up(self.b(self.a(x)))) ** 2


def test_what_is_left_float_stays_float(tmp_path):
    needs_litert()
    torch.manual_seed(0)
    x = torch.randn(1, 3, 6, 6)
    config = {"extra_quantizer_dict": {"exclude_module_name": ["b"]}}
    gm = calibrate(prepare_by_platform(Half().eval(), "LiteRT", config, example_inputs=(x,), check="off"), (x,))
    report = export_tflite(gm, x, tmp_path / "m.tflite")
    assert report.certificate.passed
    assert {name: report.float_operators[name] for name in ("CONV_2D", "TRANSPOSE_CONV")} == {
        "CONV_2D": 1,  # the converter would make it an int8 operator, with weights of its own
        "TRANSPOSE_CONV": 1,
    }


@pytest.mark.parametrize("fault", ["weight", "scale"])
def test_a_wrong_file_is_not_written(converts_once, monkeypatch, fault, tmp_path):
    model = read_model(converted())
    graph = graph_of(model)
    if fault == "weight":
        index = next(i for i, t in enumerate(graph.tensors) if list(t.shape) == [8, 3, 3, 3])
        buffer = model.buffers[graph.tensors[index].buffer]
        buffer.data = (-buffer.data.view(np.int8)).view(np.uint8)
    else:
        index = next(o.outputs[0] for o in operators(model) if o.name == "DEPTHWISE_CONV_2D")
        graph.tensors[index].quantization.scale = graph.tensors[index].quantization.scale * np.float32(1.5)
    monkeypatch.setattr(EXPORT, "run_converter", lambda *_: write_model(model))
    gm, x = small()
    (tmp_path / "m.tflite").write_bytes(b"old")
    with pytest.raises(ParityError, match="nothing was written") as caught:
        export_tflite(gm, x, tmp_path / "m.tflite", tmp_path / "m.json")
    assert "FAILED" in str(caught.value)
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("m.tflite", b"old")]


def test_the_same_checks_as_for_onnx(converts_once, tmp_path):
    gm, x = small()
    with pytest.raises(ExportError, match="are the same file"):
        export_tflite(gm, x, tmp_path / "m", tmp_path / "m")
    with pytest.raises(ExportError, match="cannot write"):
        export_tflite(gm, x, tmp_path / "missing" / "m.tflite")
    fresh = prepare_by_platform(Small().eval(), "LiteRT", example_inputs=(x,), check="off")
    with pytest.raises(CalibrationError):
        export_tflite(fresh, x, tmp_path / "m.tflite")
    assert list(tmp_path.iterdir()) == []


def test_the_model_is_not_changed(converts_once, tmp_path):
    gm, x = small()
    before = {name: tensor.clone() for name, tensor in gm.state_dict().items()}
    report = export_tflite(gm, x, tmp_path / "m.tflite", verify=False)
    assert report.certificate is None
    assert report.certificate_path is None
    assert all(torch.equal(tensor, before[name]) for name, tensor in gm.state_dict().items())


class Attended(nn.Module):
    """What is left of attention: its scores are nearly equal, as with random weights."""

    def forward(self, scores, values):
        return scores.softmax(-1) @ values


def test_values_that_the_kernel_rounds_twice_are_no_fault(tmp_path):
    """LiteRT rounds a sum of products to a multiple of 1/8 first, so that 1 of 16 is rounded to the other side."""
    needs_litert()
    generator = torch.Generator().manual_seed(0)
    inputs = 0.1 * torch.randn(1, 2, 197, 197, generator=generator), torch.randn(1, 2, 197, 64, generator=generator)
    gm = calibrate(prepare_by_platform(Attended().eval(), "LiteRT", example_inputs=inputs), inputs)
    scales = {name: part.scale.item() for name, part in gm.named_modules() if hasattr(part, "scale")}
    multiplier = scales["softmax_act_fake_quant"] * scales["values_act_fake_quant"] / scales["matmul_act_fake_quant"]
    assert 1 / 16 < multiplier < 1 / 8
    certificate = export_tflite(gm, inputs, tmp_path / "model.tflite").certificate
    assert certificate.passed
    (found,) = [tensor for tensor in certificate.kernels["reference"].tensors if tensor.name == "matmul"]
    assert 0.05 < found.step.off_by_1 < 1 / 16 + 0.01
    assert found.off_by_1 == found.step.off_by_2_plus == 0


class Limited(nn.Module):
    """A value that is filled, and one without its negative part; both are read as they were as well."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        y = self.first(x)
        return self.last(y + y.relu() + y.masked_fill(y < 0.1, 0.3) * y.sigmoid().relu())


def test_limited_values_that_others_read_unlimited(tmp_path):
    needs_litert()
    torch.manual_seed(0)
    model, x = Limited().eval(), torch.randn(64, 4)
    gm = calibrate(prepare_by_platform(model, "LiteRT", example_inputs=(x,)), (x,))
    certificate = export_tflite(gm, x, tmp_path / "model.tflite").certificate
    assert certificate.passed
    names = {tensor.name for tensor in certificate.kernels["default"].tensors}
    assert {"relu", "masked_fill", "relu_1"} <= names


class Attending(nn.Module):
    """Attention with a mask that is an input."""

    def __init__(self):
        super().__init__()
        self.projected, self.out = nn.Linear(8, 24), nn.Linear(8, 4)

    def forward(self, x, mask):
        heads = [part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.projected(x).chunk(3, -1)]
        return self.out(F.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("kind", ["booleans", "floats"])
def test_a_query_without_a_key_gets_zero_from_a_file_that_was_exported_without_one(kind, tmp_path):
    needs_litert()
    x, mask = torch.randn(2, 5, 8), torch.ones(2, 1, 5, 5, dtype=torch.bool)
    mask[..., 4:] = False
    closed = mask.clone()
    closed[1, :, 3] = False
    if kind == "floats":
        mask, closed = (torch.zeros(m.shape).masked_fill(~m, float("-inf")) for m in (mask, closed))
    gm = calibrate(prepare_by_platform(Attending().eval(), "LiteRT", example_inputs=(x, mask)), (x, mask))
    report = export_tflite(gm, (x, mask), tmp_path / "m.tflite")
    step = gm.out_act_fake_quant.qparams()[0].item()
    with torch.no_grad():
        for given in (mask, closed):
            [found] = run_tflite(report.tflite_path.read_bytes(), [x.numpy(), given.numpy()])
            np.testing.assert_allclose(found, gm(x, given).numpy(), atol=1.01 * step)


def test_a_module_that_writes_to_the_data_of_its_weight(tmp_path):
    needs_litert()

    class Constrained(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x):
            self.lin.weight.data.clamp_(-0.2, 0.2)
            return self.lin(x)

    x = torch.randn(3, 4)
    gm = prepare_by_platform(
        nn.Sequential(Constrained(), nn.ReLU(), nn.Linear(4, 2)).eval(), "LiteRT", example_inputs=x
    )
    assert "0" in [leaf.path for leaf in gm.quant_report.leaves]
    calibrate(gm, (x,))
    assert export_tflite(gm, (x,), tmp_path / "model.tflite").certificate.passed

"""The form of a model that LiteRT's converter takes, and the schemes that are refused."""

import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models.convnext import CNBlockConfig, ConvNeXt

from fxqat import export_tflite, prepare_by_platform
from fxqat.errors import ExportError
from fxqat.litert_conversion import check_schemes, litert_versions
from fxqat.quantization.lower import lower
from fxqat.scheme import QuantizedTensor, QuantizeScheme
from fxqat.tflite.flatbuffer import graph_of, operators, quantization_of, read_model
from fxqat.tflite.run_tflite import run_tflite
from tests.litert_models import converted, needs_litert, small
from tests.models import calibrate, calibrated


@pytest.mark.parametrize(
    ("backend", "kind", "scheme"),
    [("ONNXRuntime", "activation", "uint8 asym per-tensor"), ("QNN_A16", "activation", "uint16 asym per-tensor")],
)
def test_a_scheme_that_litert_lacks_is_refused_with_the_remedy(backend, kind, scheme):
    tensors = lower(calibrated("conv_bn_relu", backend), "float", 21).tensors.values()
    with pytest.raises(ExportError, match=f"LiteRT has no {kind} of the scheme {scheme}") as caught:
        check_schemes(tensors)
    assert "backend 'LiteRT'" in str(caught.value)


def test_a_weight_in_blocks_is_refused():
    scheme = QuantizeScheme(8, per_channel=True, block_size=4)
    weight = QuantizedTensor("fc.weight", "weight", "fc", "int8", scheme, 1, (1.0, 2.0), (0, 0))
    check_schemes([replace(weight, scheme=replace(scheme, block_size=None))])
    with pytest.raises(ExportError, match=r"fc.weight: LiteRT has no weight .* in blocks of 4.* without blocks"):
        check_schemes([weight])


@pytest.mark.parametrize("backend", ["TSQAT", "LiteRT"])
def test_int8_is_taken(backend):
    tensors = lower(calibrated("conv_bn_relu", backend), "float").tensors.values()
    check_schemes(tensors)
    assert {tensor.kind for tensor in tensors} == {"activation", "weight", "bias"}


@pytest.mark.parametrize("package", ["litert_torch", "ai_edge_litert"])
def test_a_missing_package_names_the_extra(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ExportError, match="the extra 'litert'") as caught:
        litert_versions()
    assert 'pip install "fxqat[litert]"' in str(caught.value)


def test_every_operator_of_the_file_computes_with_integers():
    needs_litert()
    model = read_model(converted())
    names = [operator.name for operator in operators(model)]
    assert [operator.name for operator in operators(model) if operator.is_float] == []
    assert [names.count(n) for n in ("CONV_2D", "DEPTHWISE_CONV_2D", "LOGISTIC", "MEAN", "SOFTMAX")] == [2, 1, 1, 1, 1]
    assert names.count("QUANTIZE") == names.count("DEQUANTIZE") == 0


def test_weights_and_biases_are_those_of_the_lowered_model():
    needs_litert()
    gm, _ = small()
    lowered = lower(gm)  # weights as integers
    stored = {
        r.name: lowered.module.get_submodule(path) for path, r in lowered.tensors.items() if r.kind != "activation"
    }
    model = read_model(converted())
    graph, found = graph_of(model), {}
    layers = [o for o in operators(model) if o.name in ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED")]
    for layer, name in zip(layers, ("stem", "depthwise", "point", "fc"), strict=True):
        for index, kind in zip(layer.inputs[1:], ("weight", "bias"), strict=True):
            tensor, expected = graph.tensors[index], stored[f"{name}.{kind}"]
            integers = expected.integers.numpy()
            data = model.buffers[tensor.buffer].data.view(integers.dtype)
            if integers.ndim == 4:
                integers = integers.transpose((1, 2, 3, 0) if name == "depthwise" else (0, 2, 3, 1))
            found[f"{name}.{kind}"] = np.array_equal(data, integers.ravel())
            scale, zero_point = quantization_of(tensor)
            np.testing.assert_allclose(scale, expected.scale.numpy().ravel(), rtol=1e-6)
            assert not zero_point.any()
    assert found == dict.fromkeys(stored, True)
    assert torch.equal(stored["fc.weight"].zero_point, torch.zeros(6, dtype=torch.int8))


def test_a_value_that_is_read_in_two_layouts_is_right_in_both(tmp_path):
    needs_litert()
    torch.manual_seed(0)
    x = torch.randn(1, 3, 32, 32)
    model = ConvNeXt([CNBlockConfig(8, None, 2)], layer_scale=1.0, num_classes=10).eval()
    gm = prepare_by_platform(model, "LiteRT", example_inputs=(x,), check="off")
    report = export_tflite(calibrate(gm, (x,)), (x,), tmp_path / "model.tflite")
    assert report.certificate.passed


class Reduced(torch.nn.Module):
    """Two convolutions, and between them what the converter or a kernel of LiteRT gets wrong if it is left to them."""

    def __init__(self, between):
        super().__init__()
        self.first, self.between, self.last = torch.nn.Conv2d(3, 8, 1), between, torch.nn.Conv2d(8, 4, 1)

    def forward(self, x):
        return self.last(self.between(self.first(x)))


@pytest.mark.parametrize(
    ("between", "in_float"),
    [
        (lambda y: y.relu() * y.sum(-1, keepdim=True), {"SUM"}),
        (lambda y: y + y.mean((2, 3), keepdim=True).expand(-1, -1, 6, 5), set()),
        (lambda y: torch.nn.functional.normalize(y.flatten(2), dim=-1).view_as(y), set()),
        (lambda y: torch.relu(sum([y, y.sigmoid()])), set()),
    ],
    ids=["sum", "expand", "normalize", "sum-of-a-list"],
)
def test_the_file_computes_what_the_model_computes(between, in_float, tmp_path):
    needs_litert()
    torch.manual_seed(0)
    x = torch.randn(1, 3, 6, 5)
    gm = prepare_by_platform(Reduced(between), "LiteRT", example_inputs=(x,))
    report = export_tflite(calibrate(gm, (x,)), (x,), tmp_path / "model.tflite")
    assert report.certificate.passed
    assert set(report.float_operators) - {"TRANSPOSE"} == in_float


FLOATS = (
    *(F.elu, F.celu, F.mish, F.softplus, F.hardshrink, F.hardtanh, F.logsigmoid, lambda y: F.normalize(y, dim=1)),
    *(lambda y: y.clamp(-0.5, 0.7), lambda y: y.clamp(min=0.3), lambda y: F.threshold(y, 0.1, -0.2)),
)


class Activations(nn.Module):
    """Functions of one value, each before a layer of its own; ``reshaped`` moves what they read."""

    def __init__(self, functions, reshaped=False):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 1)
        self.last = nn.ModuleList(nn.Conv2d(4, 2, 1) for _ in functions)
        self.functions, self.reshaped = functions, reshaped

    def forward(self, x):
        y = self.first(x)
        y = y.flip(3) if self.reshaped else y
        return [layer(function(y)) for layer, function in zip(self.last, self.functions, strict=True)]


def exported(model, path):
    """The report of the model on LiteRT, on random inputs."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 6, 6) * 3
    gm = calibrate(prepare_by_platform(model.eval(), "LiteRT", example_inputs=(x,)), (x,))
    return export_tflite(gm, (x,), path)


@pytest.mark.parametrize("reshaped", [False, True])
def test_what_litert_computes_in_float_is_rounded_once(reshaped, tmp_path):
    """Without barriers the converter selects, compares and clamps integers, at the scale of what is read."""
    needs_litert()
    report = exported(Activations(FLOATS, reshaped), tmp_path / "a.tflite")
    assert report.certificate.passed
    assert report.float_operators["SELECT"] >= 3
    assert {"EXP", "RELU_N1_TO_1", "MAXIMUM", "MINIMUM"} <= set(report.float_operators)


def test_a_leaky_relu_is_a_maximum_of_integers(tmp_path):
    """The kernels of LEAKY_RELU are off by one in 5 to 13 % of such values."""
    needs_litert()
    slopes = (0.01, 0.1, 0.2, 0.3)
    model = Activations([partial(F.leaky_relu, negative_slope=slope) for slope in slopes])
    report = exported(model, tmp_path / "a.tflite")
    assert report.certificate.passed
    assert report.float_operators == {}
    names = [operator.name for operator in operators(read_model((tmp_path / "a.tflite").read_bytes()))]
    assert (names.count("MUL"), names.count("MAXIMUM"), names.count("LEAKY_RELU")) == (4, 4, 0)


class Sequences(nn.Module):
    """An LSTM of samples of several lengths; ``total`` is whether it always gives all steps."""

    def __init__(self, total):
        super().__init__()
        self.rnn, self.last, self.total = nn.LSTM(8, 8, bidirectional=True), nn.Linear(16, 4), total

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
        y, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], total_length=x.size(0) if self.total else None)
        return self.last(y)


@pytest.mark.parametrize("total", [True, False])
def test_samples_of_several_lengths(total, tmp_path):
    needs_litert()
    inputs = (torch.randn(5, 3, 8), torch.tensor([5, 2, 3]))
    gm = calibrate(prepare_by_platform(Sequences(total).eval(), "LiteRT", example_inputs=inputs), inputs)
    if not total:
        with pytest.raises(ExportError, match="Give it total_length, such as x.size"):
            export_tflite(gm, inputs, tmp_path / "a.tflite")
        assert list(tmp_path.iterdir()) == []
        return
    report = export_tflite(gm, inputs, tmp_path / "a.tflite")
    step = gm.last_act_fake_quant.qparams()[0].item()
    with torch.no_grad():
        for lengths in ([5, 2, 3], [1, 1, 4], [2, 2, 2]):
            (found,) = run_tflite(report.tflite_path.read_bytes(), [inputs[0].numpy(), np.array(lengths, np.int32)])
            np.testing.assert_allclose(found, gm(inputs[0], torch.tensor(lengths)).numpy(), atol=1.01 * step)

"""ONNX Runtime at its default optimization level computes the integers of the fake-quant model, on integer kernels."""

from collections import Counter

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn

from fxqat import convert_export, numerics, prepare_by_platform
from fxqat.custom_quantizer.backends.onnxruntime import ONNXRUNTIME
from fxqat.custom_quantizer.backends.tsqat import TSQAT
from fxqat.onnx.ort_runs import sums_saturate
from fxqat.scheme import QuantizeScheme
from tests.custom_quantizer.backends.all_pairs import all_pairs
from tests.models import EVERY_LAYER, calibrate


def optimized_run(model, inputs, folder):
    """The first output at the default optimization level, and how often each op is in the optimized graph."""
    options = ort.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(folder / "optimized.onnx"), 3
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    found = session.run(None, dict(zip((i.name for i in session.get_inputs()), inputs, strict=True)))[0]
    return found, Counter(node.op_type for node in onnx.load(folder / "optimized.onnx").graph.node)


def wrong_sums(scales, zero_points, folder, op="Add"):
    """How many of the sums, or products, of all pairs of integers are not those of the fake-quant."""
    model, inputs, expected = all_pairs(op, scales, zero_points)
    found, ops = optimized_run(model, inputs, folder)
    assert ops[f"QLinear{op}"] == 1
    return int((found != expected).sum())


def test_sums_are_exact_with_even_zero_points_and_scales_of_many_bits(tmp_path):
    """An odd zero point rounds exact halves the other way, and so does the factor of a scale of few bits."""
    assert wrong_sums((1.0, 1.0, 2.0), (127, 64, 127), tmp_path) > 30_000
    assert wrong_sums((1.0, 1.0, 2.0), (127, 64, 128), tmp_path) == 0
    assert wrong_sums((2**-4, 3 * 2**-6, 3 * 2**-5), (128, 64, 128), tmp_path) > 100


@pytest.mark.parametrize("spec", [ONNXRUNTIME, TSQAT], ids=lambda spec: spec.name)
def test_sums_on_the_scales_of_a_table_are_exact(spec, tmp_path):
    activation, rule = spec.activation.scheme, spec.rules["add"]
    random = np.random.default_rng(0)
    for _ in range(20):
        a, b, o = (torch.tensor(value) for value in (*random.uniform(0.5, 2, 2), random.uniform(2, 3)))
        few = [numerics.valid_scale(value, activation.scale_bits).item() for value in (a, b)]
        many = numerics.valid_scale(o, rule.scale_bits).item()
        even = 2 * random.integers(30, 98, 3)
        zero_points = [128] * 3 if activation.symmetric else even  # as runtime="onnxruntime" stores int8
        assert wrong_sums((*few, many), zero_points, tmp_path) <= 0.0005 * 256**2


def test_products_on_the_scales_of_the_table_are_exact(tmp_path):
    few, many = ONNXRUNTIME.activation.scheme.scale_bits, ONNXRUNTIME.rules["mul"].scale_bits
    random = np.random.default_rng(0)
    for _ in range(20):
        a, b, o = (torch.tensor(value) for value in (*random.uniform(0.02, 0.05, 2), random.uniform(0.05, 0.1)))
        scales = [numerics.valid_scale(s, bits).item() for s, bits in ((a, few), (b, few), (o, many))]
        assert wrong_sums(scales, 2 * random.integers(0, 127, 3), tmp_path, "Mul") <= 0.0005 * 256**2


class Gated(nn.Module):
    """SiLU between convolutions, a squeeze-excite block, and a sum."""

    def __init__(self):
        super().__init__()
        self.stem, self.mid = (nn.Sequential(nn.Conv2d(i, 8, 3, padding=1), nn.SiLU()) for i in (3, 8))
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 4, 1), nn.SiLU(), nn.Conv2d(4, 8, 1))
        self.last = nn.Conv2d(8, 8, 1)

    def forward(self, x):
        x = self.stem(x)
        y = self.mid(x)
        return self.last(y * torch.sigmoid(self.squeeze(y)) + x)


def test_silu_and_its_convolutions_run_on_integers(tmp_path):
    """With the ``least_work`` of the table."""
    torch.manual_seed(0)
    x = torch.randn(4, 3, 8, 8)
    gm = calibrate(prepare_by_platform(Gated().eval(), "ONNXRuntime", example_inputs=(x,)), (x,))
    convert_export(gm, (x,), tmp_path / "model.onnx", verify=False)
    found, ops = optimized_run(str(tmp_path / "model.onnx"), (x.numpy(),), tmp_path)
    integer = [ops[f"QLinear{name}"] for name in ("Conv", "Sigmoid", "Mul", "Add", "GlobalAveragePool")]
    assert integer == [5, 4, 4, 1, 1]
    assert ops["Conv"] == ops["Sigmoid"] == ops["Mul"] == ops["QuickGelu"] == ops["ReduceMean"] == 0
    expected = gm(x).detach().numpy()
    assert np.mean(found != expected) < 0.01
    np.testing.assert_allclose(found, expected, atol=0.02 * np.abs(expected).max())


class Inception(nn.Module):
    """Branches that end in a ReLU, joined with each other and with values that can be negative, and a sum."""

    def __init__(self):
        super().__init__()
        self.stem, self.a, self.b = (self.block(i, 8) for i in (3, 8, 8))
        self.signed = nn.Conv2d(8, 8, 1)
        self.dense, self.more, self.last = (self.block(i, 8) for i in (24, 32, 48))

    def block(self, inputs, outputs):
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())

    def forward(self, x):
        x = self.stem(x)
        y = torch.cat([self.a(x), self.b(x), self.signed(nn.functional.max_pool2d(x, 3, 1, 1))], 1)
        y = torch.cat([y, self.dense(y)], 1)
        y = torch.cat([y, self.more(y), x + self.signed(x)], 1)
        return self.last(y)


@pytest.mark.parametrize(("backend", "runtime"), [("ONNXRuntime", None), ("TSQAT", "onnxruntime")])
def test_every_convolution_beside_concat_and_add_runs_on_integers(backend, runtime, tmp_path):
    torch.manual_seed(0)
    x = torch.randn(4, 3, 8, 8)
    gm = calibrate(prepare_by_platform(Inception().eval(), backend, EVERY_LAYER, example_inputs=(x,)), (x,))
    convert_export(gm, (x,), tmp_path / "model.onnx", verify=False, runtime=runtime)
    found, ops = optimized_run(str(tmp_path / "model.onnx"), (x.numpy(),), tmp_path)
    assert (ops["QLinearConv"], ops["QLinearConcat"], ops["QLinearAdd"]) == (8, 3, 1)
    assert ops["Conv"] == ops["FusedConv"] == ops["Relu"] == 0
    if not sums_saturate():
        np.testing.assert_array_equal(found, gm(x).detach().numpy())


def test_a_convolution_whose_relu6_ends_between_integers_runs_on_integers(tmp_path):
    """As with power-of-two scales: the range 8 is larger than 6. ONNX Runtime keeps such a Clip in float."""
    torch.manual_seed(0)
    x = 8 * torch.randn(4, 3, 8, 8)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU6(), nn.Conv2d(8, 8, 3), nn.ReLU6())
    config = {**EVERY_LAYER, "extra_qconfig_dict": {"a_qscheme": {"pot_scale": True}}}
    gm = calibrate(prepare_by_platform(model.eval(), "ONNXRuntime", config, example_inputs=(x,)), (x,))
    assert convert_export(gm, (x,), tmp_path / "model.onnx").runtime == "onnxruntime"
    found, ops = optimized_run(str(tmp_path / "model.onnx"), (x.numpy(),), tmp_path)
    assert (ops["QLinearConv"], ops["Conv"], ops["FusedConv"]) == (2, 0, 0)
    np.testing.assert_array_equal(found, gm(x).detach().numpy())


@pytest.mark.parametrize(
    ("scheme", "legal"),
    [({}, True), ({"signed": True}, True), ({"bit_width": 7}, False), ({"bit_width": 16}, False)],
)
def test_activations_have_the_width_of_the_integer_kernels(scheme, legal):
    asked = QuantizeScheme(**{"signed": False, "symmetric": False, "even_zero_point": True} | scheme)
    assert ONNXRUNTIME.takes("activation", asked) is legal

"""The range of a value ends where the ops that read it are flat, and only there."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxqat import calibrate, convert_export, enable_quantization, prepare_by_platform
from fxqat.custom_quantizer.flat_reads import EXACT, GRID, SMOOTH, flat_outside_of
from fxqat.fake_quantize.state import named_fake_quants
from fxqat.scheme import QuantizeScheme
from fxqat.tools import profile
from tests.models import EVERY_LAYER

FUNCTIONS = {"sigmoid": torch.sigmoid, "tanh": torch.tanh} | {
    name: getattr(F, name) for name in ("silu", "gelu", "mish", "hardswish", "hardsigmoid")
}


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("name", [*EXACT, *SMOOTH])
def test_outside_an_op_is_as_good_as_constant_and_inside_it_is_not(name, bits):
    far, half_step = torch.linspace(0, 30, 3001, dtype=torch.float64), 2.0 ** -(bits + 1)
    for end in flat_outside_of(name, bits):
        if math.isinf(end):
            continue
        values = FUNCTIONS[name](end + math.copysign(1, end) * far)
        assert (values - values[-1]).abs().max() <= (0 if name in EXACT else 1.1 * half_step)
        inside = FUNCTIONS[name](torch.tensor(end - math.copysign(2 * GRID, end), dtype=torch.float64))
        assert abs(inside - values[-1]) > (0 if name in EXACT else half_step)


def test_ops_that_are_flat_nowhere_have_no_range():
    assert flat_outside_of("relu", 8) is None
    assert flat_outside_of("conv2d", 8) is None


class Reads(nn.Module):
    """A convolution whose result some function reads."""

    def __init__(self, function):
        super().__init__()
        self.conv, self.function = nn.Conv2d(3, 4, 1), function

    def forward(self, x):
        return self.function(self.conv(x))


def range_of(function, backend):
    """The range that the result of the convolution has after calibration with values down to -50."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 16, 16) * torch.linspace(0, 20, 16)
    gm = prepare_by_platform(Reads(function), backend, EVERY_LAYER, example_inputs=(x,))
    calibrate(gm, [x], progress=False)
    quant = dict(named_fake_quants(gm))["conv_act_fake_quant"]
    scale, zero_point = (value.item() for value in quant.qparams())
    scheme = quant.scheme
    return scale * (scheme.quant_min - zero_point), scale * (scheme.quant_max - zero_point)


@pytest.mark.parametrize(
    ("function", "backend", "low", "high"),
    [
        (F.silu, "ONNXRuntime", -6.75, None),
        (lambda x: x * torch.sigmoid(x), "ONNXRuntime", -6.75, None),
        (lambda x: F.hardsigmoid(x) * x, "ONNXRuntime", -3.5, None),
        (lambda x: x * torch.tanh(x), "ONNXRuntime", None, None),
        (F.silu, "LiteRT", -6.75, None),
        (F.silu, "QNN", -8.4, None),
        (F.hardswish, "LiteRT", -3, None),
        (lambda x: (F.hardswish(x), F.silu(x.view(x.shape))), "QNN", None, None),
        (lambda x: (F.hardswish(x), torch.sigmoid(x) * x.shape[1]), "QNN", -6.3, None),
        (lambda x: torch.sigmoid(x), "ONNXRuntime", -6.3, 6.3),
        (lambda x: (x, torch.sigmoid(x)), "ONNXRuntime", None, None),
        (lambda x: x * torch.sigmoid(x + 1), "ONNXRuntime", None, None),
        (lambda x: torch.cat([torch.sigmoid(x), x], 1), "ONNXRuntime", None, None),
        (lambda x: torch.sigmoid(x).masked_fill(x > 10, 0.0), "ONNXRuntime", -6.3, 6.3),  # > reads the float value
    ],
)
def test_the_range_ends_where_every_reader_is_flat(function, backend, low, high):
    lowest, highest = range_of(function, backend)
    assert lowest < 0 < highest
    for found, end in ((lowest, low), (highest, high)):
        assert abs(found) > 20 if end is None else abs(end) - 0.3 <= abs(found) < 1.07 * abs(end)


def test_a_gate_that_stays_float_is_not_rounded_to_zero():
    """Then the product is that of SiLU also where a quantized sigmoid would be 0."""
    x = torch.randn(2, 3, 16, 16) * 20
    override = {"overrides": [{"match": {"function": "sigmoid"}, "output": None}]}
    gm = prepare_by_platform(Reads(lambda x: x * torch.sigmoid(x)), "ONNXRuntime", override, example_inputs=(x,))
    found = dict(named_fake_quants(gm))
    assert "sigmoid_act_fake_quant" not in found
    assert found["conv_act_fake_quant"].scheme.flat_outside == flat_outside_of("silu", 8)


@pytest.mark.parametrize("seed", range(7))
@pytest.mark.parametrize("backend", ["ONNXRuntime", "LiteRT"])
def test_far_below_zero_a_split_silu_is_zero(backend, seed):
    """However the range is rounded, its lowest step closes the gate."""
    torch.manual_seed(seed)
    x = torch.randn(2, 3, 16, 16) * (0.5 + seed)
    model = Reads(F.silu).eval()
    with torch.no_grad():
        model.conv.bias[0] = -60.0
    gm = prepare_by_platform(model, backend, EVERY_LAYER, example_inputs=(x,), is_qat=False)
    calibrate(gm, [x], progress=False)
    enable_quantization(gm)
    assert (gm(x)[:, 0] == 0).all()
    assert gm(x)[:, 1].max() > 0


def test_silu_keeps_its_accuracy_beside_large_negative_values(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 16, 16)
    model = Reads(F.silu).eval()
    with torch.no_grad():
        model.conv.bias[0] = -60.0
    gm = prepare_by_platform(model, "ONNXRuntime", EVERY_LAYER, example_inputs=(x,), is_qat=False)
    calibrate(gm, [x], progress=False)
    enable_quantization(gm)
    error = (gm(x) - model(x)).square().mean().sqrt()
    assert error < 0.012  # 0.036 without it
    (own,) = [tensor.own.sqnr for tensor in profile(gm, [x], progress=False).tensors if tensor.name == "conv"]
    assert own > 30  # what SiLU does not tell apart is no error; 1 dB otherwise
    assert convert_export(gm, (x,), tmp_path / "model.onnx").certificate.passed


def test_the_integers_of_a_scheme_do_not_depend_on_it():
    """A checkpoint that was saved without it loads."""
    assert QuantizeScheme(flat_outside=(-8.0, math.inf)) == QuantizeScheme()
    assert QuantizeScheme(flat_outside=(-8.0, math.inf)) != QuantizeScheme(4)

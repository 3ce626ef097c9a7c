"""ONNX Runtime at its default optimization level computes the integers of the fake-quant model, on integer kernels."""

from collections import Counter

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from fxqat import convert_export, numerics, prepare_by_platform
from fxqat.custom_quantizer.backends.onnxruntime import ONNXRUNTIME
from fxqat.scheme import QuantizeScheme
from tests.models import EVERY_LAYER, calibrate

SHAPE = (256, 256)


def sum_model(schemes):
    """``o = Q/DQ(Q/DQ(a) + Q/DQ(b))`` of uint8, each with its scale and zero point."""
    tensors, nodes = [], []
    for name, source in (("a", "x"), ("b", "y"), ("o", "sum")):
        scale, zero_point = schemes[name]
        tensors += [
            numpy_helper.from_array(np.float32(scale), f"{name}_scale"),
            numpy_helper.from_array(np.uint8(zero_point), f"{name}_zero_point"),
        ]
        parameters = [f"{name}_scale", f"{name}_zero_point"]
        if name == "o":
            nodes.append(helper.make_node("Add", ["a", "b"], ["sum"]))
        nodes.append(helper.make_node("QuantizeLinear", [source, *parameters], [f"{name}_quantized"]))
        nodes.append(helper.make_node("DequantizeLinear", [f"{name}_quantized", *parameters], [name]))
    inputs, output = (
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, SHAPE) for name in names] for names in ("xy", "o")
    )
    graph = helper.make_graph(nodes, "sum", inputs, output, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def optimized_run(model, inputs, folder):
    """The first output at the default optimization level, and how often each op is in the optimized graph."""
    options = ort.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(folder / "optimized.onnx"), 3
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    found = session.run(None, dict(zip((i.name for i in session.get_inputs()), inputs, strict=True)))[0]
    return found, Counter(node.op_type for node in onnx.load(folder / "optimized.onnx").graph.node)


def wrong_sums(scales, zero_points, folder):
    """How many of the sums of all pairs of integers are not those of the fake-quant."""
    schemes = dict(zip("abo", zip(scales, zero_points, strict=True), strict=True))
    integers = np.meshgrid(np.arange(256), np.arange(256))
    a, b = (((q - z) * s).astype(np.float32) for q, (s, z) in zip(integers, schemes.values(), strict=False))
    found, ops = optimized_run(sum_model(schemes).SerializeToString(), (a, b), folder)
    assert ops["QLinearAdd"] == 1
    scale, zero_point = (torch.tensor(float(value)) for value in schemes["o"])
    expected = numerics.fake_quantize(torch.from_numpy(a + b), scale, zero_point, 0, 255).numpy()
    return int((found != expected).sum())


def test_sums_are_exact_with_even_zero_points_and_scales_of_many_bits(tmp_path):
    """An odd zero point rounds exact halves the other way, and so does the factor of a scale of few bits."""
    assert wrong_sums((1.0, 1.0, 2.0), (127, 64, 127), tmp_path) > 30_000
    assert wrong_sums((1.0, 1.0, 2.0), (127, 64, 128), tmp_path) == 0
    assert wrong_sums((2**-4, 3 * 2**-6, 3 * 2**-5), (128, 64, 128), tmp_path) > 100
    rule, activation = ONNXRUNTIME.rules["add"], ONNXRUNTIME.activation.scheme
    random = np.random.default_rng(0)
    for _ in range(20):
        a, b, o = (torch.tensor(value) for value in (*random.uniform(0.5, 2, 2), random.uniform(2, 3)))
        few = [numerics.valid_scale(value, activation.scale_bits).item() for value in (a, b)]
        many = numerics.valid_scale(o, rule.scale_bits).item()
        assert wrong_sums((*few, many), 2 * random.integers(30, 98, 3), tmp_path) == 0


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


def test_every_convolution_beside_concat_and_add_runs_on_integers(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(4, 3, 8, 8)
    gm = calibrate(prepare_by_platform(Inception().eval(), "ONNXRuntime", EVERY_LAYER, example_inputs=(x,)), (x,))
    convert_export(gm, (x,), tmp_path / "model.onnx", verify=False)
    found, ops = optimized_run(str(tmp_path / "model.onnx"), (x.numpy(),), tmp_path)
    assert (ops["QLinearConv"], ops["QLinearConcat"], ops["QLinearAdd"]) == (8, 3, 1)
    assert ops["Conv"] == ops["FusedConv"] == ops["Relu"] == 0
    np.testing.assert_array_equal(found, gm(x).detach().numpy())


@pytest.mark.parametrize(
    ("scheme", "legal"),
    [({}, True), ({"signed": True}, True), ({"bit_width": 7}, False), ({"bit_width": 16}, False)],
)
def test_activations_have_the_width_of_the_integer_kernels(scheme, legal):
    asked = QuantizeScheme(**{"signed": False, "symmetric": False, "even_zero_point": True} | scheme)
    assert ONNXRUNTIME.takes("activation", asked) is legal

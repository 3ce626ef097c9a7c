"""OpenVINO computes the integers of the fake-quant model. Skipped where the package openvino is not installed."""

from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest
import torch
from torch import nn

from fxqat import convert_export, numerics, prepare_by_platform
from fxqat.custom_quantizer.backends.openvino import OPENVINO
from tests.custom_quantizer.backends.all_pairs import all_pairs
from tests.export_models import needs_exact_sums
from tests.models import EVERY_LAYER, calibrate

openvino = pytest.importorskip("openvino")

F32 = {"INFERENCE_PRECISION_HINT": "f32"}


class Residual(nn.Module):
    """Two residual sums of what layers compute, and a join with results of a ReLU."""

    def __init__(self):
        super().__init__()
        self.stem, self.first, self.second = (nn.Conv2d(i, 8, 3, padding=1) for i in (3, 8, 8))
        self.last = nn.Conv2d(16, 4, 1)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.first(x)
        return self.last(torch.cat([x, self.second(x).relu()], 1))


@pytest.mark.parametrize("seed", range(3))
def test_residual_sums_and_joins_are_those_of_the_fake_quant_model(seed, tmp_path):
    needs_exact_sums()
    torch.manual_seed(seed)
    model, x = Residual().eval(), torch.randn(4, 3, 16, 16)
    gm = calibrate(prepare_by_platform(model, "OpenVINO", EVERY_LAYER, example_inputs=(x,)), (x,))
    convert_export(gm, (x,), tmp_path / "model.onnx", verify=False)
    compiled = openvino.Core().compile_model(str(tmp_path / "model.onnx"), "CPU", F32)
    found, expected = compiled([x.numpy()])[0], gm(x).detach().numpy()
    off = np.abs(found - expected) > 1e-5
    assert off.mean() < 0.005  # before even zero points and unrounded branches: a quarter or more
    operations = [operation.get_rt_info() for operation in compiled.get_runtime_model().get_ordered_ops()]
    convolutions = [info for info in operations if info["layerType"].astype(str) == "Convolution"]
    assert [info["runtimePrecision"].astype(str) for info in convolutions] == ["u8"] * 4


def test_products_on_the_scales_of_the_table_are_exact():
    """With scales of few bits OpenVINO rounds up to 0.09 % of all products to another integer."""
    random, few, many = (
        np.random.default_rng(1),
        OPENVINO.activation.scheme.scale_bits,
        OPENVINO.rules["mul"].scale_bits,
    )

    def scale(value, bits):
        return numerics.valid_scale(torch.tensor(value), bits).item()

    core = openvino.Core()
    for _ in range(10):
        a, b = (scale(value, few) for value in random.uniform(0.5, 2, 2))
        o = scale(a * b * random.uniform(20, 100), many)
        model, inputs, expected = all_pairs("Mul", (a, b, o), (128, 128, 128))
        found = core.compile_model(core.read_model(model), "CPU", F32)(inputs)[0]
        assert expected.size == 256**2
        assert (found != expected).mean() <= 0.0005


class Attention(nn.Module):
    """Attention with its products written out."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x):
        q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        weights = torch.matmul(q * 8**-0.5, k.transpose(-2, -1)).softmax(-1)
        return self.out(torch.matmul(weights, v).transpose(1, 2).reshape(x.shape))


@pytest.mark.parametrize(("symmetric", "precision"), [(True, "i8"), (False, "f32")])
def test_products_of_activations_run_on_symmetric_integers(symmetric, precision, tmp_path):
    needs_exact_sums()
    rules = OPENVINO.rules | {"matmul": replace(OPENVINO.rules["matmul"], symmetric=symmetric)}
    table = replace(OPENVINO, rules=MappingProxyType(rules))
    torch.manual_seed(0)
    x = torch.randn(2, 64, 32)
    gm = calibrate(prepare_by_platform(Attention().eval(), table, EVERY_LAYER, example_inputs=(x,)), (x,))
    convert_export(gm, (x,), tmp_path / "model.onnx", verify=False, runtime="openvino")
    compiled = openvino.Core().compile_model(str(tmp_path / "model.onnx"), "CPU", F32)
    found, expected = compiled([x.numpy()])[0], gm(x).detach().numpy()
    assert (np.abs(found - expected) > 1e-5).mean() < 0.005
    operations = [operation.get_rt_info() for operation in compiled.get_runtime_model().get_ordered_ops()]
    products = [
        info for info in operations if "node_matmul" in info["originalLayersNames"].astype(str)
    ]  # or one for both
    assert {info["runtimePrecision"].astype(str) for info in products} == {precision}

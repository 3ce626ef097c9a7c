"""Values that are quantized at run time: the simulation, the file and what ONNX Runtime makes of it."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

import fxqat
from fxqat.errors import CalibrationError
from fxqat.numerics import dynamic_quantize
from tests.export_models import constants, needs_exact_sums, node_types, run_file


class Mixed(nn.Module):
    """Two readers of one value, a product without bias, a convolution and a lookup."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 8)
        self.query = nn.Linear(8, 8)
        self.key = nn.Linear(8, 8, bias=False)
        self.conv = nn.Conv1d(8, 4, 3, padding=1)
        self.product = nn.Parameter(torch.randn(8, 3))

    def forward(self, ids, x):
        x = self.table(ids) + x
        y = torch.relu(self.query(x)) + self.key(x)
        return y @ self.product, self.conv(y.transpose(1, 2))


INPUTS = (torch.randint(0, 7, (2, 5)), torch.randn(2, 5, 8))


@pytest.mark.parametrize("x", [torch.randn(1000), torch.rand(1000) + 2, -torch.rand(50), torch.zeros(9), torch.ones(1)])
def test_the_integers_are_those_of_the_operator(x):
    node = helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"])
    values = [("x", TensorProto.FLOAT), ("q", TensorProto.UINT8), ("s", TensorProto.FLOAT), ("z", TensorProto.UINT8)]
    infos = [helper.make_tensor_value_info(name, kind, None) for name, kind in values]
    opset = [helper.make_opsetid("", 18)]
    model = helper.make_model(helper.make_graph([node], "g", infos[:1], infos[1:]), opset_imports=opset, ir_version=9)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for scale in (1e-3, 1.0, 777.0):
        wanted = session.run(None, {"x": (x * scale).numpy()})
        for found, value in zip(dynamic_quantize(x * scale), wanted, strict=True):
            assert np.array_equal(found.numpy(), value.astype(np.float32))


@pytest.mark.parametrize(("runtime", "dtype"), [("onnxruntime", np.int8), ("onnxruntime_avx2", np.uint8)])
def test_dynamic_needs_no_calibration_and_the_file_computes_on_integers(runtime, dtype, tmp_path):
    needs_exact_sums(runtime)
    torch.manual_seed(0)
    gm = fxqat.prepare_by_platform(Mixed(), "ONNXRuntime", {"activation": "dynamic"}, example_inputs=INPUTS)
    fxqat.enable_quantization(gm)
    report = fxqat.convert_export(gm, INPUTS, tmp_path / "m.onnx", tmp_path / "m.json", runtime=runtime)
    names = {tensor.name for tensor in report.certificate.tensors}
    assert len(names) == 4
    assert report.certificate.off_share == 0
    proto = onnx.load(tmp_path / "m.onnx")
    kinds = node_types(proto)
    assert kinds.count("MatMulInteger") == 3
    assert kinds.count("ConvInteger") == 1
    assert not {"MatMul", "Gemm", "Conv", "DequantizeLinear", "QuantizeLinear"} & set(kinds)
    stored = {name: value.dtype for name, value in constants(proto).items() if value.size > 12}
    assert stored.pop("table.weight_quantized") == np.int8
    assert set(stored.values()) == {np.dtype(dtype)}
    fxqat.load_quant_params(gm, tmp_path / "m.json")
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    ort.InferenceSession(str(tmp_path / "m.onnx"), options, providers=["CPUExecutionProvider"])
    assert "MatMulIntegerToFloat" in node_types(onnx.load(tmp_path / "optimized.onnx"))
    for found, wanted in zip(run_file(tmp_path / "m.onnx", INPUTS), gm(*INPUTS), strict=True):
        assert np.allclose(found, wanted.detach().numpy(), atol=1e-5)


def test_the_range_is_that_of_each_input_and_gradients_pass():
    torch.manual_seed(0)
    gm = fxqat.prepare_by_platform(nn.Sequential(nn.Linear(4, 3)), "ONNXRuntime", {"activation": "dynamic"})
    fxqat.enable_quantization(gm)
    layer = gm.get_submodule("0")
    weight = layer.weight_fake_quant.quantize(layer.weight)
    for size in (1e-2, 1e3):
        x = (torch.randn(5, 4) * size).requires_grad_()
        q, scale, zero_point = dynamic_quantize(x.detach())
        wanted = nn.functional.linear((q - zero_point) * scale, weight, layer.bias)
        assert torch.equal(gm(x), wanted)
        gm(x).sum().backward()
        assert torch.allclose(x.grad, weight.sum(0).expand(5, 4))
    fxqat.disable_all(gm)
    x = torch.randn(2, 4)
    assert torch.equal(gm(x), nn.functional.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize("runtime", ["onnxruntime", "onnxruntime_avx2"])
def test_one_dynamic_layer_beside_static_ones(runtime, tmp_path):
    needs_exact_sums(runtime)
    torch.manual_seed(0)
    change = {"match": {"module": "query"}, "activation": "dynamic"}
    config = {"overrides": [change], "extra_quantizer_dict": {"least_work": 0}}
    gm = fxqat.prepare_by_platform(Mixed(), "ONNXRuntime", config, example_inputs=INPUTS)
    with pytest.raises(CalibrationError, match="saw no data"):
        fxqat.enable_quantization(gm)
    fxqat.calibrate(gm, [INPUTS])
    fxqat.enable_quantization(gm)
    report = fxqat.convert_export(gm, INPUTS, tmp_path / "m.onnx", tmp_path / "m.json", runtime=runtime)
    kinds = node_types(onnx.load(tmp_path / "m.onnx"))
    assert report.certificate.passed
    assert kinds.count("DynamicQuantizeLinear") == kinds.count("MatMulInteger") == 1
    assert kinds.count("QuantizeLinear") >= 2
    again = fxqat.prepare_by_platform(Mixed(), "ONNXRuntime", config, example_inputs=INPUTS)
    fxqat.load_quant_params(again, tmp_path / "m.json")


def asymmetric_conv(per_channel):
    """A dynamic convolution whose weight has zero points, and its input."""
    scheme = {"symmetry": False, "signed": False, "per_channel": per_channel}
    config = {"activation": "dynamic", "extra_qconfig_dict": {"w_qscheme": scheme}}
    torch.manual_seed(0)
    gm = fxqat.prepare_by_platform(nn.Sequential(nn.Conv1d(8, 4, 3, padding=1)), "ONNXRuntime", config)
    fxqat.enable_quantization(gm)
    return gm, torch.randn(2, 8, 5)


def test_a_convolution_has_integer_products_if_all_channels_have_one_zero_point(tmp_path):
    gm, x = asymmetric_conv(per_channel=False)
    report = fxqat.convert_export(gm, x, tmp_path / "m.onnx", tmp_path / "m.json", weights="integer")
    assert report.certificate.passed
    file = onnx.load(tmp_path / "m.onnx")
    (product,) = (node for node in file.graph.node if node.op_type == "ConvInteger")
    assert constants(file)[product.input[3]].tolist() == [gm.get_submodule("0").weight_fake_quant.zero_point.item()]
    assert constants(file)[product.input[3]].tolist() != [0]
    assert np.allclose(run_file(tmp_path / "m.onnx", (x,))[0], gm(x).detach().numpy(), atol=1e-5)
    gm, x = asymmetric_conv(per_channel=True)
    assert fxqat.convert_export(gm, x, tmp_path / "m.onnx").certificate.passed
    assert {"Conv", "ConvInteger"} & set(node_types(onnx.load(tmp_path / "m.onnx"))) == {"Conv"}


def test_asymmetric_weights_keep_their_zero_points(tmp_path):
    torch.manual_seed(0)
    config = {"activation": "dynamic", "extra_qconfig_dict": {"w_qscheme": {"symmetry": False, "signed": False}}}
    gm = fxqat.prepare_by_platform(nn.Sequential(nn.Linear(8, 3)), "ONNXRuntime", config)
    fxqat.enable_quantization(gm)
    x = torch.randn(4, 8)
    report = fxqat.convert_export(gm, x, tmp_path / "m.onnx")
    proto = onnx.load(tmp_path / "m.onnx")
    assert [len(node.input) for node in proto.graph.node if node.op_type == "MatMulInteger"] == [4]
    assert report.certificate.passed
    assert np.allclose(run_file(tmp_path / "m.onnx", (x,))[0], gm(x).detach().numpy(), atol=1e-5)


def test_weights_only_as_a_setting_of_the_model(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(500, 32), nn.Linear(32, 500))
    x = torch.randint(0, 500, (1, 4))
    gm = fxqat.prepare_by_platform(model, "TSQAT", {"activation": "float"}, example_inputs=(x,))
    fxqat.enable_quantization(gm)
    fxqat.convert_export(gm, x, tmp_path / "m.onnx")
    floats = sum(4 * parameter.numel() for parameter in model.parameters())
    assert (tmp_path / "m.onnx").stat().st_size < 0.32 * floats
    assert "QuantizeLinear" not in node_types(onnx.load(tmp_path / "m.onnx"))
    assert np.allclose(run_file(tmp_path / "m.onnx", (x,))[0], gm(x).detach().numpy(), atol=1e-5)

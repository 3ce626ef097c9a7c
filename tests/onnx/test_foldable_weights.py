"""Weights of float layers: ONNX Runtime folds them when it loads the file, to the values of DequantizeLinear."""

import copy

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import fxqat
from fxqat.errors import ParityError
from fxqat.onnx.foldable_weights import FoldableWeights
from fxqat.onnx.name_tensors import RECORDS
from fxqat.onnx.quant_params import check_params
from fxqat.scheme import QuantizedTensor, QuantizeScheme
from tests.export_models import needs_exact_sums, node_types, run_session, session

SHAPE = (4, 6, 3, 3)


def record(scale, zero_point, axis):
    scheme = QuantizeScheme(per_channel=axis is not None)
    parameters = (tuple(scale.reshape(-1).tolist()), tuple(int(z) for z in zero_point.reshape(-1)))
    return QuantizedTensor("w", "weight", "conv", "int8", scheme, axis, *parameters)


def model_of(dtype, axis, zero, bits):
    """``y = conv(x, dq(w))`` and its record, with random integers."""
    rng = np.random.default_rng(0)
    size = () if axis is None else (SHAPE[axis],)
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    held = {
        "w_quantized": rng.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), SHAPE).astype(kind),
        "w_scale": np.exp(rng.normal(size=size)).astype(np.float32),
        "w_zero_point": np.asarray(rng.integers(-5, 5, size) if zero else np.zeros(size), kind),
    }
    nodes = [
        helper.make_node("DequantizeLinear", list(held), ["w"], **({} if axis is None else {"axis": axis})),
        helper.make_node("Conv", ["x", "w"], ["y"]),
    ]
    tensors = [helper.make_tensor(k, dtype if v.dtype == kind else 1, v.shape, v.reshape(-1)) for k, v in held.items()]
    shapes = {"x": (1, 6, 5, 5), "y": (1, 4, 3, 3)}
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items())
    graph = helper.make_graph(nodes, "g", [x], [y], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return model, record(held["w_scale"], held["w_zero_point"], axis)


def folded(model, tensor, paths=("path",)):
    work = ir.from_proto(model)
    work.meta[RECORDS] = {"path": tensor}
    return ir.to_proto(FoldableWeights(paths)(work).model)


@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize(
    ("dtype", "bits", "zero"),
    [
        (TensorProto.INT8, 8, False),
        (TensorProto.INT8, 8, True),
        (TensorProto.INT16, 16, True),
        (TensorProto.INT4, 4, True),
    ],
)
def test_the_values_are_those_of_dequantize_linear(dtype, bits, zero, axis):
    model, tensor = model_of(dtype, axis, zero, bits)
    new = folded(model, tensor)
    onnx.checker.check_model(new, full_check=True)
    assert node_types(new) == ["Cast", *["Sub"] * zero, "Mul", "Conv"]
    check_params(new, [tensor])
    for each in (model, new):
        each.graph.output.append(onnx.ValueInfoProto(name="w"))
    x = torch.randn(1, 6, 5, 5)
    before, after = (run_session(session(each), (x,)) for each in (model, new))
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


def test_only_the_named_weights_are_rewritten():
    model, tensor = model_of(TensorProto.INT8, 0, False, 8)
    assert node_types(folded(model, tensor, ("other",))) == ["DequantizeLinear", "Conv"]


def test_parameters_of_the_new_form_are_checked():
    model, tensor = model_of(TensorProto.INT8, 0, True, 8)
    new = folded(model, tensor)
    for name, change in (("w_scale", 2), ("w_zero_point", 1)):
        wrong = copy.deepcopy(new)
        (held,) = [each for each in wrong.graph.initializer if each.name == name]
        held.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(held) + np.float32(change), name))
        with pytest.raises(ParityError, match="w: the ONNX file holds other parameters"):
            check_params(wrong, [tensor])


class Light(nn.Module):
    """A shared layer, one of another type, and one without channels of its own, all in float."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Conv2d(8, 8, 1)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.fc = nn.Linear(8, 8)
        self.last = nn.Linear(8, 500)

    def forward(self, x):
        x = nn.functional.hardswish(self.up(self.shared(nn.functional.hardswish(self.shared(x)))))
        return self.last(nn.functional.hardswish(self.fc(x.mean((2, 3)))))


@pytest.mark.parametrize("backend", ["ONNXRuntime", "TSQAT"])
def test_an_exported_file_folds(backend, tmp_path):
    torch.manual_seed(0)
    rules = [
        {"match": {"module": name}, "weight": {"bit": 8}, "activation": None, "output": None}
        for name in ("shared", "up", "fc")
    ]
    config = {"optimize_for": "size"} if backend == "ONNXRuntime" else {"overrides": rules}
    x = torch.randn(2, 8, 4, 4)
    gm = fxqat.prepare_by_platform(Light().eval(), backend, config)
    fxqat.calibrate(gm, [x])
    fxqat.enable_quantization(gm)
    report = fxqat.convert_export(gm, (x,), tmp_path / "a.onnx", tmp_path / "a.json")
    assert report.certificate.passed
    assert [t.name for t in report.tensors if t.kind == "bias"] == ["last.bias"]
    file = onnx.load(tmp_path / "a.onnx")
    integers = {t.name for t in file.graph.initializer if t.data_type == TensorProto.INT8 and len(t.dims) > 1}
    assert integers == {f"{name}.weight_quantized" for name in ("shared", "up", "fc", "last")}
    held = {name for node in file.graph.node if node.op_type == "DequantizeLinear" for name in node.input}
    assert held.isdisjoint(integers - {"last.weight_quantized"}) == (backend == "ONNXRuntime")
    if backend == "ONNXRuntime":
        options = ort.SessionOptions()
        options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
        options.log_severity_level = 4
        ort.InferenceSession(file.SerializeToString(), options)
        optimized = onnx.load(tmp_path / "optimized.onnx")
        assert "DequantizeLinear" not in node_types(optimized)
        assert "QGemm" in node_types(optimized)
    fresh = fxqat.prepare_by_platform(Light(), backend, config)
    fxqat.load_quant_params(fresh, tmp_path / "a.json")
    assert torch.equal(fresh.up.weight_fake_quant.scale, gm.up.weight_fake_quant.scale)


class Words(nn.Module):
    """An embedding, a convolution and a linear layer."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.conv = nn.Conv1d(8, 8, 3)
        self.fc = nn.Linear(8, 4)

    def forward(self, words):
        return self.fc(self.conv(self.table(words).transpose(1, 2)).mean(2))


def written(tmp_path, config, opset_version):
    torch.manual_seed(0)
    words = torch.randint(0, 11, (2, 6))
    gm = fxqat.prepare_by_platform(Words().eval(), "ONNXRuntime", config)
    fxqat.calibrate(gm, [words])
    fxqat.enable_quantization(gm)
    report = fxqat.convert_export(gm, (words,), tmp_path / "a.onnx", opset_version=opset_version)
    assert report.certificate.passed
    return onnx.load(tmp_path / "a.onnx")


@pytest.mark.parametrize("opset", [17, 21, 23])
@pytest.mark.parametrize("activation", ["float", "dynamic", "static"])
def test_the_opset_does_not_change_how_weights_are_written(activation, opset, tmp_path):
    if activation == "dynamic":
        needs_exact_sums()
    config = {"activation": activation, "extra_quantizer_dict": {"least_work": 0}}
    expected = node_types(written(tmp_path, config, 18))
    found = node_types(written(tmp_path, config, opset))
    assert found == expected
    assert ("DequantizeLinear" in found) == (activation == "static")


def test_weights_of_four_bits_fold(tmp_path):
    file = written(
        tmp_path, {"activation": "float", "overrides": [{"match": {"type": "Linear"}, "weight": {"bit": 4}}]}, None
    )
    stored = {tensor.name: tensor.data_type for tensor in file.graph.initializer}
    assert stored["fc.weight_quantized"] == TensorProto.INT4
    assert "DequantizeLinear" not in node_types(file)


class Tied(nn.Module):
    """A table whose weight is that of two calls of the last layer, too."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.inner = nn.Linear(8, 8)
        self.head = nn.Linear(8, 12)
        self.head.weight = self.table.weight

    def forward(self, words):
        x = self.table(words)
        return self.head(torch.tanh(self.inner(x))) + self.head(x)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_table_in_blocks_that_is_a_weight_as_well(bits, symmetric, tmp_path):
    torch.manual_seed(0)
    words = torch.randint(0, 12, (3, 5))
    scheme = {"bit": bits, "block_size": 4, "symmetry": symmetric}
    config = {"activation": "float", "extra_qconfig_dict": {"w_qscheme": scheme}}
    gm = fxqat.prepare_by_platform(Tied().eval(), "ONNXRuntime", config, example_inputs=words)
    fxqat.enable_quantization(gm)
    report = fxqat.convert_export(gm, words, tmp_path / "a.onnx")
    assert report.certificate.passed
    file = onnx.load(tmp_path / "a.onnx")
    stored = [tensor for tensor in file.graph.initializer if tensor.name.endswith("weight_quantized")]
    assert sorted(tuple(tensor.dims) for tensor in stored) == [(8, 8), (12, 8)]
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 4
    found = ort.InferenceSession(file.SerializeToString(), options).run(None, {"words": words.numpy()})[0]
    np.testing.assert_allclose(found, gm(words).detach().numpy(), rtol=0, atol=1e-6)
    left = [node for node in onnx.load(tmp_path / "optimized.onnx").graph.node if "weight" in "".join(node.input)]
    assert {node.op_type for node in left}.isdisjoint({"Cast", "Reshape", "Mul", "Sub"})

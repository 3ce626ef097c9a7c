"""Raw inputs: the file takes uint8 images and computes what the model computes from normalized images."""

import json
from dataclasses import replace
from functools import cache

import jsonschema
import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fxqat import load_quant_params, prepare_by_platform
from fxqat.convert_export import convert_export
from fxqat.errors import ExportError
from fxqat.numerics import choose_qparams, quantize
from fxqat.onnx.quant_params import schema
from fxqat.quantization.raw_inputs import normalize_integers, parse_input_stats, raw_inputs, stats_by_name
from fxqat.scheme import QuantizeScheme
from tests.export_models import (
    calibrate,
    constants,
    node_types,
    quantized_values,
    rounded_values,
    run_file,
    run_session,
    session,
    steps_apart,
)

MEAN, STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])  # torchvision's, of values from 0 to 1
STATS = ((255 * MEAN).tolist(), (255 * STD).tolist())


def images(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 3, 12, 12), generator=generator, dtype=torch.uint8)


def preprocessed(raw):
    """ToTensor and Normalize of torchvision, in numpy's float32."""
    mean, std = (values.reshape(1, 3, 1, 1).astype(np.float32) for values in (MEAN, STD))
    return torch.from_numpy((raw.numpy().astype(np.float32) / np.float32(255) - mean) / std)


class Net(nn.Module):
    """A convolution with BatchNorm and ReLU, and a plain one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.bn = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.last = nn.Conv2d(8, 4, 3, stride=2)

    def forward(self, x):
        return self.last(F.relu(self.bn(self.conv(x))))


def model(backend="TSQAT", config=None):
    gm = prepare_by_platform(Net().eval(), backend, config)
    return calibrate(gm, (preprocessed(images(8)),))


@cache
def model_once():
    """A model that no test changes."""
    return model()


def assert_same_steps(gm, file, raw, normal, names):
    """Each quantized value of the file beside that of the model, which is named otherwise at the inputs."""
    found, (expected, outputs) = quantized_values(file, raw), rounded_values(gm, normal)
    assert set(found) >= set(names)
    for name, (value, scale) in found.items():
        steps = steps_apart(value, expected[names.get(name, name)], scale)
        assert steps.max() <= 1, name
        assert (steps > 0).mean() <= (0.005 if name in names else 0.05), name
    for a, b in zip(run_session(session(file), raw), outputs, strict=True):
        assert np.vdot(a, b) / np.linalg.norm(a) / np.linalg.norm(b) > 0.999


def assert_normalizes_integers(file):
    """Bytes go into a depthwise convolution of int8 weights and int32 biases, and nothing is computed before it."""
    (conv, *_) = [node for node in file.graph.node if node.op_type == "Conv"]
    made = {name: node for node in file.graph.node for name in node.output}
    reads = [made[name] for name in conv.input]
    assert [node.op_type for node in reads] == ["DequantizeLinear"] * 3
    assert reads[0].input[0] == file.graph.input[0].name
    held = constants(file)
    assert [held[node.input[0]].dtype for node in reads[1:]] == [np.int8, np.int32]
    assert [held[reads[0].input[place]].item() for place in (1, 2)] == [1, 0]
    assert [a.i for a in conv.attribute if a.name == "group"] == [3]
    assert not {"Cast", "Sub", "Div"} & set(node_types(file))


@pytest.mark.parametrize(("backend", "opset"), [("TSQAT", 13), ("TSQAT", 18), ("ONNXRuntime", 21)])
def test_the_file_takes_the_images_as_they_are(backend, opset, tmp_path):
    gm, path = model(backend), tmp_path / "model.onnx"
    before = rounded_values(gm, (preprocessed(images(4, 1)),))[1]
    report = convert_export(
        gm,
        images(4, 1),
        path,
        tmp_path / "model.json",
        opset_version=opset,
        input_stats=[STATS],
        input_names=["image"],
        dynamic_batch=True,
    )
    assert report.certificate.passed
    assert report.certificate.off_share < 0.005
    file = onnx.load(path)
    (image,) = file.graph.input
    assert (image.name, image.type.tensor_type.elem_type) == ("image", onnx.TensorProto.UINT8)
    assert [d.dim_value for d in image.type.tensor_type.shape.dim][1:] == [3, 12, 12]
    assert file.graph.input[0].type.tensor_type.shape.dim[0].dim_param
    assert report.warnings == ()
    assert_normalizes_integers(file)
    unseen = images(6, 2)  # another batch size
    assert_same_steps(gm, file, (unseen,), (preprocessed(unseen),), {"x_normalized": "x"})
    document = json.loads((tmp_path / "model.json").read_text())
    jsonschema.validate(document, schema())
    assert document["inputs"]["image"]["dtype"] == "uint8"
    np.testing.assert_allclose(document["inputs"]["image"]["mean"], STATS[0], rtol=1e-6)
    np.testing.assert_allclose(document["inputs"]["image"]["std"], STATS[1], rtol=1e-6)
    assert document["tensors"]["x_normalized"]["module"] == "x_act_fake_quant"
    assert all(
        np.array_equal(a, b) for a, b in zip(before, rounded_values(gm, (preprocessed(images(4, 1)),))[1], strict=True)
    )
    fresh = prepare_by_platform(Net(), backend)
    load_quant_params(fresh, tmp_path / "model.json")
    assert torch.equal(fresh.x_act_fake_quant.scale, gm.x_act_fake_quant.scale)


EVERY_BYTE = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).expand(1, 3, 16, 16)
RECIPES = {"ImageNet": STATS, "-1 to 1": (127.5, 127.5), "0 to 1": (0, 255), "bytes": (0, 1), "odd": (117.3, 57.9)}


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("stats", RECIPES.values(), ids=RECIPES)
def test_every_byte_gets_the_integer_of_the_model(stats, signed, bits):
    (normalize,) = parse_input_stats([stats], (EVERY_BYTE,))
    scheme = QuantizeScheme(bit_width=bits, signed=signed, symmetric=False)
    real = normalize(EVERY_BYTE)
    for bits_of_scale in (5, 24):
        scheme = replace(scheme, scale_bits=bits_of_scale)
        scale, zero_point = choose_qparams(0.9 * real.min(), real.max(), scheme)
        if stats == (127.5, 127.5) and bits_of_scale == 24:
            scale = scale * 1.01  # at 2 / 255 every byte would lie on a rounding boundary
        grid = (scale, zero_point, scheme.quant_min, scheme.quant_max)
        module = normalize_integers(normalize, scheme, scale, zero_point)
        assert torch.equal(quantize(module(EVERY_BYTE), *grid), quantize(real, *grid))
        weight, bias = (each.integers.flatten().double() for each in (module.weight, module.bias))
        assert weight.abs().max() <= 127
        mean = torch.as_tensor(stats[0]).double().expand(3)
        assert ((bias / weight + mean).abs() <= 1 / 200).all()


def test_where_no_integers_are_right_the_float_form_stays(tmp_path):
    """Half of the steps of 2 / 255: every byte lies on a rounding boundary, where float errors decide."""
    config = {"overrides": [{"match": {"node": "x"}, "value": {"fixed_range": [-1.0, 1.0], "scale_bits": 24}}]}
    gm = calibrate(prepare_by_platform(Net().eval(), "ONNXRuntime", config), (images(8) / 127.5 - 1,))
    report = convert_export(gm, images(2), tmp_path / "a.onnx", input_stats=[(127.5, 127.5)])
    assert report.certificate.passed
    why = "no weights and biases give the integers of the model for every byte"
    assert report.warnings == (f"input x is normalized in float (Cast, Sub, Div): {why}",)
    assert node_types(onnx.load(tmp_path / "a.onnx"))[:4] == ["Cast", "Sub", "Div", "QuantizeLinear"]


@pytest.mark.parametrize("level", ["ORT_DISABLE_ALL", "ORT_ENABLE_ALL"])
def test_the_integer_kernel_gives_them_too(level, tmp_path):
    gm = model("ONNXRuntime")
    report = convert_export(gm, EVERY_BYTE, tmp_path / "a.onnx", input_stats=[STATS])
    assert report.certificate.passed
    file = onnx.load(tmp_path / "a.onnx")
    quantizer = next(node for node in file.graph.node if node.op_type == "QuantizeLinear")
    file.graph.output.append(onnx.helper.make_tensor_value_info(quantizer.output[0], onnx.TensorProto.UINT8, None))
    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    found = ort.InferenceSession(file.SerializeToString(), options).run(None, {"x": EVERY_BYTE.numpy()})[-1]
    quant, (normalize,) = gm.x_act_fake_quant, parse_input_stats([STATS], (EVERY_BYTE,))
    expected = quantize(normalize(EVERY_BYTE), *quant.qparams(), 0, 255)
    assert np.array_equal(found, expected.numpy())


def test_bytes_that_are_the_integers_are_only_dequantized(tmp_path):
    config = {"overrides": [{"match": {"node": "x"}, "value": {"fixed_range": [0.0, 1.0], "scale_bits": 24}}]}
    gm = calibrate(prepare_by_platform(Net().eval(), "ONNXRuntime", config), (images(8) / 255,))
    report = convert_export(gm, images(4), tmp_path / "a.onnx", tmp_path / "a.json", input_stats=[(0, 255)])
    assert report.certificate.passed
    file = onnx.load(tmp_path / "a.onnx")
    (reader,) = [node for node in file.graph.node if "x" in node.input]
    assert (reader.op_type, list(reader.output)) == ("DequantizeLinear", ["x_normalized"])
    assert len([node for node in file.graph.node if node.op_type == "Conv"]) == 2
    unseen = images(4, 2)
    assert_same_steps(gm, file, (unseen,), (unseen / 255,), {})
    (record,) = [tensor for tensor in report.tensors if tensor.name == "x_normalized"]
    assert (record.dtype, record.zero_point) == ("uint8", (0,))
    fresh = prepare_by_platform(Net(), "ONNXRuntime", config)
    load_quant_params(fresh, tmp_path / "a.json")
    assert torch.equal(fresh.conv.weight_fake_quant.scale, gm.conv.weight_fake_quant.scale)


@pytest.mark.parametrize(
    ("layer", "shape", "told"),
    [
        (nn.Conv1d(2, 3, 3), (2, 2, 9), ""),
        (nn.Conv3d(2, 3, 1), (2, 2, 4, 3, 2), ""),
        (nn.Linear(6, 3), (4, 6), "it has 2 dimensions, and convolutions take 3 to 5"),
    ],
)
def test_inputs_of_other_shapes(layer, shape, told, tmp_path):
    raw = torch.randint(0, 256, shape, dtype=torch.uint8)
    gm = calibrate(prepare_by_platform(nn.Sequential(layer).eval(), "QNN"), ((raw - 100.0) / 50,))
    report = convert_export(gm, raw, tmp_path / "a.onnx", input_stats=[(100.0, 50.0)])
    assert report.certificate.passed
    assert report.certificate.off_share < 0.01
    assert report.warnings == ((f"input input is normalized in float (Cast, Sub, Div): {told}",) if told else ())
    assert ("Cast" in node_types(onnx.load(tmp_path / "a.onnx"))) == bool(told)


class Several(nn.Module):
    """Two images, of which one is given back, and a vector in between."""

    def __init__(self):
        super().__init__()
        self.left = nn.Conv2d(3, 4, 3)
        self.right = nn.Conv2d(1, 4, 3)
        self.fc = nn.Linear(5, 4)

    def forward(self, left, vector, right):
        y = F.relu(self.left(left)).mean((2, 3)) + self.right(right).mean((2, 3))
        return y * torch.sigmoid(self.fc(vector)), left


def test_each_input_has_statistics_of_its_own(tmp_path):
    torch.manual_seed(0)
    raw = (images(4), torch.randn(4, 5), images(4, 1)[:, :1])
    normal = (preprocessed(raw[0]), raw[1], (raw[2].float() - 128) / 64)
    gm = calibrate(prepare_by_platform(Several().eval(), "TSQAT"), normal)
    convert_export(gm, raw, tmp_path / "a.onnx", tmp_path / "a.json", input_stats=[STATS, None, (128, 64.0)])
    file = onnx.load(tmp_path / "a.onnx")
    types = {value.name: value.type.tensor_type.elem_type for value in file.graph.input}
    uint8, real = onnx.TensorProto.UINT8, onnx.TensorProto.FLOAT
    assert types == {"left": uint8, "vector": real, "right": uint8}
    assert_same_steps(gm, file, raw, normal, {"output_1": "left", "right_normalized": "right"})
    inputs = json.loads((tmp_path / "a.json").read_text())["inputs"]
    assert set(inputs) == {"left", "right"}
    assert inputs["right"] == {"dtype": "uint8", "mean": [128.0], "std": [64.0]}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float16, torch.int64])
def test_integers_of_any_type_are_raw_images(dtype):
    x = torch.arange(256).reshape(1, 1, 16, 16)
    (raw,) = raw_inputs((x.to(dtype),), parse_input_stats([(128, 64)], (x,)))
    assert raw.dtype == torch.uint8
    assert torch.equal(raw.long(), x)


def test_an_input_that_stays_float_is_normalized_too(tmp_path):
    config = {"overrides": [{"match": {"module": "conv"}, "weight": None, "activation": None}]}
    gm = model("TensorRT", config)
    report = convert_export(gm, images(2), tmp_path / "a.onnx", input_stats=[STATS])
    assert report.warnings == ("input x is normalized in float (Cast, Sub, Div): it is read in float",)
    normal = preprocessed(images(2))
    for a, b in zip(run_file(tmp_path / "a.onnx", (images(2),)), rounded_values(gm, (normal,))[1], strict=True):
        assert np.vdot(a, b) / np.linalg.norm(a) / np.linalg.norm(b) > 0.999
    assert [n.op_type for n in onnx.load(tmp_path / "a.onnx").graph.node[:4]] == ["Cast", "Sub", "Div", "Conv"]


def test_normalizing_computes_the_formula():
    x = images(2)
    (normalize,) = parse_input_stats([STATS], (x,))
    expected = (x.double().numpy() - 255 * MEAN.reshape(3, 1, 1)) / (255 * STD.reshape(3, 1, 1))
    np.testing.assert_allclose(normalize(x).numpy(), expected, rtol=1e-5, atol=1e-6)
    assert parse_input_stats(None, (x, x)) == (None, None)
    assert raw_inputs((x,), (None,))[0] is x
    tensors = parse_input_stats([(torch.tensor(STATS[0]), np.array(STATS[1]))], (x,))
    assert torch.equal(tensors[0](x), normalize(x))


@pytest.mark.parametrize(
    ("stats", "message"),
    [
        ((128.0, 64.0), "an entry for each of the 1 inputs"),
        ([], "an entry for each of the 1 inputs"),
        (STATS[0], "an entry for each of the 1 inputs"),
        ({"x": STATS}, "an entry for each of the 1 inputs"),
        ([128.0], r"input_stats\[0\] must be \(mean, std\) or None"),
        ([(1.0, 2.0, 3.0)], r"input_stats\[0\] must be \(mean, std\) or None"),
        ([(128.0, 0.0)], r"std of input_stats\[0\] must be positive"),
        ([([1.0, 2.0, 3.0], [1.0, -1.0, 1.0])], r"std of input_stats\[0\] must be positive"),
        ([(float("nan"), 1.0)], r"mean of input_stats\[0\] must be finite"),
        ([(1.0, float("inf"))], r"std of input_stats\[0\] must be finite"),
        ([("a", 1.0)], r"mean of input_stats\[0\] must be a number"),
        ([([1.0, 2.0], 1.0)], r"one for each channel .* \(2, 3, 12, 12\); got shape \(2,\)"),
    ],
)
def test_wrong_statistics_are_refused(stats, message, tmp_path):
    with pytest.raises(ExportError, match=message):
        convert_export(model_once(), images(2), tmp_path / "a.onnx", input_stats=stats)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("example", [preprocessed(images(2)), images(2) / 255, images(2).short() + 1])
def test_normalized_example_inputs_are_refused(example, tmp_path):
    with pytest.raises(ExportError, match=r"example_inputs\[0\] must hold raw values, integers from 0 to 255"):
        convert_export(model_once(), example, tmp_path / "a.onnx", input_stats=[STATS])
    assert not list(tmp_path.iterdir())


def test_statistics_are_of_tensors():
    with pytest.raises(ExportError, match="the input must be a tensor, example_inputs has list"):
        parse_input_stats([STATS], ([images(1)],))
    assert parse_input_stats([None], ([images(1)],)) == (None,)


def test_statistics_are_found_by_the_name_of_the_input_in_the_file():
    x = images(1)
    inputs = ([x, x], x, x)
    normalizers = parse_input_stats([None, STATS, (128.0, 64.0)], inputs)
    found = stats_by_name(["a", "b", "left", "right"], inputs, normalizers)
    assert list(found) == ["left", "right"]
    assert found["right"] == ([128.0], [64.0])
    np.testing.assert_allclose(found["left"], STATS, rtol=1e-6)

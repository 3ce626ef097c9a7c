"""Bit widths: what is stored, how exactly, and that ONNX Runtime computes every mix of them as it was trained."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto
from torch import Tensor, nn

from fxqat import convert_export, enable_quantization, load_quant_params, prepare_by_platform, save_checkpoint
from fxqat.convert_export import ExportReport
from fxqat.errors import ExportError
from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.nn.qat import QATLayer
from fxqat.onnx.quant_params import schema
from fxqat.quantization.graph_module import QuantGraphModule
from tests.benchmarks.bit_widths.matrix import LAYERS, Way, run
from tests.export_models import (
    Inputs,
    build,
    calibrate,
    constants,
    deployed_outputs,
    inputs_of,
    node_types,
    prepared,
    quantized_values,
    rounded_values,
    run_session,
    session,
    steps_apart,
)

WIDTHS = range(2, 17)
IN_BLOCKS = {"table": 20 * 4, "lstm.weight_ih": 2 * 32 * 4, "lstm.weight_hh": 2 * 32 * 2, "weight": 3 * 24, "fc": 5 * 6}
"""The number of scales of the weights of :class:`Blocks`."""


def export(
    gm: QuantGraphModule, inputs: Inputs, folder: Path, **options: Any
) -> tuple[ExportReport, onnx.ModelProto, dict[str, Any]]:
    """The report, the file and the entries of the JSON, after checks of their form."""
    report = convert_export(gm, inputs, folder / "model.onnx", folder / "model.json", **options)
    document = json.loads((folder / "model.json").read_text())
    jsonschema.validate(document, schema())
    assert document["opset"] == report.opset_version
    model = onnx.load(folder / "model.onnx")
    onnx.checker.check_model(model, full_check=True)
    return report, model, document["tensors"]


def types_in(model: onnx.ModelProto) -> dict[str, str]:
    """The types of initializers, in the JSON's spelling."""
    return {t.name: TensorProto.DataType.Name(t.data_type).lower() for t in model.graph.initializer}


def check_values(gm: QuantGraphModule, inputs: Inputs, report: ExportReport, model: onnx.ModelProto) -> None:
    """Every rounded value within one step, and nearly all of them equal."""
    expected, found = rounded_values(gm, inputs)[0], quantized_values(model, inputs)
    names = [tensor.name for tensor in report.tensors if tensor.kind == "activation"]
    assert set(found) == set(names)
    for name, value in zip(names, expected.values(), strict=True):  # both in the order of computation
        steps = steps_apart(found[name][0], value, found[name][1])
        assert steps.max() <= 1, name
        assert (steps > 0).sum() <= max(1, 0.02 * steps.size), name


# Four ways to quantize; docs/evidence/bit_widths.rst has all of them


@pytest.mark.parametrize(
    "way",
    [
        Way(2, 4, True, True, True),
        Way(8, 16, True, False, False),
        Way(3, 8, False, True, True),
        Way(16, 16, False, False, True),
    ],
    ids=str,
)
def test_every_layer_is_equal_in_onnx_runtime(way: Way) -> None:
    results = run(way)
    assert list(results) == list(LAYERS)
    assert [result.refused for result in results.values()] == [""] * len(LAYERS)
    limit = 0.005 if way.activation_bits == 16 else 0.0  # float32 sums are exact up to 8 bits
    assert max(result.off_by_1 for result in results.values()) <= limit


# Storage


@pytest.mark.parametrize(
    ("widths", "opset"),
    [((2, 3, 16), None), ((4, 16, 2), None), ((3, 2, 4), None), ((2, 4, 2), 25)],
    ids=str,
)
def test_weights_are_the_trained_integers_in_as_many_bits(
    widths: tuple[int, ...], opset: int | None, tmp_path: Path
) -> None:
    """A width for each layer; 3 and 16 bits are symmetric, the others have a zero point."""
    layers = dict(zip(("stem.0", "conv", "head"), widths, strict=True))
    schemes = {path: {"bit": bits, "symmetry": bits in (3, 16), "narrow_range": False} for path, bits in layers.items()}
    rules = [{"match": {"module": path}, "weight": scheme} for path, scheme in schemes.items()]
    gm = prepared("residual", "TSQAT", {"overrides": rules})
    report, model, entries = export(gm, inputs_of("residual"), tmp_path, opset_version=opset, verify=False)
    assert report.opset_version == (opset or 21)
    held, types = constants(model), types_in(model)
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    for path, bits in layers.items():
        weight = gm.get_submodule(path).folded()[0].detach().numpy()
        shape = (-1, *[1] * (weight.ndim - 1))
        scale, zero_point = held[f"{path}.weight_scale"], held[f"{path}.weight_zero_point"].astype(np.int64)
        low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
        expected = np.clip(np.rint(weight / scale.reshape(shape)) + zero_point.reshape(shape), low, high)
        name = f"{path}.weight_quantized"
        dtype = "int16" if bits == 16 else "int2" if bits == 2 and opset == 25 else "int4"
        assert np.array_equal(held[name].astype(np.int64), expected)
        assert types[name] == types[f"{path}.weight_zero_point"] == entries[f"{path}.weight"]["dtype"] == dtype
        assert (zero_point == 0).all() == (bits in (3, 16))
        width = int(dtype.removeprefix("int"))
        assert len(stored[name].raw_data) == -(-weight.size * width // 8)
        if dtype == "int4":
            assert np.array_equal(halves_of_bytes(stored[name]), expected)


def halves_of_bytes(tensor: TensorProto) -> np.ndarray:
    """Two 4-bit integers in a byte, the first in the low half, as ONNX says."""
    packed = np.frombuffer(tensor.raw_data, np.uint8)
    halves = np.stack([packed & 15, packed >> 4], 1).reshape(-1).astype(np.int64)[: np.prod(tensor.dims)]
    return np.where(halves > 7, halves - 16, halves).reshape(tuple(tensor.dims))


@pytest.mark.parametrize(("bits", "opset", "share"), [(2, 25, 2 / 32), (4, 21, 4 / 32)])
def test_the_file_is_as_small_as_its_weights(bits: int, opset: int, share: float, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)).eval()
    inputs = (torch.randn(4, 512),)
    config = {"extra_qconfig_dict": {"w_qscheme": {"bit": bits, "per_channel": False}}}
    gm = calibrate(prepare_by_platform(model, "TSQAT", config), inputs)
    convert_export(gm, inputs, tmp_path / "model.onnx", opset_version=opset, verify=False)
    size, floats = (tmp_path / "model.onnx").stat().st_size, 4 * 2 * 512 * 512
    assert share * floats < size < share * floats + 16_000  # biases, scales, names and nodes


@pytest.mark.parametrize(
    ("scheme", "opset", "dtype", "limits"),
    [
        ({"bit": 4}, None, "int4", (-8, 7)),
        ({"bit": 4, "signed": False, "symmetry": False}, None, "uint4", (0, 15)),
        ({"bit": 2, "signed": False, "symmetry": False}, None, "uint4", (0, 3)),
        ({"bit": 2}, 25, "int2", (-2, 1)),
        ({"bit": 16, "signed": False, "symmetry": False}, None, "uint16", (0, 65535)),
    ],
    ids=str,
)
def test_activations_reach_their_limits_and_nothing_beyond(
    scheme: dict[str, Any], opset: int | None, dtype: str, limits: tuple[int, int], tmp_path: Path
) -> None:
    inputs = inputs_of("several")
    gm = prepared("several", "TSQAT", {"extra_qconfig_dict": {"a_qscheme": scheme}})
    report, model, entries = export(gm, inputs, tmp_path, opset_version=opset)
    assert report.certificate is not None
    check_values(gm, inputs, report, model)
    held, types = constants(model), types_in(model)
    activations = [name for name, entry in entries.items() if entry["kind"] == "activation"]
    assert {entries[name]["dtype"] for name in activations} == {dtype}
    assert {types[f"{name}_zero_point"] for name in activations} == {dtype}
    far = tuple(tensor * 1e6 for tensor in inputs)
    for name, (value, scale) in quantized_values(model, far).items():
        integers = np.rint(value / scale) + held[f"{name}_zero_point"].astype(np.int64)
        assert limits[0] <= integers.min() <= integers.max() <= limits[1], name
        if name.startswith("table"):
            assert (integers.min(), integers.max()) == limits


class Ladder(nn.Module):
    """One linear layer for each width."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 6) for _ in WIDTHS])

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(layer(x) for layer in self.layers)


@cache
def ladder(narrow: bool) -> tuple[QuantGraphModule, Inputs]:
    """The ladder with weights and outputs of 2 to 16 bits, one override for each layer."""
    changes = [{"bit": bits, "narrow_range": narrow, "per_channel": False} for bits in WIDTHS]
    rules = [
        {"match": {"module": f"layers.{i}"}, "weight": change, "output": change} for i, change in enumerate(changes)
    ]
    torch.manual_seed(0)
    model, inputs = Ladder().eval(), (torch.randn(40, 8),)
    return calibrate(prepare_by_platform(model, "TSQAT", {"overrides": rules}), inputs), inputs


@pytest.mark.parametrize("narrow", [True, False])
def test_every_layer_has_a_width_of_its_own_and_its_range_is_exact(narrow: bool, tmp_path: Path) -> None:
    gm, inputs = ladder(narrow)
    report, model, entries = export(gm, inputs, tmp_path)
    check_values(gm, inputs, report, model)
    held, far, types = constants(model), quantized_values(model, (inputs[0] * 1e5,)), types_in(model)
    wanted = [("int4" if bits <= 4 else "int8" if bits <= 8 else "int16") for bits in WIDTHS]
    assert [types[f"layers.{i}.weight_quantized"] for i in range(len(WIDTHS))] == wanted
    assert [entries[f"layers.{i}"]["dtype"] for i in range(len(WIDTHS))] == wanted
    assert (entries["x"]["dtype"], report.opset_version) == ("int8", 21)
    for i, bits in enumerate(WIDTHS):
        limit = 2 ** (bits - 1) - 1
        lowest = -limit if narrow else -limit - 1
        weight = held[f"layers.{i}.weight_quantized"].astype(np.int64)
        assert lowest <= weight.min() < weight.max() <= limit
        if narrow:
            assert np.abs(weight).max() > 0.9 * limit  # a scale of 5 bits is up to 1/16 too large
        value, scale = far[f"layers.{i}"]
        integers = np.rint(value / scale)
        assert (integers.min(), integers.max()) == (lowest, limit)
        for name in (f"layers.{i}", f"layers.{i}.weight"):
            assert (entries[name]["bit_width"], entries[name]["quant_min"]) == (bits, lowest)


@pytest.mark.parametrize("weights", ["integer", "float"])
def test_a_mix_in_a_residual_net_computes_the_same(weights: str, tmp_path: Path) -> None:
    rules = [
        {"match": {"type": "Conv2d"}, "weight": {"bit": 2, "symmetry": False}, "output": {"bit": 4}},
        {"match": {"module": "stem.0"}, "weight": {"bit": 8}},
        {"match": {"module": "head"}, "weight": {"bit": 3}, "activation": {"bit": 16}, "output": {"bit": 16}},
    ]
    gm, inputs = prepared("residual", "TSQAT", {"overrides": rules}), inputs_of("residual")
    report, model, entries = export(gm, inputs, tmp_path, weights=weights, dynamic_batch=True)
    assert report.certificate is not None
    bits = {name: entry["bit_width"] for name, entry in entries.items() if entry["kind"] != "bias"}
    assert [bits[f"{path}.weight"] for path in ("stem.0", "conv", "head")] == [8, 2, 3]
    assert (bits["conv"], bits["head"]) == (4, 16)
    for name in bits:
        assert types_in(model)[f"{name}_zero_point"] == entries[name]["dtype"]
    expected, found = deployed_outputs(gm, inputs)[0], run_session(session(model), inputs)[0]
    assert steps_apart(found, expected, entries["head"]["scale"][0]).max() <= 1


# Optimizer, parameters, biases


def test_onnx_runtime_does_not_drop_a_relu_before_4_bits(tmp_path: Path) -> None:
    """ONNX Runtime 1.31 drops a Relu node there, whatever the zero point."""
    gm = prepared("several", "TSQAT", {"extra_qconfig_dict": {"w_qscheme": {"bit": 4}, "a_qscheme": {"bit": 4}}})
    report, model, _ = export(gm, inputs_of("several"), tmp_path)
    assert "Relu" not in node_types(model)
    assert report.certificate is not None
    for output in report.certificate.outputs:
        assert output.cosine_optimized == pytest.approx(1.0, abs=1e-4)


def test_parameters_of_narrow_tensors_go_back(tmp_path: Path) -> None:
    config = {"extra_qconfig_dict": {"w_qscheme": {"bit": 3, "symmetry": False}, "a_qscheme": {"bit": 4}}}
    gm, inputs = prepared("residual", "Experimental", config), inputs_of("residual")
    export(gm, inputs, tmp_path, verify=False)
    save_checkpoint(gm, tmp_path / "c.pth", tmp_path / "alone.json")
    assert json.loads((tmp_path / "alone.json").read_text()) == json.loads((tmp_path / "model.json").read_text())
    fresh = prepare_by_platform(build("residual"), "Experimental", config).eval()
    load_quant_params(fresh, tmp_path / "alone.json")
    enable_quantization(fresh)
    with torch.no_grad():
        assert np.array_equal(fresh(*inputs).numpy(), deployed_outputs(gm, inputs)[0])


def test_large_biases_of_16_bit_products_fit_into_int32(tmp_path: Path) -> None:
    """The step of a bias is that of the products, here 2**-32 of their range: a larger weight scale makes it fit."""
    torch.manual_seed(0)
    model, inputs = nn.Sequential(nn.Linear(16, 8)).eval(), (torch.randn(20, 16),)
    nn.init.uniform_(model[0].bias, -50.0, 50.0)
    scheme = {"w_qscheme": {"bit": 16}, "a_qscheme": {"bit": 16}}
    gm = calibrate(prepare_by_platform(model, "TSQAT", {"extra_qconfig_dict": scheme}), inputs)
    assert isinstance(gm.get_submodule("0"), QATLayer)
    report, file, entries = export(gm, inputs, tmp_path)
    check_values(gm, inputs, report, file)
    held = constants(file)
    bias = held["0.bias_quantized"].astype(np.float64) * np.asarray(entries["0.bias"]["scale"])
    assert np.abs(held["0.bias_quantized"].astype(np.int64)).max() <= 2**30
    np.testing.assert_allclose(bias, model[0].bias.detach().numpy(), rtol=1e-6)
    step = entries["output" if "output" in entries else "0"]["scale"][0]
    with torch.no_grad():
        exact = model.double()(inputs[0].double()).numpy()
    assert np.abs(run_session(session(file), inputs)[0] - exact).max() < max(step, np.abs(exact).max() * 2**-10)


class Blocks(nn.Module):
    """A table, a recurrent layer of two directions, a product with a parameter and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 16)
        self.lstm = nn.LSTM(16, 8, bidirectional=True, batch_first=True)
        self.weight = nn.Parameter(torch.randn(12, 24) * 0.3)
        self.fc = nn.Linear(24, 5)

    def forward(self, words: Tensor) -> Tensor:
        x: Tensor = self.lstm(self.table(words))[0][:, -1, :12]
        return self.fc(torch.tanh(x @ self.weight))  # type: ignore[no-any-return]


def of_blocks(bits: int, backend: str, symmetric: bool) -> tuple[QuantGraphModule, Inputs]:
    torch.manual_seed(0)
    words = torch.randint(0, 20, (6, 5))
    scheme = {"bit": bits, "block_size": 4, "symmetry": symmetric}
    config = {"extra_qconfig_dict": {"w_qscheme": scheme}} | (
        {"activation": "float"} if backend == "ONNXRuntime" else {}
    )
    gm = prepare_by_platform(Blocks().eval(), backend, config)
    calibrate(gm, (words,))
    enable_quantization(gm)
    return gm, (words,)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("backend", ["Experimental", "ONNXRuntime"])
def test_weights_with_scales_of_blocks(bits: int, backend: str, symmetric: bool, tmp_path: Path) -> None:
    gm, inputs = of_blocks(bits, backend, symmetric)
    report, model, entries = export(gm, inputs, tmp_path)
    assert report.certificate is not None
    assert report.certificate.passed
    assert report.opset_version == 21
    held = {name.removesuffix(".weight"): len(e["scale"]) for name, e in entries.items() if e["kind"] == "weight"}
    wanted = IN_BLOCKS if backend == "Experimental" else {"table": 80, "weight": 72, "fc": 30}  # its LSTM stays float
    assert sorted(held.values()) == sorted(wanted.values())
    assert {entry["block_size"] for entry in entries.values() if entry["kind"] == "weight"} == {4}
    assert not [name for name, entry in entries.items() if entry["kind"] == "bias"]
    integers = constants(model)
    found = {name: integers[f"{name}_quantized"] for name, entry in entries.items() if entry["kind"] == "weight"}
    assert sum(values.size for values in found.values()) == 4 * sum(wanted.values())
    assert "Gather" in node_types(model)
    with_blocks = [node for node in model.graph.node if any(it.name == "block_size" for it in node.attribute)]
    assert {node.op_type for node in with_blocks} <= {"DequantizeLinear"}
    assert len(with_blocks) == (5 if backend == "Experimental" else 1)  # that of the table; the others fold
    fresh, _ = of_blocks(bits, backend, symmetric)
    with torch.no_grad():
        for quant in fresh.modules():
            if isinstance(quant, FakeQuantizeBase):
                quant.store(quant.scale * 3.0, quant.zero_point)
    load_quant_params(fresh, tmp_path / "model.json")
    torch.testing.assert_close(fresh(*inputs), gm(*inputs), rtol=0, atol=0)


def test_weights_in_blocks_as_floats_are_the_same(tmp_path: Path) -> None:
    gm, inputs = of_blocks(3, "Experimental", True)
    report, model, _ = export(gm, inputs, tmp_path, weights="float")
    assert report.certificate is not None
    assert report.certificate.passed
    pairs = [node.op_type for node in model.graph.node if any(it.name == "block_size" for it in node.attribute)]
    assert sorted(pairs) == ["DequantizeLinear"] * 5 + ["QuantizeLinear"] * 5


def test_weights_in_blocks_train(tmp_path: Path) -> None:
    gm, inputs = of_blocks(4, "Experimental", True)
    target, losses = torch.randn(6, 5) * 0.3, []  # about the calibrated range of the outputs
    optimizer = torch.optim.Adam(gm.parameters(), 1e-2)
    gm.train()
    for _ in range(30):
        optimizer.zero_grad()
        loss = (gm(*inputs) - target).square().mean()
        loss.backward()
        assert all(parameter.grad is not None for parameter in gm.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    report, _, _ = export(gm.eval(), inputs, tmp_path)
    assert report.certificate is not None
    assert report.certificate.passed


def test_an_opset_without_blocks_is_refused(tmp_path: Path) -> None:
    gm, inputs = of_blocks(8, "Experimental", True)
    with pytest.raises(ExportError, match=r"in blocks of 4.* since opset 21; opset_version is 20.* and no blocks"):
        convert_export(gm, inputs, tmp_path / "model.onnx", opset_version=20)

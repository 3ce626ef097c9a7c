"""Lower: what is exported computes what was trained, from integers."""

import pytest
import torch
from torch import nn

from fxqat.nn.deployed import QuantizeDequantize, StoredTensor
from fxqat.nn.fused import FusedLayer
from fxqat.nn.qat import QATLayer
from fxqat.quantization.deployed_copy import deployed_copy
from fxqat.quantization.lower import lower
from fxqat.utils.tensors import flatten_tensors
from tests.models import BACKENDS, TOYS, calibrated, inputs


def modules_of(lowered, kind):
    return {path: module for path, module in lowered.module.named_modules() if isinstance(module, kind)}


def run(module, example):
    with torch.no_grad():
        return flatten_tensors(module(*example))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", TOYS)
def test_the_lowered_graph_computes_what_was_trained(name, backend):
    gm = calibrated(name, backend)
    lowered = {weights: lower(gm, weights) for weights in ("integer", "float")}
    actual = {weights: run(found.module, inputs(name)) for weights, found in lowered.items()}
    expected = dict.fromkeys(lowered, run(deployed_copy(gm), inputs(name)))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    for found in lowered.values():
        assert not modules_of(found, (QATLayer, nn.BatchNorm2d)) or name in ("pre_activation", "shared_module")


@pytest.mark.parametrize("name", TOYS)
def test_every_tensor_is_recorded_once(name):
    gm = calibrated(name)
    lowered = lower(gm)
    names = [tensor.name for tensor in lowered.tensors.values()]
    assert len(set(names)) == len(names)
    assert set(lowered.tensors) == set(modules_of(lowered, (QuantizeDequantize, StoredTensor)))
    for path, tensor in lowered.tensors.items():
        module = lowered.module.get_submodule(path)
        assert tensor.scale == tuple(module.scale.reshape(-1).tolist())
        assert tensor.zero_point == tuple(module.zero_point.reshape(-1).tolist())
        assert len(tensor.scale) == 1 or tensor.axis is not None


@pytest.mark.parametrize(("weight", "bias"), [("int8", "int32")])
def test_weights_and_biases_are_integers_on_their_grid(weight, bias):
    gm = calibrated("conv_bn_relu")
    lowered = lower(gm)
    stored = modules_of(lowered, StoredTensor)
    by_name = {lowered.tensors[path].name: (lowered.tensors[path], module) for path, module in stored.items()}
    assert sorted(by_name) == ["conv1.bias", "conv1.weight", "conv2.bias", "conv2.weight", "fc.bias", "fc.weight"]
    for layer in ("conv1", "conv2", "fc"):
        record, module = by_name[f"{layer}.weight"]
        assert record.dtype == weight
        assert str(module.integers.dtype) == f"torch.{weight}"
        assert 119 <= module.integers.abs().max() <= 127  # a scale of 5 bits is up to 1/16 larger than it need be
        folded, _ = gm.get_submodule(layer).folded()
        error = (module() - folded).abs().amax(list(range(1, folded.dim())))
        assert (error <= torch.tensor(record.scale) * 4).all()
        record, module = by_name[f"{layer}.bias"]
        assert record.dtype == bias
        assert str(module.integers.dtype) == f"torch.{bias}"
    source = gm.get_submodule("x_act_fake_quant").qparams()[0]
    expected = source * gm.conv1.weight_fake_quant.qparams()[0]
    assert torch.equal(torch.tensor(by_name["conv1.bias"][0].scale), expected)


def test_the_weight_of_a_shared_layer_is_stored_once():
    lowered = lower(calibrated("shared_module"))
    names = [tensor.name for tensor in lowered.tensors.values()]
    assert names.count("head.weight") == 1
    assert not any(name.startswith("head.weight_") for name in names)
    assert sum(name.startswith("head.bias") for name in names) >= 2


def test_a_float_layer_is_folded():
    config = {"extra_quantizer_dict": {"exclude_module_name": ["conv1"]}}
    gm = calibrated("conv_bn_relu", "TSQAT", config)
    lowered = lower(gm)
    assert not modules_of(lowered, FusedLayer)
    layer = lowered.module.get_submodule("conv1")
    assert type(layer) is nn.Conv2d
    assert layer.bias is not None
    assert gm.conv1.bn is not None
    torch.testing.assert_close(lowered.module(*inputs("conv_bn_relu")), gm(*inputs("conv_bn_relu")))


def test_the_model_is_not_changed():
    gm = calibrated("residual").train()
    code, state = gm.code, {k: v.clone() for k, v in gm.state_dict().items() if torch.is_tensor(v)}
    lowered = lower(gm)
    assert gm.code == code
    assert all(torch.equal(v, state[k]) for k, v in gm.state_dict().items() if torch.is_tensor(v))
    assert all(p.requires_grad for p in gm.parameters())
    assert all(module.training for module in gm.modules())
    assert not any(p.requires_grad for p in lowered.module.parameters())


@pytest.mark.parametrize(
    ("bits", "opset", "dtype"), [(2, 21, "int4"), (2, 25, "int2"), (4, 18, "int4"), (16, 21, "int16")]
)
@pytest.mark.parametrize(("part", "tensor"), [("weight", "conv2.weight"), ("output", "conv2")])
def test_a_tensor_is_recorded_with_the_type_that_the_opset_stores_it_in(part, tensor, bits, opset, dtype):
    config = {"overrides": [{"match": {"module": "conv2"}, part: {"bit": bits}}]}
    lowered = lower(calibrated("conv_bn_relu", "TSQAT", config), "integer", opset)
    recorded = {record.name: record.dtype for record in lowered.tensors.values()}
    assert recorded.pop(tensor) == dtype
    shared = {"add", "relu", "conv2_relu"}  # what has conv2's scale
    assert {recorded[name] for name in recorded if name not in shared} == {"int8", "int32"}

"""What tools ask every layer with quantized weights."""

import pytest
import torch
from torch import nn

from fxqat import calibrate, prepare_by_platform
from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.nn.quantized_layer import QuantizedLayer

TOKENS = torch.arange(12).reshape(3, 4)
VALUES = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0))
LAYERS = {
    "linear": (nn.Linear(8, 5), VALUES, ["weight"]),
    "folded": (nn.Sequential(nn.Linear(8, 5), nn.Flatten(0, 1), nn.BatchNorm1d(5)), VALUES, ["weight"]),
    "computed": (nn.utils.parametrizations.weight_norm(nn.Linear(8, 5)), VALUES, ["weight"]),
    "table": (nn.Embedding(12, 5), TOKENS, ["weight"]),
    "lstm": (nn.LSTM(8, 5, bidirectional=True), VALUES, ["weight_ih", "weight_hh"]),
    "gru": (nn.GRU(8, 5), VALUES, ["weight_ih", "weight_hh"]),
}


@pytest.fixture(params=LAYERS)
def found(request):
    layer, x, names = LAYERS[request.param]
    config = {"extra_qconfig_dict": {"w_observer": "MinMax"}}
    gm = prepare_by_platform(nn.Sequential(layer).eval(), "Experimental", config, example_inputs=(x,), check="off")
    calibrate(gm.eval(), [(x,)], progress=False, compare=False)
    (qat,) = (module for module in gm.modules() if isinstance(module, QuantizedLayer))
    return gm, qat, names


def test_a_weight_has_its_name_and_fake_quant(found):
    _, layer, names = found
    weights = layer.quantized_weights()
    assert [weight.name for weight in weights] == names
    for weight, quant in zip(weights, layer.weight_fake_quants(), strict=True):
        assert weight.quant is quant is getattr(layer, f"{weight.name}_fake_quant")


def test_the_fake_quants_have_seen_the_values(found):
    _, layer, _ = found
    for _, quant, values in layer.quantized_weights():
        scale, zero_point = quant.qparams()
        assert not zero_point.any()
        largest = values.detach().abs().amax(tuple(range(1, values.dim())))
        torch.testing.assert_close(scale.detach() * quant.scheme.quant_max, largest, rtol=0.1, atol=0)


def test_the_tensors_are_all_of_the_weight(found):
    gm, layer, _ = found
    quants = {id(p) for module in gm.modules() if isinstance(module, FakeQuantizeBase) for p in module.parameters()}
    for tensors, values in zip(layer.weight_tensors(), layer.weight_values(), strict=True):
        assert sum(tensor.numel() for tensor in tensors) == values.numel()
        assert not quants & set(map(id, tensors))

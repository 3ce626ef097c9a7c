"""To float: the same function in both modes, the user's names and types, and nothing shared with gm."""

import copy
import io
from collections import OrderedDict

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fxqat import disable_all, prepare_by_platform
from fxqat.errors import ConfigError
from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.nn.fused import FusedLayer
from fxqat.nn.qat import QATLayer
from fxqat.tools import reconstruct, to_float
from fxqat.utils.tensors import flatten_tensors
from tests.models import TOYS, build, calibrate, calibrated, inputs


def trained(name):
    """A toy model after calibration and two steps of training under quantization, in training mode."""
    gm = prepare_by_platform(build(name).train(), "TSQAT", example_inputs=inputs(name))
    gm = calibrate(gm, inputs(name, seed=1))
    optimizer = torch.optim.SGD(gm.parameters(), lr=0.01)
    for seed in (3, 4):
        optimizer.zero_grad()
        sum(y.float().square().mean() for y in flatten_tensors(gm(*inputs(name, seed=seed)))).backward()
        optimizer.step()
    return gm


def outputs(model, arguments):
    """What a model computes, with the same random numbers each time."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        return flatten_tensors(model(*(x.clone() for x in arguments)))


def assert_same(model, expected, arguments):
    for mode in (False, True):
        found, wanted = (outputs(m.train(mode), arguments) for m in (model, expected))
        assert len(found) == len(wanted)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", TOYS)
def test_it_is_the_user_s_model_with_the_trained_weights(name):
    gm = trained(name)
    before = copy.deepcopy(gm.state_dict())
    model = to_float(gm)
    assert model.training
    assert not any(isinstance(module, (FakeQuantizeBase, QATLayer, FusedLayer)) for module in model.modules())
    users = build(name, seed=5)
    users.load_state_dict(model.state_dict(), strict=True)  # the names are the user's
    assert any(not torch.equal(a, b) for a, b in zip(users.parameters(), build(name).parameters(), strict=True))
    for node in model.graph.nodes:
        if node.op == "call_module" and list(model.get_submodule(node.target).parameters()):
            assert type(model.get_submodule(node.target)) is type(users.get_submodule(node.target))
    mine, theirs = ({t.data_ptr() for t in (*m.parameters(), *m.buffers())} for m in (model, gm))
    assert not mine & theirs
    assert_same(model, users, inputs(name, seed=6))
    for key, tensor in model.state_dict().items():  # statistics of BatchNorms moved alike
        torch.testing.assert_close(tensor, users.state_dict()[key])
    assert all(torch.equal(a, before[key]) for key, a in gm.state_dict().items() if isinstance(a, torch.Tensor))
    disable_all(gm)
    assert_same(to_float(gm), gm, inputs(name, seed=6))


EXPORTED = ("conv_bn_relu", "padding_modes", "functional_weights")


class Together(nn.Module):
    """Models with one input each, side by side: one export serves them all."""

    def __init__(self, models):
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, a, b, c):
        return tuple(model(x) for model, x in zip(self.models, (a, b, c), strict=True))


def test_it_is_prepared_and_exported_like_any_model(tmp_path):
    models = [to_float(calibrated(name)) for name in EXPORTED]
    for name, model in zip(EXPORTED, models, strict=True):
        again = prepare_by_platform(model, "TSQAT", example_inputs=inputs(name))
        first = prepare_by_platform(build(name), "TSQAT", example_inputs=inputs(name))
        assert again.quant_report.num_quantized == first.quant_report.num_quantized
        assert set(again.provenance.tensor_names) == set(first.provenance.tensor_names)
    model, arguments = Together(models), tuple(x for name in EXPORTED for x in inputs(name))
    torch.onnx.export(model, arguments, tmp_path / "float.onnx", dynamo=True, opset_version=18, verbose=False)
    session = ort.InferenceSession(tmp_path / "float.onnx", providers=["CPUExecutionProvider"])
    feeds = dict(zip([v.name for v in session.get_inputs()], [x.numpy() for x in arguments], strict=True))
    for found, expected in zip(session.run(None, feeds), outputs(model, arguments), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
    types = {node.op_type for node in onnx.load(tmp_path / "float.onnx").graph.node}
    assert not types & {"QuantizeLinear", "DequantizeLinear"}


def test_options_of_layers_are_restored():
    model = to_float(calibrated("padding_modes"))
    for name, layer in build("padding_modes").named_children():
        found = model.get_submodule(name)
        assert type(found) is type(layer)
        assert repr(found) == repr(layer)
    up = to_float(calibrated("transpose_convs"))
    assert repr(up.up2) == repr(build("transpose_convs").up2)
    assert type(up.bn2) is nn.BatchNorm2d
    assert type(up.up2_activation) is nn.ReLU


def test_fused_activations_get_a_path_of_their_own():
    torch.manual_seed(0)
    users = nn.Sequential(OrderedDict(conv=nn.Conv2d(3, 4, 3), relu=nn.ReLU(), conv_activation=nn.Conv2d(4, 2, 1)))
    users.eval()
    model = to_float(prepare_by_platform(users, "TSQAT"))
    assert [path for path, _ in model.named_children()] == ["conv", "conv_activation_1", "conv_activation"]
    assert_same(model, users, (torch.randn(2, 3, 6, 6),))


def test_what_is_shared_stays_shared():
    tied = to_float(calibrated("tied_weights"))
    assert tied.encoder.weight is tied.decoder.weight
    shared = to_float(calibrated("shared_module"))
    calls = [str(node.target) for node in shared.graph.nodes if node.op == "call_module"]
    assert calls.count("head") == 3
    functional = to_float(calibrated("functional_weights"))
    read = [node.target for node in functional.graph.nodes if node.op == "get_attr"]
    assert read.count("linear_weight") == 2
    assert [n.target for n in functional.graph.nodes if n.op == "call_function"].count(F.linear) == 2


def test_functions_that_stayed_float_stay_functions():
    config = {"extra_quantizer_dict": {"exclude_function_type": [F.linear]}}
    gm = prepare_by_platform(build("functional_weights"), "TSQAT", config)
    assert not [m for m in gm.modules() if isinstance(m, QATLayer) and m.layer_type == "Linear"]
    model, users = to_float(gm), build("functional_weights", seed=5)
    users.load_state_dict(model.state_dict(), strict=True)
    assert_same(model, users, inputs("functional_weights"))


def test_both_modes_survive_copy_and_pickle():
    gm = prepare_by_platform(build("auxiliary_head").train(), "TSQAT", example_inputs=inputs("auxiliary_head"))
    model = to_float(gm)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert twin.training
        assert len(outputs(twin, inputs("auxiliary_head"))) == 2
        assert_same(twin, model.train(), inputs("auxiliary_head"))
    unused = copy.deepcopy(to_float(calibrated("unused_parameters")))
    assert set(unused.state_dict()) == set(build("unused_parameters").state_dict())
    assert isinstance(unused.spare.weight, nn.Parameter)
    again = prepare_by_platform(model, "TSQAT", example_inputs=inputs("auxiliary_head")).train()
    assert len(outputs(again, inputs("auxiliary_head"))) == 2


class CrossAttention(nn.Module):
    """One packed weight, applied by thirds to two inputs."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x, y):
        return self.attention(x, y, y, need_weights=False)[0]


def test_split_parameters_are_concatenated():
    torch.manual_seed(0)
    users = CrossAttention().eval()
    arguments = (torch.randn(2, 3, 8), torch.randn(2, 5, 8))
    gm = prepare_by_platform(users, "TSQAT", example_inputs=arguments)
    assert gm.provenance.split_tensors
    model = to_float(gm)
    users.load_state_dict(model.state_dict(), strict=True)
    assert_same(model, users, arguments)
    again = prepare_by_platform(model.eval(), "TSQAT", example_inputs=arguments)
    assert again.quant_report.num_quantized == gm.quant_report.num_quantized


def test_modes_and_frozen_parameters_are_kept():
    gm = prepare_by_platform(build("residual").train(), "TSQAT")
    gm.get_submodule("layer1.0.conv1").bn.eval()
    gm.get_submodule("stem").weight.requires_grad_(False)
    model = to_float(gm)
    assert [model.get_submodule(f"layer1.0.{name}").training for name in ("conv1", "bn1", "bn2")] == [True, False, True]
    assert model.layer1.training
    assert not model.stem.weight.requires_grad
    assert model.fc.weight.requires_grad
    assert to_float(gm.eval()).training is False


def test_weights_that_were_fitted_are_told(caplog):
    gm = prepare_by_platform(build("conv_bn_relu"), "TSQAT", example_inputs=inputs("conv_bn_relu")).eval()
    gm = calibrate(gm, inputs("conv_bn_relu", seed=1))
    to_float(gm)
    assert not caplog.messages
    reconstruct(gm, [inputs("conv_bn_relu", seed=1)], "GPTQ")
    to_float(gm)
    (message,) = caplog.messages
    assert "to_float: reconstruct fitted weights or biases" in message


def test_other_models_are_refused():
    with pytest.raises(ConfigError, match="prepare_by_platform returned, got Linear"):
        to_float(nn.Linear(2, 2))


class Recurrent(nn.Module):
    """A recurrent module with dropout between its layers, whose states are given and read."""

    def __init__(self, kind, **options):
        super().__init__()
        self.rnn = kind(5, 6, 2, dropout=0.2, **options)
        self.head = nn.Linear(6 * (1 + self.rnn.bidirectional), 3)

    def forward(self, x, h):
        y, states = self.rnn(x, (h, h.tanh()) if isinstance(self.rnn, nn.LSTM) else h)
        return self.head(y), states


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("options", [{}, {"bidirectional": True, "bias": False}], ids=["plain", "both directions"])
@pytest.mark.parametrize("overrides", [[], [{"match": {"module": "rnn"}, "recurrent": "unrolled"}]])
def test_recurrent_layers_get_the_names_of_the_module(kind, options, overrides):
    torch.manual_seed(0)
    users = Recurrent(kind, **options).train()
    arguments = (torch.randn(4, 3, 5), torch.randn(2 * (1 + users.rnn.bidirectional), 3, 6))
    gm = prepare_by_platform(users, "TSQAT", {"overrides": overrides}, example_inputs=arguments)
    gm = calibrate(gm, arguments)
    optimizer = torch.optim.SGD(gm.parameters(), lr=0.01)
    sum(y.square().mean() for y in flatten_tensors(gm(*arguments))).backward()
    optimizer.step()
    model = to_float(gm)
    again = Recurrent(kind, **options)
    again.load_state_dict(model.state_dict(), strict=True)
    assert not torch.equal(again.rnn.weight_hh_l1, users.rnn.weight_hh_l1)
    with torch.no_grad():
        for a, b in zip(*(flatten_tensors(m.eval()(*arguments)) for m in (model, again)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)

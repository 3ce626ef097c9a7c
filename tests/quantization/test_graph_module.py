"""The prepared model is copied, pickled and saved like any module, and computes the same bits afterwards."""

import copy
import io
import pickle

import pytest
import torch

from fxqat import disable_all, prepare_by_platform
from fxqat.fake_quantize.state import named_fake_quants
from fxqat.nn.qat import QATLayer
from fxqat.quantization.graph_module import QuantGraphModule
from fxqat.utils.tensors import flatten_tensors
from tests.models import TOYS, build, calibrate, calibrated, inputs, prepared


def through_torch_save(gm):
    file = io.BytesIO()
    torch.save(gm, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda gm: pickle.loads(pickle.dumps(gm)),
    "torch.save": through_torch_save,
    "twice": lambda gm: copy.deepcopy(pickle.loads(pickle.dumps(copy.deepcopy(gm)))),
}
THOROUGH = ["torch.save", "twice"]
"""Together these copy in every way; for the tests with many models."""


def step(gm, example):
    """Outputs and gradients of one training step."""
    torch.manual_seed(0)
    gm.zero_grad()
    outputs = flatten_tensors(gm(*example))
    sum(output.square().mean() for output in outputs).backward()
    return [*outputs, *(p.grad for p in gm.parameters())]


@pytest.mark.parametrize("how", THOROUGH)
@pytest.mark.parametrize("name", TOYS)
def test_a_copy_computes_the_same_bits(name, how):
    gm = calibrated(name)
    twin = COPIES[how](gm)
    example = inputs(name)
    assert isinstance(twin, QuantGraphModule)
    with torch.no_grad():
        expected, actual = flatten_tensors(gm(*example)), flatten_tensors(twin(*example))
    assert len(actual) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert not {id(p) for p in twin.parameters()} & {id(p) for p in gm.parameters()}


@pytest.mark.parametrize("how", THOROUGH)
@pytest.mark.parametrize("name", ["conv_bn_relu", "shared_module", "tied_weights", "dropouts", "transpose_convs"])
def test_a_copy_trains_the_same_bits(name, how):
    gm = calibrated(name, "Experimental").train()
    twin = COPIES[how](gm)
    for expected, actual in zip(step(gm, inputs(name)), step(twin, inputs(name)), strict=True):
        assert torch.equal(expected, actual)
    for (path, expected), (other, actual) in zip(gm.state_dict().items(), twin.state_dict().items(), strict=True):
        assert path == other
        assert expected == actual if isinstance(expected, dict) else torch.equal(expected, actual)


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_keeps_report_provenance_and_modes(how):
    model = build("residual").train()
    model.layer1[0].bn1.eval()
    model.note = {"made": [1, 2]}
    gm = prepare_by_platform(model, "TensorRT", {"preserve_attr": ["note"]})
    twin = COPIES[how](gm)
    assert twin.quant_report == gm.quant_report
    assert twin.provenance.tensor_names == gm.provenance.tensor_names
    assert twin.provenance.backend == "TensorRT"
    assert twin.note == {"made": [1, 2]}
    assert twin.note is not gm.note
    assert {n: m.training for n, m in twin.named_modules()} == {n: m.training for n, m in gm.named_modules()}
    assert not twin.get_submodule("layer1.0.conv1").bn.training


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_keeps_what_is_shared(how):
    twin = COPIES[how](prepared("shared_module"))
    heads = [node for node in twin.graph.nodes if node.target == "head"]
    assert len(heads) == 3
    assert len({id(m) for _, m in twin.named_modules(remove_duplicate=False) if isinstance(m, QATLayer)}) == 2
    tied = COPIES[how](prepared("tied_weights"))
    assert tied.encoder.weight is tied.decoder.weight


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_is_independent(how):
    gm = calibrated("conv_bn_relu")
    twin = COPIES[how](gm)
    example = inputs("conv_bn_relu")
    before = gm(*example)
    disable_all(twin)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert all(quant.fake_quant_enabled for _, quant in named_fake_quants(gm))
    assert torch.equal(gm(*example), before)
    assert not torch.equal(twin(*example), before)


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_of_an_uncalibrated_model_can_be_calibrated(how):
    gm, twin = prepared("squeeze_excite"), COPIES[how](prepared("squeeze_excite"))
    for model in (gm, twin):
        calibrate(model, inputs("squeeze_excite", seed=1))
    assert torch.equal(gm(*inputs("squeeze_excite")), twin(*inputs("squeeze_excite")))
    scales = [[q.scale for _, q in named_fake_quants(model)] for model in (gm, twin)]
    assert all(torch.equal(a, b) for a, b in zip(*scales, strict=True))
    assert all(scale.ne(1.0).any() for scale in scales[0])


@pytest.mark.parametrize("name", TOYS)
def test_every_tensor_of_the_model_is_accounted_for(name):
    model = build(name)
    gm = prepared(name)
    found = gm.provenance
    state = gm.state_dict()
    assert {*found.tensor_names, *found.unread} == set(model.state_dict())
    for theirs, tensor in model.state_dict().items():
        ours = found.unread[theirs] if theirs in found.unread else state[found.tensor_names[theirs]]
        assert torch.equal(ours, tensor)


def test_unread_tensors_are_remembered():
    assert set(prepared("auxiliary_head").provenance.unread) == {"auxiliary.weight", "auxiliary.bias"}
    unread = prepared("unused_parameters").provenance.unread
    assert set(unread) == {"spare.weight", "spare.bias", "temperature", "centre"}


@pytest.mark.parametrize("name", TOYS)
def test_the_state_dict_names_every_tensor_once(name):
    gm = prepared(name)
    tensors = [*gm.named_parameters(remove_duplicate=False), *gm.named_buffers(remove_duplicate=False)]
    names = {}
    for path, tensor in tensors:
        names.setdefault(id(tensor), []).append(path)
    twice = [paths for paths in names.values() if len(paths) > 1]
    assert twice == ([["encoder.weight", "decoder.weight"]] if name == "tied_weights" else [])
    assert {path for path, _ in tensors} <= set(gm.state_dict())


class Watch:
    """A hook that counts its calls; copies of it count on their own."""

    def __init__(self):
        self.calls = 0

    def __call__(self, module, *values):
        self.calls += 1


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_keeps_the_hooks_of_the_user(how):
    gm = calibrated("conv_bn_relu")
    handles = [gm.register_forward_hook(Watch()), gm.register_forward_pre_hook(Watch())]
    handles += [gm.register_full_backward_hook(Watch()), gm.fc.register_forward_hook(Watch())]
    twin = COPIES[how](gm)
    sum(output.sum() for output in flatten_tensors(twin(*inputs("conv_bn_relu")))).backward()
    hooks = [[*m._forward_hooks.values(), *m._forward_pre_hooks.values()] for m in (twin, twin.fc)]
    assert [hook.calls for hook in [*hooks[0], *hooks[1]]] == [1, 1, 1]
    assert [hook.calls for hook in twin._backward_hooks.values()] == [1]
    assert [hook.calls for hook in (*gm._forward_hooks.values(), *gm._backward_hooks.values())] == [0, 0]
    for handle in handles:
        handle.remove()

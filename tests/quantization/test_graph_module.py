"""The prepared model is copied, pickled and saved like any module, and computes the same bits afterwards."""

import copy
import inspect
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel
from torch.nn.utils import prune

from fxqat import disable_all, prepare_by_platform
from fxqat.checkpoint import float_state_dict
from fxqat.errors import ConfigError, ExportError
from fxqat.fake_quantize.state import named_fake_quants
from fxqat.nn.qat import QATLayer
from fxqat.quantization.graph_module import QuantGraphModule, prepared_model
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


class Renamed(nn.Module):
    """Prepared, its BatchNorm has another name, its parameters are split, and one layer is not read."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.unread = nn.Linear(2, 2)

    def forward(self, x):
        y = self.norm(self.conv(x)).relu().flatten(2).transpose(1, 2)
        return self.attention(y, y, 2 * y, need_weights=False)[0]


@pytest.mark.parametrize("prefix", ["", "inside."])
def test_a_state_dict_of_the_float_model_loads_by_its_names(prefix):
    x = torch.randn(8, 3, 6, 6)
    gm, other = prepare_by_platform(Renamed(), "TSQAT", example_inputs=x), Renamed()
    other(x)
    other.eval()
    state = {prefix + name: tensor for name, tensor in other.state_dict().items()}
    found = (nn.ModuleDict({"inside": gm}) if prefix else gm).load_state_dict(state, strict=False)
    assert found.unexpected_keys == []
    assert all("fake_quant" in name for name in found.missing_keys)
    torch.testing.assert_close(gm.eval()(x), other(x))
    saved = float_state_dict(gm)
    assert all(torch.equal(saved[name], tensor) for name, tensor in other.state_dict().items())
    assert found.missing_keys
    with pytest.raises(RuntimeError, match="Missing key.*fake_quant"):
        gm.load_state_dict(other.state_dict())


def test_tensors_of_other_sizes_are_not_taken_for_the_float_models():
    gm = prepare_by_platform(Renamed(), "TSQAT", example_inputs=torch.randn(8, 3, 6, 6))
    other = {"attention.in_proj_weight": torch.zeros(13, 4), "unread.bias": torch.zeros(3)}
    assert sorted(gm.load_state_dict(other, strict=False).unexpected_keys) == sorted(other)
    with pytest.raises(RuntimeError, match="size mismatch for conv.bn.weight"):
        gm.load_state_dict({"norm.weight": torch.zeros(5)}, strict=False)


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


class Arguments(nn.Module):
    """Optional arguments; in training, ``two_modes`` adds an output."""

    def __init__(self, two_modes):
        super().__init__()
        self.two_modes = two_modes
        self.first, self.last, self.auxiliary = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, mask=None, scale=1.0, flag=False):
        y = self.first(x) * scale
        if mask is not None:
            y = y * mask
        if self.two_modes and self.training:
            return self.last(y), self.auxiliary(y)
        return self.last(y)


class Variadic(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, *xs, scale=1.0, shift):
        return self.layer(xs[0] + xs[1]) * scale + shift


X, MASK = torch.randn(2, 4), torch.rand(2, 4)
SIGNATURES = {
    "no example inputs": (None, {}, "(x, mask=None, scale=1.0, flag=False)"),
    "one argument given": ((X,), {}, "(x)"),
    "another value than the default given": ((X, MASK), {}, "(x, mask)"),
    "the default given": ((X, MASK, 1.0), {}, "(x, mask, scale=1.0)"),
    "the default given, and another value behind": ((X, MASK, 1.0, True), {}, "(x, mask, scale, flag)"),
    "the default is of another type": ((X, MASK, 1), {}, "(x, mask, scale)"),
    "one argument left out": ((X, None, 1.0), {}, "(x, scale=1.0)"),
    "concrete_args": (None, {"concrete_args": {"mask": None}}, "(x, scale=1.0, flag=False)"),
}


def parameters(model):
    """The signature of forward, without annotations."""
    found = inspect.signature(model.forward).parameters.values()
    return str(inspect.Signature([p.replace(annotation=p.empty) for p in found]))


@pytest.mark.parametrize("case", SIGNATURES)
def test_forward_has_the_arguments_of_the_users_forward(case):
    example, config, expected = SIGNATURES[case]
    for two_modes in (False,) if example is None else (False, True):  # without them, a graph has one mode
        gm = prepare_by_platform(Arguments(two_modes), "TSQAT", config, example_inputs=example)
        assert parameters(gm) == expected
        gm.recompile()
        assert parameters(gm) == expected


def test_arguments_behind_a_variadic_one_are_given_by_name():
    model = Variadic()
    gm = prepare_by_platform(model, "TSQAT")
    assert parameters(gm) == "(*xs, scale=1.0, shift)"
    torch.testing.assert_close(gm(X, MASK, shift=1.0), model(X, MASK, shift=1.0))
    torch.testing.assert_close(gm(X, MASK, shift=1.0, scale=2.0), model(X, MASK, shift=1.0, scale=2.0))


WRAPPERS = COPIES | {
    "itself": lambda gm: gm,
    "DataParallel": DataParallel,
    "compiled": lambda gm: torch.compile(gm, fullgraph=True, backend="eager"),
}


@pytest.mark.parametrize("how", WRAPPERS)
@pytest.mark.parametrize("training", [False, True])
def test_arguments_by_name_and_wrong_arguments(how, training):
    model = Arguments(two_modes=True)
    gm = WRAPPERS[how](prepare_by_platform(model, "TSQAT", example_inputs=(X, MASK, 1.0))).train(training)
    model.train(training)
    for args, kwargs in (((), {"mask": MASK, "x": X}), ((X,), {"mask": MASK, "scale": 2.0}), ((X, MASK, 3.0), {})):
        expected, actual = model(*args, **kwargs), gm(*args, **kwargs)
        assert type(actual) is type(expected) is (tuple if training else torch.Tensor)
        for a, b in zip(flatten_tensors(actual), flatten_tensors(expected), strict=True):
            torch.testing.assert_close(a, b)
    if how == "compiled":
        return  # the compiler raises an error of its own
    for args, kwargs, message in (
        ((X,), {}, "missing 1 required positional argument: 'mask'"),
        ((X, MASK), {"masks": MASK}, "unexpected keyword argument 'masks'"),
        ((X, MASK), {"x": X}, "multiple values for argument 'x'"),
        ((X, MASK, 1.0, False, 1), {}, "takes from 3 to 4 positional arguments but 6 were given"),
    ):
        with pytest.raises(TypeError, match=message):
            gm(*args, **kwargs)


def test_a_model_of_two_modes_can_be_exported_by_name():
    gm = prepare_by_platform(Arguments(two_modes=True).eval(), "TSQAT", example_inputs=(X, MASK))
    with torch.no_grad():
        program = torch.export.export(gm, (X,), {"mask": MASK})
        torch.testing.assert_close(program.module()(X, mask=MASK), gm(X, MASK))


def test_a_prepared_model_inside_another_module_is_named():
    class Task(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = prepared("conv_bn_relu")

    with pytest.raises(ExportError, match=r"returned, got Task\. It holds one: pass its 'model'"):
        prepared_model(Task(), ExportError)
    for other in (nn.Linear(2, 2), None):
        with pytest.raises(ExportError, match="returned, got (Linear|NoneType)$"):
            prepared_model(other, ExportError)


class Watch:
    """A hook that counts its calls; copies of it count on their own."""

    def __init__(self):
        self.calls = 0

    def __call__(self, module, *values):
        self.calls += 1


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_keeps_the_hooks_of_the_user(how):
    gm = calibrated("conv_bn_relu", check="off")
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


@pytest.mark.parametrize("when", ["before prepare", "after prepare"])
def test_a_model_whose_hooks_compute_weights_is_copied_after_training(when):
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    x = torch.randn(3, 4)
    if when == "before prepare":
        prune.l1_unstructured(model[0], "weight", 0.5)
    gm = calibrate(prepare_by_platform(model, "TSQAT", example_inputs=x), (x,))
    if when == "after prepare":
        prune.l1_unstructured(gm.get_submodule("0"), "weight", 0.5)
    gm.train()(x).sum().backward()
    copied = copy.deepcopy(gm)
    assert torch.equal(copied.eval()(x), gm.eval()(x))
    assert copied.get_submodule("0").weight.eq(0).sum() == 12


def test_a_class_in_place_of_a_module_is_an_error():
    gm = prepare_by_platform(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), "TSQAT")
    layer = gm.get_submodule("0")
    with pytest.raises(ConfigError, match=r"'0' of the prepared model is a module \(.*got the class Linear\. Replace"):
        setattr(gm, "0", nn.Linear)
    with pytest.raises(ConfigError, match=r"got 'linear' \(str\)\. Replace the layer in the float model"):
        setattr(gm, "0", "linear")
    assert gm.get_submodule("0") is layer
    other = copy.deepcopy(layer)
    setattr(gm, "0", other)
    gm.head = nn.Linear
    assert gm.get_submodule("0") is other
    assert gm.head is nn.Linear

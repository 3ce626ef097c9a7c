"""A module that was given a forward of its own: what is prepared, trained and exported is that forward."""

import copy
import functools
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fxqat import calibrate, convert_export, enable_quantization, prepare_by_platform
from fxqat.errors import TraceError
from fxqat.utils.own_forward import has_own_forward, type_of
from tests.export_models import run_file


class Net(nn.Module):
    """Its class computes something else than each of the cases."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.b = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1)
        self.act, self.same = nn.ReLU(), nn.Identity()

    def forward(self, x, flag=False):
        y = self.same(self.act(self.norm(self.a(x))))
        return self.b(y) if flag else y

    def forward_export(self, x):
        return self.b(self.a(x)).relu()


def method(net):
    net.forward = net.forward_export


def function(net):
    old = net.forward
    net.forward = lambda x: old(x) * 2


def option(net):
    net.forward = functools.partial(net.forward, flag=True)


def function_of_a_layer(net):
    layer = net.a
    layer.forward = lambda x: F.conv2d(x, layer.weight) * 2


def method_of_a_layer(net):
    net.a.forward = types.MethodType(lambda self, x: F.conv2d(x * 3, self.weight), net.a)


def hook_of_a_layer(net):
    """As accelerate's ``add_hook_to_module`` does it."""
    old = net.a.forward

    def new(module, *args, **kwargs):
        return old(*args, **kwargs) + module.bias.sum()

    net.a.forward = functools.update_wrapper(functools.partial(new, net.a), old)


def activation(net):
    net.act.forward = F.silu


def identity(net):
    net.same.forward = torch.neg


CASES = [method, function, option, function_of_a_layer, method_of_a_layer, hook_of_a_layer, activation, identity]


def changed(change):
    net = Net().eval()
    change(net)
    return net


@pytest.mark.parametrize("change", CASES, ids=lambda change: change.__name__)
def test_it_is_what_is_trained_and_exported(change, tmp_path):
    net, x = changed(change), torch.randn(4, 3, 6, 6)
    assert (net(x) - Net().eval()(x)).abs().max() > 0.1
    gm = prepare_by_platform(net, "TSQAT", example_inputs=x)
    torch.testing.assert_close(gm.eval()(x), net(x))
    calibrate(gm, [x])
    enable_quantization(gm)
    gm.train()
    gm(x).square().sum().backward()
    weight = next(value for name, value in gm.named_parameters() if name.startswith("a.") and value.dim() == 4)
    assert weight.grad.abs().sum() > 0
    assert net.a.weight.grad is None
    with torch.no_grad():
        weight.mul_(0.5)  # what training changes is in the file
    assert convert_export(gm, x, tmp_path / "net.onnx").certificate.passed
    gm.eval()
    (from_file,) = run_file(tmp_path / "net.onnx", (x,))
    step = (gm(x).max() - gm(x).min()) / 100
    assert (torch.as_tensor(from_file) - gm(x)).abs().max() < step


@pytest.mark.parametrize("change", [case for case in CASES if case is not option], ids=lambda change: change.__name__)
def test_without_example_inputs_it_is_followed_as_well(change):
    net, x = changed(change), torch.randn(4, 3, 6, 6)
    gm = prepare_by_platform(net, "TSQAT", {"concrete_args": {"flag": False}} if takes_flag(net) else None)
    torch.testing.assert_close(gm.eval()(x), net(x))


def takes_flag(net):
    return not has_own_forward(net)


def test_without_example_inputs_a_partial_is_refused():
    with pytest.raises(TraceError, match=r"replaced by a partial.*\n.*\n.*\nRemedy: pass example_inputs"):
        prepare_by_platform(changed(option), "TSQAT")


def test_a_layer_that_is_kept_whole_is_not_taken_for_one_of_its_class():
    net, x = changed(function_of_a_layer), torch.randn(4, 3, 6, 6)
    gm = prepare_by_platform(net, "TSQAT", {"leaf_module": ["a"]}, example_inputs=x)
    assert gm.quant_report.row("a").reason.startswith("computed in float: not an op of fxqat's table")
    torch.testing.assert_close(gm.eval()(x), net(x))


@pytest.mark.parametrize("change", [function_of_a_layer, method_of_a_layer, hook_of_a_layer], ids=lambda c: c.__name__)
def test_a_copy_of_the_prepared_model_has_the_weights_of_the_copy(change):
    net, x = changed(change), torch.randn(4, 3, 6, 6)
    gm = prepare_by_platform(net, "TSQAT", {"leaf_module": ["a"]}, example_inputs=x).eval()
    before, copied = gm(x), copy.deepcopy(gm)
    torch.testing.assert_close(copied(x), before, rtol=0, atol=0)
    with torch.no_grad():
        for parameter in copied.get_submodule("a").parameters():
            parameter.zero_()
    assert copied(x).abs().max() == 0
    torch.testing.assert_close(gm(x), before, rtol=0, atol=0)


def test_what_cannot_be_traced_is_kept_whole():
    def change(net):
        net.a.forward = lambda x: F.conv2d(x, net.a.weight) if x.sum().item() > 1e9 else x * 2

    net, x = changed(change), torch.randn(4, 3, 6, 6)
    gm = prepare_by_platform(net, "TSQAT", example_inputs=x)
    assert [leaf.path for leaf in gm.quant_report.leaves] == ["a"]
    torch.testing.assert_close(gm.eval()(x), net(x))


def test_the_forward_of_the_class_as_an_attribute_changes_nothing():
    """As accelerate's ``remove_hook_from_module`` leaves it behind."""
    net, x = Net().eval(), torch.randn(4, 3, 6, 6)
    for module in net.modules():
        module.forward = module.forward
    assert not any(map(has_own_forward, (net, *net.children())))
    gm = prepare_by_platform(net, "TSQAT", example_inputs=x)
    assert list(gm.state_dict()) == list(prepare_by_platform(Net().eval(), "TSQAT", example_inputs=x).state_dict())
    torch.testing.assert_close(gm.eval()(x), net(x))


def test_the_type_of_a_module_with_a_forward_of_its_own_says_nothing():
    assert type_of(Net()) is Net
    assert type_of(changed(method)) is type_of(None) is type(None)

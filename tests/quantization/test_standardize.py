"""Standardize: one spelling per op, the same numbers."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxqat import calibrate, convert_export, disable_all, enable_quantization, prepare_by_platform
from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.quantization.standardize import standardize
from fxqat.tracing.trace import trace
from fxqat.utils.own_forward import type_of


class Functional(nn.Module):
    """A functional layer on parameters of the model."""

    def __init__(self, call, weight, bias=None):
        super().__init__()
        self.call = call
        self.weight = nn.Parameter(torch.randn(weight))
        self.bias = nn.Parameter(torch.randn(bias)) if bias else None

    def forward(self, x):
        return self.call(x, self.weight, self.bias)


def standardized(model):
    gm = standardize(trace(model).gm)
    gm.recompile()
    return gm


def modules_called(gm):
    return [gm.get_submodule(str(node.target)) for node in gm.graph.nodes if node.op == "call_module"]


LAYERS = [
    (nn.Conv1d, lambda x, w, b: F.conv1d(x, w, b, padding=1), (4, 3, 3), 4, (2, 3, 8)),
    (nn.Conv2d, lambda x, w, b: F.conv2d(x, w, b, 2, (1, 0)), (4, 3, 3, 2), 4, (2, 3, 8, 8)),
    (nn.Conv2d, lambda x, w, b: F.conv2d(x, w, bias=b, groups=3, dilation=2), (6, 1, 3, 3), 6, (2, 3, 8, 8)),
    (nn.Conv2d, lambda x, w, b: F.conv2d(x, w, padding="same"), (4, 3, 3, 3), None, (2, 3, 8, 8)),
    (nn.Conv2d, lambda x, w, b: F.conv2d(weight=w, input=x, bias=b), (4, 3, 1, 1), 4, (2, 3, 8, 8)),
    (nn.Conv3d, lambda x, w, b: F.conv3d(x, w, b, stride=2), (4, 2, 2, 2, 2), 4, (2, 2, 4, 4, 4)),
    (nn.ConvTranspose1d, lambda x, w, b: F.conv_transpose1d(x, w, b, 2, 0, 1), (4, 3, 2), 3, (2, 4, 5)),
    (nn.ConvTranspose2d, lambda x, w, b: F.conv_transpose2d(x, w, b, groups=2), (4, 3, 2, 2), 6, (2, 4, 5, 5)),
    (nn.ConvTranspose3d, lambda x, w, b: F.conv_transpose3d(x, w, b, dilation=2), (2, 3, 2, 2, 2), 3, (2, 2, 3, 3, 3)),
    (nn.Linear, lambda x, w, b: F.linear(x, w, b), (4, 3), 4, (2, 3)),
    (nn.Linear, lambda x, w, b: F.linear(x, weight=w), (4, 3), None, (2, 5, 3)),
]


@pytest.mark.parametrize(("kind", "call", "weight", "bias", "shape"), LAYERS)
def test_functional_weights_become_the_module(kind, call, weight, bias, shape):
    model = Functional(call, weight, bias)
    x = torch.randn(shape)
    expected = model(x)
    gm = standardized(model)
    (layer,) = modules_called(gm)
    assert type(layer) is kind
    assert torch.equal(layer.weight, model.weight)
    assert [node.op for node in gm.graph.nodes] == ["placeholder", "call_module", "output"]
    torch.testing.assert_close(gm(x), expected, rtol=0, atol=0)


def test_calls_with_the_same_parameters_and_settings_share_a_module():
    class Siamese(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(3, 3, 3, 3))

        def forward(self, x):
            x = F.conv2d(x, self.w, padding=1)
            return F.conv2d(F.conv2d(x, self.w, padding=1), self.w, padding=2, dilation=2)

    model = Siamese()
    gm = standardized(model)
    first, second, third = modules_called(gm)
    x = torch.randn(1, 3, 6, 6)
    assert first is second
    assert third is not first
    assert third.weight is first.weight
    assert len(list(gm.parameters())) == 1
    torch.testing.assert_close(gm(x), model(x), rtol=0, atol=0)


def test_the_module_is_placed_beside_its_parameters():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Functional(lambda x, w, b: F.linear(x, w, b), (4, 3), 4)
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(self.inner(x))

    gm = standardized(Outer())
    targets = [str(node.target) for node in gm.graph.nodes if node.op == "call_module"]
    assert targets == ["inner.linear", "linear"]
    assert sorted(name for name, _ in gm.named_parameters()) == [
        "inner.linear.bias",
        "inner.linear.weight",
        "linear.bias",
        "linear.weight",
    ]


def test_a_weight_that_is_computed_from_parameters_is_computed_in_the_module():
    model = Functional(lambda x, w, b: F.linear(x, w * 2, b), (4, 3), 4)
    gm = standardized(model)
    x = torch.randn(2, 3)
    assert [type_of(module) for module in modules_called(gm)] == [nn.Linear]
    assert [node.op for node in gm.graph.nodes] == ["placeholder", "call_module", "output"]
    assert {name for name, _ in gm.named_parameters()} == {"linear.bias", "linear.parametrizations.weight.original"}
    torch.testing.assert_close(gm(x), model(x), rtol=0, atol=0)


def test_a_weight_that_depends_on_an_input_stays_a_value():
    model = Functional(lambda x, w, b: F.linear(x, w * x.mean(), b), (4, 3), 4)
    gm = standardized(model)
    x = torch.randn(2, 3)
    assert modules_called(gm) == []
    assert F.linear in [node.target for node in gm.graph.nodes]
    torch.testing.assert_close(gm(x), model(x), rtol=0, atol=0)


DROPOUTS = {
    "dropout": lambda x, training: F.dropout(x, 0.5, training),
    "dropout by keyword": lambda x, training: F.dropout(input=x, training=training, p=0.5),
    "dropout1d": lambda x, training: F.dropout1d(x, 0.5, training),
    "dropout2d": lambda x, training: F.dropout2d(x, 0.5, training),
    "dropout3d": lambda x, training: F.dropout3d(x, 0.5, training),
    "alpha_dropout": lambda x, training: F.alpha_dropout(x, 0.5, training),
    "feature_alpha_dropout": lambda x, training: F.feature_alpha_dropout(x, 0.5, training),
}


@pytest.mark.parametrize("name", DROPOUTS)
def test_functional_dropout_follows_the_mode(name):
    class Dropped(nn.Module):
        def forward(self, x):
            return DROPOUTS[name](x, self.training)

    model = Dropped()
    x = torch.ones(4, 8, 2, 2, 2) if "3d" in name else torch.ones(4, 8, 2, 2) if "2d" in name else torch.ones(4, 8, 2)
    for training in (True, False):
        model.train(training)
        gm = standardized(model)
        for mode in (True, False):
            torch.manual_seed(0)
            expected = model.train(mode)(x)
            torch.manual_seed(0)
            torch.testing.assert_close(gm.train(mode)(x), expected, rtol=0, atol=0)
            assert torch.equal(gm(x), x) == (not mode)


class DropsBefore(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(F.dropout(x, 0.5, self.training))


class DropsInParts(nn.Module):
    """Drops in its forward, in that of a part with a layer, and in attention."""

    def __init__(self):
        super().__init__()
        self.part = DropsBefore()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.5)

    def forward(self, x):
        x = F.dropout(self.part(x), 0.5, self.training)
        return self.attention(x, x, x)[0]


@pytest.mark.parametrize("name", ["part", "attention"])
def test_functional_dropout_follows_the_mode_of_the_module_that_calls_it(name):
    torch.manual_seed(0)
    model, x = DropsInParts().eval(), torch.randn(3, 2, 8)
    gm = prepare_by_platform(model, "TSQAT", example_inputs=x)
    disable_all(gm)
    results = []
    for training in (True, False):
        for alone in (True, False):
            for each in (gm, model):
                each.train(training).get_submodule(name).train(alone)
                torch.manual_seed(0)
                results.append(each(x))
            torch.testing.assert_close(results[-2], results[-1])
    assert not any(torch.equal(results[i], results[j]) for i in (0, 2, 4, 6) for j in range(i))
    model.train().get_submodule(name).eval()
    gm = prepare_by_platform(model, "TSQAT", example_inputs=x)
    assert {module.training for module in gm.get_submodule(name).modules()} == {False}


class Overwriting(nn.Module):
    """Overwrites a value in place and reads it afterwards."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        y = x * 2
        z = self.function(y, self.training)
        return z + 3 * y


@pytest.mark.parametrize(
    "function",
    [
        lambda y, training: F.dropout(y, 0.5, training, True),
        lambda y, training: F.dropout2d(y, 0.5, training, inplace=True),
        lambda y, training: F.dropout(y, 0.5, True, True),
        lambda y, training: F.rrelu(y, 0.1, 0.3, True, True),
        lambda y, training: torch.rrelu(y, 0.1, 0.3, True),
        lambda y, training: F.celu(y, 1.5, True),
        lambda y, training: F.relu(input=y, inplace=True),
        lambda y, training: torch.relu_(input=y),
        lambda y, training: y.mul_(other=y),
    ],
)
def test_a_value_is_overwritten_where_the_call_says_so(function):
    model, x = Overwriting(function), torch.randn(4, 8, 2, 2)
    for training in (True, False):
        gm = standardized(model.train(training))
        for mode in (True, False):
            torch.manual_seed(0)
            expected = model.train(mode)(x.clone())
            torch.manual_seed(0)
            torch.testing.assert_close(gm.train(mode)(x.clone()), expected, rtol=0, atol=0)
        assert not any(getattr(module, "inplace", False) for module in modules_called(gm))


def test_dropout_that_is_always_on_stays_so():
    class Always(nn.Module):
        def forward(self, x):
            return F.dropout(x, 0.5)

    gm = standardized(Always()).eval()
    x = torch.ones(1000)
    assert 0.4 < (gm(x) == 0).float().mean() < 0.6
    assert modules_called(gm) == []


def test_keyword_inputs_become_positional():
    class Keywords(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)
            self.norm = nn.BatchNorm2d(4)
            self.up = nn.ConvTranspose2d(4, 4, 2, stride=2)

        def forward(self, x):
            return self.up(output_size=[9, 9], input=self.norm(input=self.conv(input=x)))

    model = Keywords().eval()
    gm = standardized(model)
    calls = [node for node in gm.graph.nodes if node.op == "call_module"]
    assert [len(node.args) for node in calls] == [1, 1, 1]
    assert [dict(node.kwargs) for node in calls] == [{}, {}, {"output_size": [9, 9]}]
    x = torch.randn(2, 3, 4, 4)
    torch.testing.assert_close(gm(x), model(x), rtol=0, atol=0)


def test_attributes_that_nothing_reads_are_dropped():
    model = Functional(lambda x, w, b: (w, F.linear(x, w, b))[1], (4, 3), 4)
    gm = standardized(model)
    assert [node for node in gm.graph.nodes if node.op == "get_attr"] == []
    assert all(node.users or node.op == "output" for node in gm.graph.nodes)


def test_a_parameter_that_something_else_reads_stays_readable():
    model = Functional(lambda x, w, b: F.linear(x, w, b) + w.sum(), (4, 3), 4)
    gm = standardized(model)
    x = torch.randn(2, 3)
    (layer,) = modules_called(gm)
    assert layer.weight is gm.weight
    assert len(list(gm.parameters())) == 2
    torch.testing.assert_close(gm(x), model(x), rtol=0, atol=0)


def test_an_item_is_read_once_and_an_item_overwritten_in_place_is_read_after_it():
    class Items(nn.Module):
        def forward(self, x):
            parts = x.chunk(2, 1)
            first = parts[0] * 2
            parts[0].add_(1)
            return first, parts[0], parts[1], parts[1]

    gm = standardized(Items().eval())
    assert sorted(node.args[1] for node in gm.graph.nodes if node.name.startswith("getitem")) == [0, 1]
    x = torch.randn(2, 4)
    for found, expected in zip(gm(x.clone()), Items()(x.clone()), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_numbers_that_change_no_value_are_removed():
    class Neutral(nn.Module):
        def forward(self, x):
            y = x.relu()
            other = y + 0
            other.mul_(2)  # does not change y
            return sum([y, other]) * 1 / 1.0 - 0, 1 - y, (y > 1) * 1

    x = torch.randn(2, 4)
    gm = standardize(trace(Neutral().eval(), example_inputs=(x,)).gm)
    gm.recompile()
    for found, expected in zip(gm(x), Neutral()(x), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    names = [getattr(node.target, "__name__", node.target) for node in gm.graph.nodes]
    assert [names.count(name) for name in ("relu", "add", "mul", "truediv", "sub", "gt")] == [1, 1, 2, 0, 1, 1]


class Cached(nn.Module):
    """Keeps keys and values in a list that begins with empty tensors, as the caches of language models do."""

    def forward(self, x):
        keys, values = torch.tensor([], dtype=x.dtype, device=x.device), x.new_zeros(0)
        keys = torch.cat([keys, x.relu()], dim=-2)
        values = torch.concat((values, keys, x), 1)
        lengths = torch.cat([torch.tensor([]), x.argmax(1)])  # floats
        return keys, values, lengths, torch.cat([x.flatten()[:0], x.flatten()])


def test_an_empty_constant_is_not_concatenated():
    x = torch.randn(2, 4)
    gm = standardize(trace(Cached(), example_inputs=(x,)).gm)
    gm.recompile()
    for found, expected in zip(gm(x), Cached()(x), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    joined = [node.args[0] for node in gm.graph.nodes if "cat" in str(getattr(node.target, "__name__", ""))]
    assert [len(operands) for operands in joined] == [2, 2, 2]


class ListThroughPlaceholder(nn.Module):
    """As slowfast fuses its pathways."""

    def __init__(self):
        super().__init__()
        self.small, self.large = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1)
        self.fusion = nn.Identity()

    def forward(self, x):
        pair = self.fusion([self.small(x).relu(), (self.large(x).relu() * 9, 2)])
        y, size = pair[1]
        return self.fusion([F.avg_pool2d(pair[0], 2), F.avg_pool2d(y, size)])


def test_tensors_that_pass_a_placeholder_in_a_list_are_values_of_their_own():
    model, x = ListThroughPlaceholder().eval(), torch.randn(2, 3, 6, 6)
    gm = standardized(model)
    assert not any(node.target is operator.getitem for node in gm.graph.nodes)
    assert [type(module) for module in modules_called(gm)] == [nn.Conv2d, nn.Conv2d]
    assert all(torch.equal(a, b) for a, b in zip(gm(x), model(x), strict=True))
    pools = [node for node in prepare_by_platform(model, "TSQAT").graph.nodes if node.target is F.avg_pool2d]
    assert len({pool.args[0].target for pool in pools}) == 2  # the fake-quants that they read


class ItemOfComputedNumber(nn.Module):
    def __init__(self):
        super().__init__()
        self.fusion = nn.Identity()

    def forward(self, x):
        return self.fusion([x, x * 2])[x.dim() - 3]


def test_an_item_whose_number_is_computed_is_read_when_the_model_runs():
    gm, x = standardized(ItemOfComputedNumber()), torch.randn(2, 3, 6, 6)
    assert torch.equal(gm(x), x * 2)
    assert torch.equal(gm(x[0]), x[0])


class Collected(nn.Module):
    """Writes what it computes into new memory, as the cells of some networks do."""

    def __init__(self, make):
        super().__init__()
        self.make, self.fc = make, nn.Linear(4, 4)

    def forward(self, x):
        collected = self.make(x)
        for i in range(2):
            collected[i] = self.fc(x[i])
        return self.fc(collected)


MEMORY = {
    "empty": lambda x: torch.empty(x.shape, dtype=x.dtype),
    "empty in another layout": lambda x: torch.empty(x.shape, memory_format=torch.contiguous_format),
    "empty_like": torch.empty_like,
    "new_empty": lambda x: x.new_empty(x.shape),
}


@pytest.mark.parametrize("name", MEMORY)
def test_new_memory_holds_zeros_so_that_it_has_no_effect_on_ranges(name, monkeypatch, tmp_path):
    def garbage(original):
        return lambda *args, **kwargs: original(*args, **kwargs).fill_(1e30)

    x = torch.randn(2, 3, 4)
    gm = prepare_by_platform(Collected(MEMORY[name]).eval(), example_inputs=(x,))
    with monkeypatch.context() as patch:
        for owner, method in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            patch.setattr(owner, method, garbage(getattr(owner, method)))
        calibrate(gm, [(x,)], progress=False)
    enable_quantization(gm)
    scales = [quant.qparams()[0].max() for quant in gm.modules() if isinstance(quant, FakeQuantizeBase)]
    assert len(scales) > 2
    assert max(scales) < 1
    assert convert_export(gm, (x,), tmp_path / "model.onnx").certificate.passed


NUMBERS = {
    "clamp": lambda x: torch.clamp(x, 0, 0.5),
    "clamp by name": lambda x: torch.clamp(x, max=float("inf"), min=-1),
    "clip": lambda x: x.clip(-1, 0.5),
    "average": lambda x: F.avg_pool2d(x, [3], stride=(2,), padding=[1]),
    "maximum": lambda x: F.max_pool2d(x, 3, [2], (1,), [1]),
    "average of a module": nn.AvgPool2d((3,), (2,)),
    "maximum of a module": nn.MaxPool2d([3], dilation=(2,)),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_written_as_the_exporter_takes_them(name, tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.function = nn.Conv2d(3, 4, 1), NUMBERS[name]

        def forward(self, x):
            return self.function(self.conv(x))

    x = torch.randn(2, 3, 8, 8)
    gm = prepare_by_platform(Net().eval(), example_inputs=(x,))
    calibrate(gm, [(x,)], progress=False)
    enable_quantization(gm)
    assert convert_export(gm, (x,), tmp_path / "model.onnx").certificate.passed

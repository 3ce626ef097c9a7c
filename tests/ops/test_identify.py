"""The vocabulary: every spelling of an op is that op."""

import operator
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from fxqat.nn.fused import FusedLayer
from fxqat.ops import families
from fxqat.ops.identify import identify, identify_module, op_named, works_in_place
from fxqat.ops.table import OPS, UNKNOWN


class Apply(nn.Module):
    """A function as a model."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x, y):
        return self.function(x, y)


def last_op(function):
    graph = fx.symbolic_trace(Apply(function)).graph
    return identify(list(graph.nodes)[-2])


SPELLINGS = [
    ("relu", lambda x, y: F.relu(x)),
    ("relu", lambda x, y: F.relu(x, inplace=True)),
    ("relu", lambda x, y: torch.relu(x)),
    ("relu", lambda x, y: x.relu()),
    ("relu", lambda x, y: x.relu_()),
    ("add", lambda x, y: x + y),
    ("add", lambda x, y: 1 + x),
    ("add", lambda x, y: torch.add(x, y)),
    ("add", lambda x, y: x.add(y)),
    ("add", lambda x, y: x.add_(y)),
    ("add", lambda x, y: operator.iadd(x, y)),
    ("sub", lambda x, y: x - y),
    ("sub", lambda x, y: 1 - x),
    ("sub", lambda x, y: torch.subtract(x, y)),
    ("mul", lambda x, y: x * y),
    ("mul", lambda x, y: torch.multiply(x, y)),
    ("mul", lambda x, y: x.mul(y)),
    ("div", lambda x, y: x / y),
    ("matmul", lambda x, y: x @ y),
    ("matmul", lambda x, y: torch.bmm(x, y)),
    ("matmul", lambda x, y: x.matmul(y)),
    ("cat", lambda x, y: torch.cat([x, y])),
    ("cat", lambda x, y: torch.concat([x, y], dim=1)),
    ("stack", lambda x, y: torch.stack([x, y])),
    ("flatten", lambda x, y: torch.flatten(x, 1)),
    ("flatten", lambda x, y: x.flatten(1)),
    ("reshape", lambda x, y: x.view(2, -1)),
    ("reshape", lambda x, y: torch.reshape(x, (2, -1))),
    ("permute", lambda x, y: x.transpose(0, 1)),
    ("permute", lambda x, y: torch.permute(x, (1, 0))),
    ("permute", lambda x, y: x.t()),
    ("getitem", lambda x, y: x[:, 1]),
    ("split", lambda x, y: torch.chunk(x, 2)),
    ("split", lambda x, y: x.split(2)),
    ("repeat", lambda x, y: x.repeat(2, 1)),
    ("expand", lambda x, y: x.expand(2, -1)),
    ("squeeze", lambda x, y: torch.squeeze(x)),
    ("unsqueeze", lambda x, y: x.unsqueeze(0)),
    ("max_pool2d", lambda x, y: F.max_pool2d(x, 2)),
    ("adaptive_max_pool2d", lambda x, y: F.adaptive_max_pool2d(x, 2)),
    ("avg_pool2d", lambda x, y: F.avg_pool2d(x, 2)),
    ("adaptive_avg_pool2d", lambda x, y: F.adaptive_avg_pool2d(x, 1)),
    ("mean", lambda x, y: x.mean(1)),
    ("mean", lambda x, y: torch.mean(x, 1)),
    ("softmax", lambda x, y: x.softmax(-1)),
    ("softmax", lambda x, y: F.softmax(x, dim=-1)),
    ("sigmoid", lambda x, y: x.sigmoid()),
    ("tanh", lambda x, y: torch.tanh(x)),
    ("gelu", lambda x, y: F.gelu(x)),
    ("clamp", lambda x, y: x.clamp(0, 1)),
    ("pow", lambda x, y: x**2),
    ("sqrt", lambda x, y: x.sqrt()),
    ("abs", lambda x, y: torch.abs(x)),
    ("exp", lambda x, y: x.exp()),
    ("conv2d", lambda x, y: F.conv2d(x, y)),
    ("linear", lambda x, y: F.linear(x, y)),
    ("layer_norm", lambda x, y: F.layer_norm(x, (4,))),
    ("interpolate", lambda x, y: F.interpolate(x, scale_factor=2)),
    ("size", lambda x, y: x.size()),
    ("argmax", lambda x, y: x.argmax(1)),
    ("compare", lambda x, y: x > y),
    ("contiguous", lambda x, y: x.contiguous()),
    ("dropout", lambda x, y: F.dropout(x)),
]


@pytest.mark.parametrize(("name", "function"), SPELLINGS)
def test_functions_and_methods_are_known(name, function):
    found = last_op(function)
    assert found.name == name
    assert found.family != families.OPAQUE


@pytest.mark.parametrize("spelling", ["T", "mT"])
def test_transposing_attributes_are_pass_through(spelling):
    found = last_op(lambda x, y: getattr(x, spelling))
    assert found.name == "permute"
    assert found.family == families.PASS_THROUGH


def test_each_spelling_has_one_row():
    spellings = Counter(s for op in OPS for s in {*op.modules, *op.functions, *op.methods})
    names = Counter(op.name for op in OPS)
    assert [s for s, count in spellings.items() if count > 1] == []
    assert [n for n, count in names.items() if count > 1] == []


@pytest.mark.parametrize("op", [op for op in OPS if op.modules], ids=lambda op: op.name)
def test_modules_are_known_by_their_exact_type(op):
    for kind in op.modules:
        instance = kind.__new__(kind)
        assert identify_module(instance) is op
        assert identify_module(type("Own", (kind,), {}).__new__(type("Own", (kind,), {}))).family == families.OPAQUE
    assert op_named(op.name) is op


def test_a_fused_layer_is_the_op_of_its_layer():
    fused = FusedLayer(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1), nn.ReLU())
    assert identify_module(fused).name == "conv2d"
    assert identify_module(FusedLayer(nn.Linear(1, 1))).name == "linear"
    assert op_named("no such op") is None


@pytest.mark.parametrize(
    ("function", "family"),
    [
        (lambda x, y: F.pad(x, (1, 1)), families.PASS_THROUGH),
        (lambda x, y: F.pad(x, (1, 1), "constant", 0.0), families.PASS_THROUGH),
        (lambda x, y: F.pad(x, (1, 1), mode="reflect"), families.PASS_THROUGH),
        (lambda x, y: F.pad(x, (1, 1), "constant", 1.5), families.OPAQUE),
        (lambda x, y: F.pad(x, (1, 1), value=-1), families.OPAQUE),
        (lambda x, y: torch.constant_pad_nd(x, (1, 1)), families.PASS_THROUGH),
        (lambda x, y: torch.constant_pad_nd(x, (1, 1), 5.0), families.OPAQUE),
        (lambda x, y: F.interpolate(x, scale_factor=2), families.PASS_THROUGH),
        (lambda x, y: F.interpolate(x, None, 2, "nearest-exact"), families.PASS_THROUGH),
        (lambda x, y: F.interpolate(x, scale_factor=2, mode="bilinear"), families.RESIZE),
        (lambda x, y: F.interpolate(x, None, 2, "bicubic"), families.RESIZE),
        (lambda x, y: F.max_pool2d(x, 2, return_indices=True), families.OPAQUE),
    ],
)
def test_the_family_follows_the_arguments(function, family):
    found = last_op(function)
    assert found.family == family
    assert (found is UNKNOWN) == (family == families.OPAQUE)


@pytest.mark.parametrize(
    ("module", "family"),
    [
        (nn.Upsample(scale_factor=2), families.PASS_THROUGH),
        (nn.Upsample(scale_factor=2, mode="bilinear"), families.RESIZE),
        (nn.MaxPool2d(2), families.PASS_THROUGH),
        (nn.MaxPool2d(2, return_indices=True), families.OPAQUE),
        (nn.Softmax(-1), families.ACTIVATION),
        (nn.LSTM(2, 2), families.RECURRENT),
        (nn.Bilinear(2, 2, 2), families.OPAQUE),
    ],
    ids=repr,
)
def test_the_family_follows_the_settings_of_a_module(module, family):
    graph = fx.symbolic_trace(nn.Sequential(module)).graph
    node = next(node for node in graph.nodes if node.op == "call_module")
    assert identify(node).family == family
    assert identify(next(iter(graph.nodes))) is UNKNOWN


def call_of(function, *arguments, **options):
    """A node that calls a function with a placeholder and these arguments, in the order that they are given in."""
    graph = fx.Graph()
    return graph.call_function(function, (graph.placeholder("x"), *arguments), options)


def by_default(x, inplace=True):
    return x.relu_() if inplace else x.relu()


@pytest.mark.parametrize(
    ("node", "in_place"),
    [
        (call_of(torch.rrelu, 0.1, 0.3, True), False),
        (call_of(F.rrelu, 0.1, 0.3, True), False),
        (call_of(F.rrelu, 0.1, 0.3, False, True), True),
        (call_of(F.rrelu, 0.1, 0.3, True, inplace=True), True),
        (call_of(F.relu, True), True),
        (call_of(F.relu), False),
        (call_of(F.softmax, True), False),
        (call_of(F.dropout, 0.5, True), False),
        (call_of(F.dropout, 0.5, True, True), True),
        (call_of(by_default), True),
        (call_of(by_default, False), False),
        (call_of(torch.relu_), True),
    ],
    ids=lambda value: str(getattr(value, "args", value)),
)
def test_in_place_is_what_the_signature_calls_in_place(node, in_place):
    assert works_in_place(node) is in_place

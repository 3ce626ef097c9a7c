"""Fuse: which chains become one module, and that they compute the same."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxqat.fuser_method_mappings import FUSIONS, fusions_without
from fxqat.nn.fused import FusedLayer
from fxqat.ops.identify import op_named
from fxqat.quantization.fuse import fuse
from fxqat.quantization.standardize import standardize
from fxqat.tracing.trace import trace
from tests.models import TOYS, build, inputs


def fused(model, *table):
    gm = fuse(standardize(trace(model)[1]), *table)
    gm.recompile()
    return gm


def fused_layers(gm):
    return [module for _, module in gm.named_modules() if isinstance(module, FusedLayer)]


def parts(layer):
    return [type(part).__name__ for part in (layer.layer, layer.bn, layer.activation) if part is not None]


def chain(pattern):
    """A model of one chain of the table, and an input."""
    kinds = [op_named(name).modules[0] for name in pattern]
    layer = kinds[0](4, 4) if kinds[0] is nn.Linear else kinds[0](4, 4, 2)
    modules = [layer, *(kind(4) if "BatchNorm" in kind.__name__ else kind() for kind in kinds[1:])]
    dimensions = next((int(name[-2]) for name in pattern if name.startswith("conv")), 0)
    x = torch.randn(6, 4, *[5] * dimensions)
    model = nn.Sequential(*modules)
    for _ in range(3):
        model(x)
    return model, x


@pytest.mark.parametrize("row", FUSIONS, ids=lambda row: "-".join(row.pattern))
def test_every_row_becomes_one_module_that_computes_the_same(row):
    model, x = chain(row.pattern)
    gm = fused(model)
    (layer,) = fused_layers(gm)
    assert [node.op for node in gm.graph.nodes] == ["placeholder", "call_module", "output"]
    assert parts(layer) == [op_named(name).modules[0].__name__ for name in row.pattern]
    for training in (True, False):
        expected = model.train(training)(x)
        torch.testing.assert_close(gm.train(training)(x), expected, rtol=0, atol=0)
    ours, theirs = ([*m.named_parameters(), *m.named_buffers()] for m in (gm, model))
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    "activation",
    [
        lambda x: F.relu(x),
        lambda x: F.relu(x, inplace=True),
        lambda x: F.relu(input=x),
        lambda x: torch.relu(x),
        lambda x: x.relu(),
        lambda x: x.relu_(),
        lambda x: F.relu6(x),
    ],
)
def test_every_spelling_of_an_activation_is_fused(activation):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x):
            return activation(self.conv(x))

    model = Model()
    gm = fused(model)
    x = torch.randn(2, 3, 5, 5)
    assert [str(node.target) for node in gm.graph.nodes if node.op.startswith("call")] == ["conv"]
    torch.testing.assert_close(gm(x), model(x), rtol=0, atol=0)


@pytest.mark.parametrize("name", TOYS)
def test_fusing_changes_no_number_of_a_toy_model(name):
    model = build(name)
    gm = standardize(trace(model)[1])
    gm.recompile()
    before = gm(*inputs(name))
    calls = len([node for node in gm.graph.nodes if node.op.startswith("call")])
    fuse(gm).recompile()
    torch.testing.assert_close(gm(*inputs(name)), before, rtol=0, atol=0)
    assert len([node for node in gm.graph.nodes if node.op.startswith("call")]) <= calls


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("conv_bn_relu", {"conv1": ["Conv2d", "BatchNorm2d", "ReLU"], "conv2": ["Conv2d", "BatchNorm2d", "ReLU6"]}),
        ("squeeze_excite", {"expand": ["Conv2d", "BatchNorm2d"], "fc1": ["Conv2d", "ReLU"]}),
        ("linear_bn", {"fc1": ["Linear", "BatchNorm1d", "ReLU"]}),
        ("two_readers", {"conv": ["Conv2d", "BatchNorm2d"]}),
        ("shared_module", {"stem": ["Conv2d", "ReLU"]}),
        ("functional_weights", {"conv2d": ["Conv2d", "ReLU"]}),
        ("transpose_convs", {"up2": ["ConvTranspose2d", "BatchNorm2d", "ReLU"]}),
        ("transpose_convs", {"dense2": ["ConvTranspose2d", "ReLU6"], "up3": ["ConvTranspose3d", "BatchNorm3d"]}),
    ],
)
def test_fused_modules_take_the_path_of_the_layer(name, expected):
    gm = fused(build(name))
    found = {path: parts(module) for path, module in gm.named_modules() if isinstance(module, FusedLayer)}
    assert expected.items() <= found.items()
    assert set(found) <= {str(node.target) for node in gm.graph.nodes if node.op == "call_module"}


class Pair(nn.Module):
    """Two modules in a row, where something may prevent their fusion."""

    def __init__(self, first, second, forward):
        super().__init__()
        self.first = first
        self.second = second
        self.way = forward

    def forward(self, x):
        return self.way(self, x)


APART = {
    "the layer is called twice": lambda: Pair(
        nn.Conv2d(4, 4, 1), nn.ReLU(), lambda m, x: m.second(m.first(m.first(x)))
    ),
    "the BatchNorm is called twice": lambda: Pair(
        nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), lambda m, x: m.second(m.second(m.first(x)))
    ),
    "the BatchNorm keeps no statistics": lambda: Pair(
        nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, track_running_stats=False), lambda m, x: m.second(m.first(x))
    ),
    "the value has another reader": lambda: Pair(
        nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), lambda m, x: (lambda y: m.second(y) + y)(m.first(x))
    ),
    "the value is an output": lambda: Pair(
        nn.Conv2d(4, 4, 1), nn.ReLU(), lambda m, x: (lambda y: (y, m.second(y)))(m.first(x))
    ),
    "the BatchNorm stands before the layer": lambda: Pair(
        nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), lambda m, x: m.second(m.first(x))
    ),
    "the BatchNorm is one of the sequence axis": lambda: Pair(
        nn.Linear(4, 4), nn.BatchNorm1d(5), lambda m, x: m.second(m.first(x.flatten(2)[..., :4]))
    ),
    "the layer is given an output size": lambda: Pair(
        nn.ConvTranspose2d(4, 4, 2, 2), nn.BatchNorm2d(4), lambda m, x: m.second(m.first(x, output_size=[5, 11]))
    ),
}


@pytest.mark.parametrize("case", APART)
def test_what_must_not_be_fused(case):
    model = APART[case]().eval()
    x = torch.randn(3, 4, 2, 5) if "output size" in case else torch.randn(3, 5 if "axis" in case else 4, 5, 5)
    with torch.no_grad():
        expected = model(x)
        gm = fused(model)
        assert fused_layers(gm) == []
        torch.testing.assert_close(gm(x), expected, rtol=0, atol=0)


def test_a_second_spatial_linear_layer_with_batch_norm_is_not_mistaken():
    """BatchNorm1d after a Linear on (N, L, C) normalizes L, not the features, also where both are equal."""
    model = Pair(nn.Linear(4, 4), nn.BatchNorm1d(4), lambda m, x: m.second(m.first(x))).eval()
    nn.init.uniform_(model.second.running_mean)
    nn.init.uniform_(model.second.running_var, 0.5, 2)
    gm = fused(copy.deepcopy(model))
    flat, spatial = torch.randn(3, 4), torch.randn(3, 4, 4)
    torch.testing.assert_close(gm(flat), model(flat), rtol=0, atol=0)
    torch.testing.assert_close(gm(spatial), model(spatial), rtol=0, atol=0)
    for layer in fused_layers(gm):
        folded = layer.folded()
        torch.testing.assert_close(folded(flat), model(flat))


def test_a_smaller_table_leaves_the_rest_to_shorter_rows():
    pattern = ("conv2d", "batch_norm2d", "relu")
    model, x = chain(pattern)
    gm = fused(model.eval(), fusions_without(frozenset({pattern})))
    (layer,) = fused_layers(gm)
    assert parts(layer) == ["Conv2d", "BatchNorm2d"]
    assert fused_layers(fused(model, ())) == []
    torch.testing.assert_close(gm(x), model(x), rtol=0, atol=0)


def test_each_part_keeps_its_mode():
    model, _ = chain(("conv2d", "batch_norm2d", "relu"))
    model.train()
    model[1].eval()
    (layer,) = fused_layers(fused(model))
    assert layer.training
    assert layer.layer.training
    assert not layer.bn.training


@pytest.mark.parametrize("row", [row for row in FUSIONS if row.norm], ids=lambda row: "-".join(row.pattern))
def test_a_synchronized_batch_norm_is_fused_as_it_is(row):
    model, x = chain(row.pattern)
    model.eval()
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model))
    (layer,) = fused_layers(fused(converted))
    assert parts(layer)[1] == "SyncBatchNorm"
    assert len(parts(layer)) == len(row.pattern)
    assert torch.equal(layer(x), model(x))

"""Assigning to items: what is assigned, and nothing overwritten."""

import pytest
import torch
from torch import nn

from fxqat import enable_calibration, enable_quantization, prepare_by_platform
from fxqat.ops.assign_item import assign_item
from fxqat.ops.identify import identify

KEYS = [0, slice(1, None, 2), (slice(None), 1), (..., slice(0, 2)), torch.tensor([2, 0]), None]


@pytest.mark.parametrize("key", KEYS, ids=str)
@pytest.mark.parametrize("value", [2.5, torch.tensor(-1.0)], ids=["number", "tensor"])
def test_the_copy_has_what_is_assigned(key, value):
    x = torch.arange(12.0).view(3, 4)
    before, expected = x.clone(), x.clone()
    expected[key] = value
    assert torch.equal(assign_item(x, key, value), expected)
    assert torch.equal(x, before)


def test_a_list_or_dict_that_a_leaf_returns_can_be_assigned_to():
    class Leaf(nn.Module):
        def forward(self, x):
            return [x, x + 1], {"a": x}

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)
            self.leaf = Leaf()

        def forward(self, x):
            both, named = self.leaf(self.conv(x))
            both[1] = both[0].relu()
            named["b"] = both[1] * 2
            return both[0] + both[1] + named["a"] + named["b"]

    torch.manual_seed(0)
    model, x = Model().eval(), torch.randn(2, 3, 8, 8)
    gm = prepare_by_platform(model, prepare_custom_config_dict={"leaf_module": ["leaf"]}, example_inputs=(x,))
    torch.testing.assert_close(gm(x), model(x))


def test_a_rounded_value_that_is_assigned_to_can_be_trained_and_counts_as_joined():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x):
            y = self.conv(x)
            z = (y * 2).sigmoid()
            y[:, :2] = z[:, 2:]
            return y.relu()

    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    gm = prepare_by_platform(Model().eval(), example_inputs=(x,))
    enable_calibration(gm)
    gm(x)
    enable_quantization(gm)
    gm.train()(x).sum().backward()
    assert gm.conv.weight.grad.isfinite().all()
    rows = {row.op: row for row in gm.quant_report}
    assert rows["assign_item"].status == "shares"
    assert rows["assign_item"].group == rows["conv2d"].group


@pytest.mark.parametrize(
    ("number", "family"), [(0, "concat"), (0.0, "concat"), (1, "math"), (0.5, "math"), (1e9, "unbounded")]
)
def test_a_number_that_is_assigned_decides_the_family(number, family):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x):
            y = self.conv(x)
            y[:, :2] = number
            return y.relu()

    gm = prepare_by_platform(Model().eval(), example_inputs=(torch.randn(2, 3, 8, 8),))
    (node,) = (node for node in gm.graph.nodes if node.target is assign_item)
    assert identify(node).family == family
    row = next(row for row in gm.quant_report if row.op == "assign_item")
    assert (row.status == "shares") == (family == "concat")

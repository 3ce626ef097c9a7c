"""Sharing groups as a union of sets."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxqat import prepare_by_platform
from fxqat.custom_quantizer.sharing import Groups
from fxqat.fake_quantize.state import named_fake_quants
from tests.models import EVERY_LAYER, calibrate, unlimited


def test_a_name_alone_stands_for_itself():
    groups = Groups()
    assert groups.find("a") == "a"
    assert groups.find("b") != groups.find("a")


@pytest.mark.parametrize(
    "pairs", [["ab", "bc", "cd"], ["cd", "ab", "bc"], ["da", "db", "dc"], ["ab", "ab", "ac", "bd"]], ids="-".join
)
def test_joining_is_transitive_in_any_order(pairs):
    groups = Groups()
    for first, second in pairs:
        groups.join(first, second)
    assert len({groups.find(name) for name in "abcd"}) == 1
    assert groups.find("e") == "e"
    assert groups.find("a") in "abcd"


@pytest.mark.parametrize("seed", range(5))
def test_groups_equal_connected_components(seed):
    rng = random.Random(seed)
    names = [str(i) for i in range(30)]
    pairs = [(rng.choice(names), rng.choice(names)) for _ in range(20)]
    groups, neighbours = Groups(), {name: {name} for name in names}
    for first, second in pairs:
        groups.join(first, second)
        union = neighbours[first] | neighbours[second]
        for name in union:
            neighbours[name] = union
    for name in names:
        assert {other for other in names if groups.find(other) == groups.find(name)} == neighbours[name]
    assert len({groups.find(name) for name in names}) == len({frozenset(group) for group in neighbours.values()})


class Joined(nn.Module):
    """Joins results of ReLUs with each other, and with values that can be negative."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()) for _ in "ab")
        self.signed = nn.Conv2d(3, 4, 1)
        self.last = nn.Conv2d(12, 4, 1)

    def forward(self, x):
        positive = torch.cat([self.a(x), self.b(x)], 1)
        return self.last(torch.cat([F.max_pool2d(positive, 1), self.signed(x)], 1))


@pytest.mark.parametrize("backend", ["ONNXRuntime", "OpenVINO", "QNN"])
def test_results_of_a_relu_keep_the_smallest_integer_as_zero_point(backend):
    gm = prepare_by_platform(Joined(), backend, EVERY_LAYER).eval()
    groups = {row.node: row.group for row in gm.quant_report}
    assert groups["a_0"] == groups["b_0"] == groups["cat"] == groups["max_pool2d"] != groups["cat_1"]
    assert groups["signed"] == groups["cat_1"]
    calibrate(gm, (torch.randn(8, 3, 4, 4),))
    positive, joined = gm.a_0_act_fake_quant, gm.signed_act_fake_quant
    assert positive.scheme.nonnegative
    assert not positive.zero_point.requires_grad
    assert positive.qparams()[1] == 0 < joined.qparams()[1]
    assert not joined.scheme.nonnegative


@pytest.mark.parametrize("backend", ["TSQAT", "Experimental", unlimited("ONNXRuntime")], ids=["TSQAT", "asym", "sym"])
def test_all_operands_share_where_integers_are_copied_or_the_zero_point_is_fixed(backend):
    symmetric = {"extra_qconfig_dict": {"a_qscheme": {"symmetry": True, "signed": True}}} | EVERY_LAYER
    gm = prepare_by_platform(Joined(), backend, symmetric if backend not in ("TSQAT", "Experimental") else None)
    groups = {row.node: row.group for row in gm.quant_report}
    assert len({groups[name] for name in ("a_0", "b_0", "cat", "max_pool2d", "signed", "cat_1")}) == 1


def test_sums_have_scales_of_many_bits_where_the_engine_multiplies_by_ratios():
    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.last = (nn.Conv2d(3, 3, 1) for _ in range(3))

        def forward(self, x):
            y = self.first(x)
            return self.last((y + self.second(y)).relu() + x)

    bits = {}
    for backend in ("ONNXRuntime", "OpenVINO", "TSQAT"):
        gm = prepare_by_platform(Sums(), backend, EVERY_LAYER)
        quants = {name.removesuffix("_act_fake_quant"): quant for name, quant in named_fake_quants(gm)}
        bits[backend] = {name: quants[name].scheme.scale_bits for name in ("first", "relu", "add_1") if name in quants}
    assert bits["ONNXRuntime"] == bits["OpenVINO"] == bits["TSQAT"] == {"first": 4, "relu": 16, "add_1": 16}
    asked = prepare_by_platform(Sums(), "TSQAT", {"extra_qconfig_dict": {"a_qscheme": {"scale_bits": 5}}})
    assert {quant.scheme.scale_bits for name, quant in named_fake_quants(asked) if "act" in name} == {5}
    for entry, found in (({"bit": 4}, 16), ({"scale_bits": 4}, 4), ({"scale_bits": 6}, 6)):
        rule = {"match": {"node": "add_1"}, "output": entry}
        gm = prepare_by_platform(Sums(), "TSQAT", {"overrides": [rule]})
        assert gm.add_1_act_fake_quant.scheme.scale_bits == found, entry
    add = {"match": {"node": "add_1"}, "output": {"observer": "MSE"}}
    other = {"match": {"module": "first"}, "weight": {"scale_bits": 3}}
    computed = [add, lambda path, _: {"weight": {"bit": 4}} if path == "first" else None]
    for config, found in (
        ({"last": {"activation": {"scale_bits": 2}}}, 2),
        ({"last": {"activation": {"scale_bits": 2}}, "overrides": [other]}, 2),
        ({"overrides": [add, other]}, 16),
        ({"overrides": computed}, 16),
    ):
        gm = prepare_by_platform(Sums(), "TSQAT", config)
        assert gm.add_1_act_fake_quant.scheme.scale_bits == found, config


class LimitedTwice(nn.Module):
    """ReLUs of a value that is read elsewhere, and of one whose range LiteRT fixes."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        y = self.first(x)
        return self.last(y.relu() + y * y.sigmoid().relu())


def test_a_relu_shares_the_scale_of_its_operand_unless_its_range_is_fixed():
    x = torch.randn(32, 4)
    gm = prepare_by_platform(LimitedTwice().eval(), "LiteRT", example_inputs=(x,))
    calibrate(gm, (x,))
    named = {str(node.kwargs["tensor_name"]): node.target for node in gm.graph.nodes if "tensor_name" in node.kwargs}
    assert named["relu"] == named["first"]
    assert named["relu_1"] != named["sigmoid"]
    assert gm.get_submodule(named["sigmoid"]).scale.item() == 1 / 256


def test_narrow_limits_of_a_wide_value_have_their_own_scale():
    class Narrow(LimitedTwice):
        def forward(self, x):
            y = 50 * self.first(x)
            return self.last(F.hardtanh(y) + F.relu6(y) + y.clamp(0.0, 1.0) + 0.01 * y)

    x = torch.randn(32, 4)
    gm = prepare_by_platform(Narrow().eval(), "LiteRT", example_inputs=(x,))
    calibrate(gm, (x,))
    named = {str(node.kwargs["tensor_name"]): node.target for node in gm.graph.nodes if "tensor_name" in node.kwargs}
    scales = {name: gm.get_submodule(named[name]).scale.item() for name in ("mul", "hardtanh", "relu6", "clamp")}
    assert scales["mul"] > 4 * max(scales["hardtanh"], scales["relu6"], scales["clamp"])

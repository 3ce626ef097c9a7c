"""Overrides: what a match means, and that each rule changes exactly what it names."""

import contextlib
import dataclasses
import operator

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from fxqat.config.overrides import Match, Override, TensorChange, check_all_match
from fxqat.errors import ConfigError
from fxqat.fake_quantize.fixed import FixedFakeQuantize
from fxqat.nn.qat import QATLayer
from fxqat.observer.ema_min_max import EMAMinMaxObserver
from fxqat.ops.identify import identify
from fxqat.prepare_by_platform import prepare_by_platform
from fxqat.quantization.fuse import fuse
from fxqat.quantization.standardize import standardize
from fxqat.scheme import QuantizeScheme, TensorQConfig
from fxqat.tracing.trace import trace
from tests.builders import spelling
from tests.models import build, prepared

CONVS = ["stem", "layer1.0.conv1", "layer1.0.conv2", "layer1.1.conv1", "layer1.1.conv2", "layer1.1.downsample.0"]


def override(match, **changes):
    return {"overrides": [{"match": match, **changes}]}


def widths(gm):
    """Bits of every weight, by path."""
    layers = [(path, module) for path, module in gm.named_modules() if isinstance(module, QATLayer)]
    return {path: module.weight_fake_quant.scheme.bit_width for path, module in layers}


def outputs(gm):
    return {row.node: row.output for row in gm.quant_report}


def node_named(gm, name):
    return next(node for node in gm.graph.nodes if node.name == name)


@pytest.mark.parametrize(
    ("match", "expected"),
    [
        ({"module": "layer1.0.conv1"}, ["layer1.0.conv1"]),
        ({"module": "layer1.*.conv1"}, ["layer1.0.conv1", "layer1.1.conv1"]),
        ({"module": "*conv?"}, [c for c in CONVS if "conv" in c]),
        ({"module": "layer1.[!0]*"}, CONVS[3:]),
        ({"module": r"re:layer1\.\d\.conv2"}, ["layer1.0.conv2", "layer1.1.conv2"]),
        ({"module": "re:.*"}, [*CONVS, "fc"]),
        ({"type": "Conv2d"}, CONVS),
        ({"type": nn.Conv2d}, CONVS),
        ({"type": nn.Linear}, ["fc"]),
        ({"node": "layer1_0_conv1"}, ["layer1.0.conv1"]),
        ({"node": "re:layer1_._conv1"}, ["layer1.0.conv1", "layer1.1.conv1"]),
        ({"type": "Conv2d", "module": "layer1.1*"}, CONVS[3:]),
    ],
    ids=spelling,
)
def test_exactly_the_matched_layers_change(match, expected):
    gm = prepared("residual", config=override(match, weight={"bit": 4}))
    found = widths(gm)
    assert {path for path, bits in found.items() if bits == 4} == set(expected)
    assert set(found.values()) <= {4, 8}
    changed = {row.target for row in gm.quant_report if "changed by overrides[0]" in row.reason and row.weight}
    assert changed == set(expected)


@pytest.mark.parametrize(
    ("function", "node"),
    [(F.gelu, "gelu"), ("gelu", "gelu"), ("chunk", "chunk"), ("split", "chunk"), (torch.matmul, "matmul_1")],
    ids=spelling,
)
def test_functions_match_by_object_name_and_op(function, node):
    gm = fuse(standardize(trace(build("attention"))[1]))
    match = Match(function=function)
    found = [n.name for n in gm.graph.nodes if match(n)]
    assert node in found
    assert all(n.op in ("call_function", "call_method") for n in gm.graph.nodes if n.name in found)
    assert len(found) <= 2


SPELLINGS = {
    "add": lambda x, y: [torch.add(x, y), x + y, x.add(y), operator.iadd(x, y), 1 + x],
    "sub": lambda x, y: [torch.sub(x, y), x - y, x.subtract(y), 1 - x],
    "mul": lambda x, y: [torch.mul(x, y), x * y, x.multiply(y), 2 * x],
    "div": lambda x, y: [torch.div(x, y), x / y, x.true_divide(y), 1 / x],
    "matmul": lambda x, y: [torch.matmul(x, y), x @ y, x.mm(y)],
    "cat": lambda x, y: [torch.cat([x, y]), torch.concat([x, y])],
}


@pytest.mark.parametrize("op", SPELLINGS)
def test_a_function_means_every_spelling_of_its_operation(op):
    """``exclude_function_type: [torch.add]`` also means ``x + y``."""

    class All(nn.Module):
        def forward(self, x, y):
            return [value for found in SPELLINGS.values() for value in found(x, y)]

    graph = fx.symbolic_trace(All()).graph
    expected = {identify(node).name: 0 for node in graph.nodes}
    for asked in (getattr(torch, op), op, f"torch.{op}", getattr(torch.Tensor, op, op)):
        found = [node for node in graph.nodes if Match(function=asked)(node)]
        assert [identify(node).name for node in found] == [op] * len(SPELLINGS[op](torch.ones(2, 2), torch.ones(2, 2)))
    assert len(expected) > len(SPELLINGS)
    assert not any(Match(function=f"mine.{op}")(node) for node in graph.nodes)


@pytest.mark.parametrize("key", ["exclude_function_type", "additional_function_type"])
def test_an_operator_is_left_float_or_quantized_by_its_function(key):
    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.b(torch.relu(self.a(x) + x).add(1.0))

    backend = "TSQAT" if key.startswith("exclude") else "ArmCPU"
    plain = prepare_by_platform(Sums(), backend).quant_report
    report = prepare_by_platform(Sums(), backend, {"extra_quantizer_dict": {key: [torch.add]}}).quant_report
    before, after = ([row.reason for row in rows if row.op == "add"] for rows in (plain, report))
    assert len(before) == 2
    word = "left float by exclude_function_type" if key.startswith("exclude") else "asked for by extra_quantizer_dict"
    assert not any(reason.startswith(word) for reason in before)
    assert all(reason.startswith(word) for reason in after)


@pytest.mark.parametrize("function", [F.linear, "linear"])
def test_a_functional_layer_matches_by_its_function(function):
    gm = prepared("functional_weights", config=override({"function": function}, weight={"bit": 4}))
    found = widths(gm)
    assert sorted(found.values()) == [4, 8]
    assert {path for path, bits in found.items() if bits == 4} == {"linear"}


@pytest.mark.parametrize(("first", "second"), [(4, 6), (6, 4)])
def test_the_later_rule_wins(first, second):
    rules = [
        {"match": {"module": "*"}, "weight": {"bit": first}},
        {"match": {"module": "layer1.0.*"}, "weight": {"bit": second}},
    ]
    found = widths(prepared("residual", config={"overrides": rules}))
    assert found["layer1.0.conv1"] == found["layer1.0.conv2"] == second
    assert found["stem"] == found["fc"] == first
    assert set(widths(prepared("residual", config={"overrides": rules[::-1]})).values()) == {first}


def test_rules_for_one_layer_add_up():
    rules = [
        {"match": {"module": "stem"}, "weight": {"bit": 4, "observer": "EMAMinMax"}},
        {"match": {"type": "Conv2d"}, "weight": {"symmetry": False}},
    ]
    quant = prepared("residual", config={"overrides": rules}).stem.weight_fake_quant
    assert (quant.scheme.bit_width, quant.scheme.symmetric) == (4, False)
    assert type(quant.observer) is EMAMinMaxObserver


def test_a_rule_stands_above_the_global_configuration():
    config = {"extra_qconfig_dict": {"w_qscheme": {"bit": 4}}} | override({"module": "stem"}, weight={"bit": 8})
    found = widths(prepared("residual", config=config))
    assert found.pop("stem") == 8
    assert set(found.values()) == {4}


@pytest.mark.parametrize(
    ("change", "attribute", "expected"),
    [
        ({"bit": 4}, lambda q: (q.scheme.quant_min, q.scheme.quant_max), (-7, 7)),
        ({"bit_width": 3}, lambda q: q.scheme.bit_width, 3),
        ({"symmetry": False}, lambda q: q.has_zero_point, True),
        ({"symmetric": False}, lambda q: q.scheme.quant_min, -128),
        ({"symmetric": False, "signed": False}, lambda q: q.scheme.quant_min, 0),
        ({"symmetric": False, "signed": False, "narrow_range": True}, lambda q: q.scheme.quant_min, 1),
        ({"narrow_range": False}, lambda q: q.scheme.quant_min, -128),
        ({"per_channel": False}, lambda q: q.scale.shape, ()),
        ({"observer": "EMAMinMax"}, lambda q: type(q.observer), EMAMinMaxObserver),
        ({"observer": "EMAMinMaxObserver"}, lambda q: type(q.observer), EMAMinMaxObserver),
        ({"observer": EMAMinMaxObserver}, lambda q: type(q.observer), EMAMinMaxObserver),
        ({"observer": "MSE", "observer_args": {"p": 3.5}}, lambda q: getattr(q.observer, "p", None), 3.5),
        ({"fake_quantize": "Fixed"}, type, FixedFakeQuantize),
        ({"fake_quantize": "FixedFakeQuantize", "pot_scale": True}, lambda q: q.scheme.scale_bits == 1, True),
        ({"fake_quantize_args": {"grad_factor": 0.5}}, lambda q: q.grad_factor, 0.5),
    ],
    ids=spelling,
)
def test_every_part_of_a_weight_can_be_set(change, attribute, expected):
    gm = prepared("residual", config=override({"module": "stem"}, weight=change))
    assert attribute(gm.stem.weight_fake_quant) == expected
    assert attribute(gm.fc.weight_fake_quant) != expected


def test_weight_none_leaves_the_weight_float():
    gm = prepared("residual", config=override({"module": "layer1.0.conv1"}, weight=None))
    assert "layer1.0.conv1" not in widths(gm)
    assert len(widths(gm)) == 6
    assert gm.quant_report.row("layer1.0.conv1").weight == ""
    assert gm.quant_report.row("layer1.0.conv1").output == "int8 sym per-tensor"


def test_output_sets_the_value_a_layer_produces():
    gm = prepared("residual", config=override({"module": "layer1.0.conv1"}, output={"bit": 4}))
    assert outputs(gm)["layer1_0_conv1"] == "int4 sym per-tensor"
    assert set(outputs(gm).values()) - {"int4 sym per-tensor"} == {"", "int8 sym per-tensor"}
    assert gm.get_submodule("layer1_0_conv1_act_fake_quant").scheme.bit_width == 4


def test_output_none_leaves_the_value_float():
    gm = prepared("residual", config=override({"module": "layer1.0.conv1"}, output=None))
    assert outputs(gm)["layer1_0_conv1"] == ""
    reader = node_named(gm, "layer1_0_conv2")
    assert reader.args[0].name == "layer1_0_conv1"
    assert "input_fake_quant" not in reader.kwargs


def test_activation_sets_the_values_a_layer_reads():
    gm = prepared("residual", config=override({"module": "layer1.0.conv2"}, activation={"bit": 4}))
    assert outputs(gm)["layer1_0_conv1"] == "int4 sym per-tensor"
    assert outputs(gm)["layer1_0_conv2"] == "int8 sym per-tensor"


@pytest.mark.parametrize("backend", ["TSQAT", "ONNXRuntime", "TensorRT"])
def test_activation_none_leaves_what_a_layer_reads_float(backend):
    gm = prepared("residual", backend, override({"module": "layer1.0.conv2"}, activation=None))
    reader = node_named(gm, "layer1_0_conv2")
    assert reader.args[0].name == "layer1_0_conv1"
    assert "input_fake_quant" not in reader.kwargs
    assert "layer1.0.conv2" in widths(gm)


def test_activation_none_for_one_of_two_readers():
    gm = prepared("tuple_output", "TensorRT", override({"module": "out"}, activation=None))
    assert node_named(gm, "out").args[0].name == "leaky_relu"
    assert node_named(gm, "conv").args[0].name == "x_act_fake_quant"


def test_the_model_input_can_be_set():
    gm = prepared("conv_bn_relu", config=override({"node": "x"}, output={"bit": 16}))
    assert outputs(gm)["x"] == "int16 sym per-tensor"
    assert set(outputs(gm).values()) - {"int16 sym per-tensor"} == {"int8 sym per-tensor"}


def test_a_value_that_shares_a_scale_takes_its_group_along():
    matches = [{"module": "point"}, {"module": "wide.2"}, {"module": "project"}, {"function": "cat"}]
    gm = prepared("concat", config={"overrides": [{"match": match, "output": {"bit": 6}} for match in matches]})
    found = outputs(gm)
    assert {found[name] for name in ("point", "wide_2", "project", "cat")} == {"int6 sym per-tensor"}
    assert found["last"] == "int8 sym per-tensor"
    assert len({row.group for row in gm.quant_report if row.output == "int6 sym per-tensor"}) == 1


def test_the_widest_request_of_a_group_wins():
    gm = prepared("concat", config=override({"module": "wide.2"}, output={"bit": 16}))
    found = outputs(gm)
    assert {found[name] for name in ("point", "wide_2", "project", "cat")} == {"int16 sym per-tensor"}
    assert found["wide_0"] == "int8 sym per-tensor"


NO_EFFECT = {
    "the weight of what has none": ("TSQAT", "concat", {"module": "pool"}, {"weight": {"bit": 4}}),
    "the weight of the model input": ("TSQAT", "concat", {"node": "x"}, {"weight": {"bit": 4}}),
    "the output of a pass-through op": ("TSQAT", "concat", {"module": "pool"}, {"output": {"bit": 4}}),
    "no output of a pass-through op": ("TSQAT", "concat", {"module": "pool"}, {"output": None}),
    "what a backend has no rule for": ("TensorRT", "squeeze_excite", {"module": "gate"}, {"output": {"bit": 4}}),
    "what an op outside the table reads": ("TSQAT", "padding_modes", {"node": "pad_1"}, {"activation": {"bit": 4}}),
    "an empty change": ("TSQAT", "concat", {"module": "last"}, {"weight": {}}),
}


@pytest.mark.parametrize("case", NO_EFFECT)
def test_a_rule_has_an_effect_or_raises(case):
    """Here it cannot have one, or the report must show it."""
    backend, name, match, changes = NO_EFFECT[case]
    before = [(row.node, row.output, row.weight, row.group) for row in prepared(name, backend).quant_report]
    with contextlib.suppress(ConfigError):
        report = prepared(name, backend, override(match, **changes)).quant_report
        assert [(row.node, row.output, row.weight, row.group) for row in report] != before
        assert any("overrides[0]" in row.reason for row in report)


@pytest.mark.parametrize(
    ("match", "nearest"),
    [
        ({"module": "layer1.0.conv3"}, "layer1.0.conv"),
        ({"module": "layer2.*"}, "layer1"),
        ({"node": "layer1_0_convX"}, "layer1_0_conv"),
        ({"type": "ConvTranspose2d"}, ""),
        ({"type": nn.Embedding}, ""),
        ({"function": "softmax"}, ""),
        ({"function": torch.matmul}, ""),
        ({"module": "fc", "type": "Conv2d"}, ""),
    ],
    ids=spelling,
)
def test_a_rule_that_matches_nothing_is_an_error(match, nearest):
    with pytest.raises(ConfigError, match=r"overrides\[0\].*matches no node") as caught:
        prepared("residual", config=override(match, weight={"bit": 4}))
    assert nearest in str(caught.value)


class Products(nn.Module):
    """Has a function, a path and a type of module, and names of nodes."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Sequential(nn.Linear(4, 4), nn.Conv1d(1, 1, 1))

    def forward(self, x):
        return self.last(torch.matmul(self.first(x), x))


@pytest.mark.parametrize(
    ("match", "hint"),
    [
        ({"type": "matmul"}, "'matmul' is a function: write 'function' instead of 'type'."),
        ({"module": "torch.matmul"}, "'torch.matmul' is a function: write 'function' instead of 'module'."),
        ({"function": "first"}, "'first' is the path of a module: write 'module' instead of 'function'."),
        ({"type": "last.*"}, "'last.*' is the path of a module: write 'module' instead of 'type'."),
        ({"function": nn.Linear}, "'Linear' is the type of a module: write 'type' instead of 'function'."),
        ({"module": "Linear"}, "'Linear' is the type of a module: write 'type' instead of 'module'."),
        ({"module": "last_0"}, "'last_0' is the name of a node: write 'node' instead of 'module'."),
        ({"module": "last.0", "type": "matmul"}, "'matmul' is a function: write 'function' instead of 'type'."),
        ({"module": "last.0", "type": "Conv1d"}, "Each of 'module', 'type' matches some, but no node matches all."),
        ({"type": "Conv2d"}, "The nearest is 'Conv1d'."),
        ({"function": "matmull"}, "The nearest is 'matmul'."),
        ({"node": "last_2"}, "The nearest is 'last_1'."),
    ],
    ids=spelling,
)
def test_a_name_under_the_wrong_key_is_told_the_right_one(match, hint):
    with pytest.raises(ConfigError) as caught:
        prepare_by_platform(Products(), "TSQAT", override(match, output=None))
    assert str(caught.value).endswith(f"matches no node of the model. {hint}")


@pytest.mark.parametrize(
    ("key", "value", "hint"),
    [
        ("exclude_module_name", "matmul", "'matmul' is a function: put it into exclude_function_type."),
        ("exclude_node_name", "Linear", "is the type of a module: put 'first', 'last_0' into exclude_node_name."),
        ("additional_module_type", "first", "is the path of a module: put 'first' into additional_node_name."),
        ("additional_function_type", nn.Linear, "is the type of a module: put it into additional_module_type."),
    ],
)
def test_a_name_in_the_wrong_list_is_told_the_right_one(key, value, hint):
    with pytest.raises(ConfigError, match=rf"{key}: .* matches no node") as caught:
        prepare_by_platform(Products(), "TSQAT", {"extra_quantizer_dict": {key: [value]}})
    assert str(caught.value).endswith(hint)


def test_a_broken_regular_expression_is_an_error():
    with pytest.raises(ConfigError, match="not a regular expression") as caught:
        prepared("residual", config=override({"module": "re:layer1[("}, weight={"bit": 4}))
    assert "layer1[(" in str(caught.value)


def test_check_all_match_names_the_entry():
    gm = trace(build("conv_bn_relu"))[1]
    check_all_match(gm, [Match(module="conv1"), Match(node="fc")])
    with pytest.raises(ConfigError, match="exclude_module_name: 'conv9'") as caught:
        check_all_match(gm, [Match(module="conv1"), Match(module="conv9", where="exclude_module_name")])
    assert "The nearest is 'conv" in str(caught.value)


def test_a_tensor_change_keeps_what_it_does_not_name():
    base = TensorQConfig(QuantizeScheme(narrow_range=True), "MSE", "Learnable", {"p": 3.0}, {"grad_factor": 2.0})
    changed = TensorChange({"bit_width": 4}).applied_to(base)
    assert changed == dataclasses.replace(base, scheme=QuantizeScheme(bit_width=4, narrow_range=True))
    other = TensorChange(modules={"observer": "MinMax"}).applied_to(base)
    assert (other.observer, dict(other.observer_args), dict(other.fake_quantize_args)) == (
        "MinMax",
        {},
        {"grad_factor": 2.0},
    )
    assert TensorChange().applied_to(base) == base


def test_rules_are_frozen_values():
    rule = Override(Match(module="a"), {"weight": None})
    assert rule == Override(Match(module="a"), {"weight": None})
    with pytest.raises(dataclasses.FrozenInstanceError):
        rule.match = Match(module="b")

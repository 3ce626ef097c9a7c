"""Rules at work: functions that override, ``value``, fixed ranges, and layers that are called twice."""

import pytest
import torch
from torch import nn

from fxqat import prepare_by_platform
from fxqat.config.effective import effective_config
from fxqat.errors import ConfigError
from fxqat.scheme import QConfig
from tests.models import prepared, unlimited


def decided(gm):
    return [(row.node, row.status, row.output, row.weight, row.group) for row in gm.quant_report]


def test_a_function_overrides_what_it_answers_for():
    seen = {}

    def choose(path, current):
        seen[path] = current
        if path.endswith("conv1"):
            return {"weight": {"bit": current.weight.scheme.bit_width // 2}}
        return {"output": None} if path == "fc" else None

    gm = prepared("residual", config={"extra_qconfig_dict": {"w_qscheme": {"bit": 6}}, "overrides": [choose]})
    widths = {row.target: row.weight.split()[0] for row in gm.quant_report if row.weight}
    assert {path for path, width in widths.items() if width == "int3"} == {"layer1.0.conv1", "layer1.1.conv1"}
    assert set(widths.values()) == {"int3", "int6"}
    assert gm.quant_report.row("fc").output == ""
    assert isinstance(seen["stem"], QConfig)
    assert {"add", "mean", "stem"} <= set(seen)
    assert "x" not in seen


def test_a_function_is_written_out_as_the_rules_it_stands_for():
    rules = [
        {"match": {"module": "*conv*"}, "weight": {"bit": 6}},
        lambda path, current: {"activation": None} if current.weight and current.weight.scheme.bit_width == 6 else None,
    ]
    gm = prepared("residual", unlimited("TensorRT"), {"overrides": rules})
    found = effective_config(gm)
    assert {"match": {"node": "layer1_0_conv1"}, "activation": None} in found["overrides"]
    assert decided(prepared("residual", unlimited("TensorRT"), found)) == decided(gm)


def test_value_changes_how_and_not_where():
    before = prepared("residual", unlimited("TensorRT"))
    rules = [{"match": {"node": "*"}, "value": {"bit": 6}}]
    after = prepared("residual", unlimited("TensorRT"), {"overrides": rules})
    assert [row[0] for row in decided(after) if row[2]] == [row[0] for row in decided(before) if row[2]]
    assert {row[2] for row in decided(after)} == {"", "int6 sym per-tensor"}
    assert [(n.name, str(n.args)) for n in after.graph.nodes] == [(n.name, str(n.args)) for n in before.graph.nodes]
    assert [row[3] for row in decided(after)] == [row[3] for row in decided(before)]


@pytest.mark.parametrize(("first", "second"), [("value", "activation"), ("activation", "value")])
def test_of_value_and_activation_the_later_rule_wins(first, second):
    matches = {"value": {"node": "layer1_0_conv1"}, "activation": {"module": "layer1.0.conv2"}}
    rules = [{"match": matches[part], part: {"bit": bit}} for part, bit in ((first, 5), (second, 6))]
    gm = prepared("residual", config={"overrides": rules})
    assert gm.quant_report.row("layer1_0_conv1").output == "int6 sym per-tensor"
    assert gm.quant_report.row("stem").output == "int8 sym per-tensor"


def test_a_fixed_range_is_taken_as_given():
    gm = prepared("residual", config={"overrides": [{"match": {"node": "fc"}, "output": {"fixed_range": [-4, 4]}}]})
    quant = gm.fc_act_fake_quant
    assert quant.scheme.fixed_range == (-4.0, 4.0)
    quant.fake_quant_enabled = True
    torch.testing.assert_close(quant(torch.tensor([100.0])).item(), 4.0, rtol=0.1, atol=0)


def test_a_fixed_range_of_a_shared_scale_is_refused():
    rule = {"match": {"module": "point"}, "output": {"fixed_range": [-4, 4]}}
    with pytest.raises(ConfigError, match=r"overrides\[0\]: fixed_range for 'point' has no effect") as caught:
        prepared("concat", config={"overrides": [rule]})
    assert "Drop it" in str(caught.value)


def test_naming_an_observer_gives_up_a_known_range():
    rule = {"match": {"function": "softmax"}, "output": {"observer": "MSE"}}
    assert prepared("attention").softmax_act_fake_quant.scheme.fixed_range == (0.0, 1.0)
    quant = prepared("attention", config={"overrides": [rule]}).softmax_act_fake_quant
    assert (quant.scheme.fixed_range, type(quant.observer).__name__) == (None, "MSEObserver")


@pytest.mark.parametrize(
    ("name", "match", "node"),
    [("squeeze_excite", {"type": "Hardsigmoid"}, "gate"), ("attention", {"function": "softmax"}, "softmax")],
)
def test_disable_an_op_type(name, match, node):
    """TinyNeuralNetwork's action ``disable``, as the page of the configuration writes it."""
    assert prepared(name).quant_report.row(node).output
    gm = prepared(name, config={"overrides": [{"match": match, "activation": None, "output": None}]})
    call = next(n for n in gm.graph.nodes if n.name == node)
    assert gm.quant_report.row(node).status == "float"
    assert not any("fake_quant" in str(n.target) for n in (*call.all_input_nodes, *call.users))


def test_rewrite_an_op_type():
    """TinyNeuralNetwork's action ``rewrite``: float itself, with quantized inputs and output."""
    gm = prepared("residual", config={"overrides": [{"match": {"type": "Linear"}, "weight": None}]})
    call = next(n for n in gm.graph.nodes if n.name == "fc")
    assert type(gm.fc).__name__ == "FusedLayer" or type(gm.fc) is torch.nn.Linear
    assert all("fake_quant" in str(n.target) for n in (*call.all_input_nodes, *call.users))


class Twice(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.head(torch.relu(self.head(x)))


@pytest.mark.parametrize("change", [{"bit": 4}, None])
def test_a_layer_that_is_called_twice_has_one_weight(change):
    one, both = ({"match": match, "weight": change} for match in ({"node": "head_1"}, {"module": "head"}))
    with pytest.raises(ConfigError, match="'head' and 'head_1' are calls of one layer") as caught:
        prepare_by_platform(Twice(), "TSQAT", {"overrides": [one]})
    assert "match: {module: head}" in str(caught.value)
    gm = prepare_by_platform(Twice(), "TSQAT", {"overrides": [both]})
    assert len({row.weight for row in gm.quant_report if row.target == "head"}) == 1


class Embedded(nn.Module):
    """Reads a table of embeddings."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 4)
        self.fc = nn.Linear(4, 4)

    def forward(self, i):
        return torch.softmax(self.fc(self.table(i)), -1)


@pytest.mark.parametrize("added", [{"additional_module_type": ["Embedding"]}, {"additional_node_name": ["table"]}])
def test_the_table_of_an_embedding_can_be_added(added):
    assert prepare_by_platform(Embedded(), "ONNXRuntime").quant_report.row("table").weight == ""
    gm = prepare_by_platform(Embedded(), "ONNXRuntime", {"extra_quantizer_dict": added})
    assert gm.quant_report.row("table").weight == "int8 sym per-channel narrow"
    assert gm.quant_report.row("table").reason.startswith("asked for by extra_quantizer_dict")


def test_a_table_that_cannot_be_quantized_cannot_be_added():
    model = Embedded()
    model.table = nn.Embedding(9, 4, sparse=True)
    added = {"extra_quantizer_dict": {"additional_module_type": ["Embedding"]}}
    with pytest.raises(ConfigError, match="additional_module_type: 'table' cannot be quantized: sparse=True"):
        prepare_by_platform(model, "ONNXRuntime", added)
    assert prepare_by_platform(model, "ONNXRuntime").quant_report.row("table").weight == ""


class Tied(nn.Module):
    """The last layer has the table as its weight."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 4)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.table.weight

    def forward(self, i):
        return self.head(self.table(i))


def test_a_tied_table_is_quantized_as_the_layer():
    change = {"match": {"module": "head"}, "weight": {"bit": 6}}
    gm = prepare_by_platform(Tied(), "TSQAT", {"overrides": [change]})
    assert gm.quant_report.row("table").weight == gm.quant_report.row("head").weight == "int6 sym per-channel narrow"
    assert gm.table.weight_fake_quant is gm.head.weight_fake_quant
    apart = {"match": {"module": "table"}, "weight": {"bit": 4}}
    with pytest.raises(ConfigError, match="'table' and 'head' share one weight"):
        prepare_by_platform(Tied(), "TSQAT", {"overrides": [change, apart]})


def test_dynamic_activations_are_refused_where_the_target_cannot():
    change = {"match": {"module": "fc"}, "activation": "dynamic"}
    with pytest.raises(ConfigError, match="TSQAT cannot quantize the values that 'fc' .* scales in the file") as caught:
        prepare_by_platform(Embedded(), "TSQAT", {"overrides": [change]})
    assert "These backends can: ONNXRuntime, ONNXRuntime_AVX2" in str(caught.value)
    with pytest.raises(ConfigError, match="activation: dynamic: TSQAT cannot"):
        prepare_by_platform(Embedded(), "TSQAT", {"activation": "dynamic"})
    narrow = change | {"weight": {"bit": 4}}
    with pytest.raises(ConfigError, match="needs a weight of 5 to 8 bits"):
        prepare_by_platform(Embedded(), "ONNXRuntime", {"overrides": [narrow]})
    softmax = {"match": {"function": "softmax"}, "activation": "dynamic"}
    added = {"extra_quantizer_dict": {"additional_function_type": ["softmax"]}}
    with pytest.raises(ConfigError, match="activation has no effect"):
        prepare_by_platform(Embedded(), "ONNXRuntime", {"overrides": [softmax], **added})


@pytest.mark.parametrize("activation", ["dynamic", "float"])
def test_the_activations_of_a_whole_model(activation):
    gm = prepare_by_platform(Embedded(), "ONNXRuntime", {"activation": activation})
    rows = {row.node: row for row in gm.quant_report}
    assert all(row.output == "" for row in rows.values())
    assert rows["table"].weight == rows["fc"].weight == "int8 sym per-channel narrow"
    wanted = {
        "dynamic": "quantizes the values that it reads at run time",
        "float": "weights only: it reads float values",
    }
    assert rows["fc"].reason.startswith(wanted[activation])
    assert gm.quant_report.weights_only == (("table",) if activation == "dynamic" else ("table", "fc"))
    again = prepare_by_platform(Embedded(), "ONNXRuntime", effective_config(gm))
    assert [row.weight for row in again.quant_report] == [row.weight for row in gm.quant_report]
    assert str(again.graph) == str(gm.graph)


def test_what_the_activations_of_a_whole_model_can_be():
    with pytest.raises(ConfigError, match="activation must be 'static'.*got 'weight_only'"):
        prepare_by_platform(Embedded(), "ONNXRuntime", {"activation": "weight_only"})
    assert prepare_by_platform(Embedded(), "ONNXRuntime", {"activation": None}).quant_report.row("fc").weight


def test_an_addition_without_effect_is_an_error():
    added = {"extra_quantizer_dict": {"additional_node_name": ["softmax"]}}
    veto = {"overrides": [{"match": {"node": "softmax"}, "output": None, "activation": None}]}
    assert prepare_by_platform(Embedded(), "ONNXRuntime", added).quant_report.row("softmax").output
    with pytest.raises(ConfigError, match="additional_node_name: 'softmax' has no effect"):
        prepare_by_platform(Embedded(), "ONNXRuntime", added | veto)

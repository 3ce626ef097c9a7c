"""Layers between float ops compute in integers only where that pays for the conversions."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import fxqat
from fxqat.config.effective import effective_config
from fxqat.custom_quantizer.backends.onnxruntime import ONNXRUNTIME
from fxqat.errors import ConfigError
from tests.models import BasicBlock


def statuses(model, least_work, config=None, shape=(1, 8, 8, 8)):
    """By node: whether it computes on integers, and why."""
    spec = replace(ONNXRUNTIME, least_work=least_work)
    gm = fxqat.prepare_by_platform(model.eval(), spec, config, example_inputs=(torch.randn(shape),))
    return {row.node: row for row in gm.quant_report.rows}


def is_float(row):
    return "conversions would cost too much" in row.reason


def conv(cin, cout, size=1, **options):
    return nn.Conv2d(cin, cout, size, padding=size // 2, **options)


@pytest.mark.parametrize(
    ("layer", "work", "shape"),
    [
        (conv(8, 24), 24 * 8 / (8 + 24), (1, 8, 8, 8)),
        (conv(8, 8, 3, groups=8), 9 * 8 / (8 + 8), (1, 8, 8, 8)),
        (conv(8, 24, 3, stride=2), 9 * 8 * 24 / (4 * 8 + 24), (1, 8, 8, 8)),
        (conv(8, 24, 3, stride=(2, 1)), 9 * 8 * 24 / (2 * 8 + 24), (1, 8, 8, 8)),
        (nn.Conv1d(8, 24, 5, stride=2), 5 * 8 * 24 / (2 * 8 + 24), (1, 8, 32)),
        (nn.Linear(8, 24), 8 * 24 / 8, (1, 8)),  # what it gives is float in any case
    ],
)
def test_work_is_for_each_value_converted(layer, work, shape):
    model = nn.Sequential(nn.Hardswish(), layer, nn.Hardswish(), nn.Flatten(), nn.LazyLinear(1000))  # the last pays
    model(torch.randn(shape))
    row = statuses(model, int(work), shape=shape)["_1"]
    assert not is_float(row)
    row = statuses(model, int(work) + 1, shape=shape)["_1"]
    assert is_float(row)
    words = f"{work:.0f} multiply-accumulates for each converted value, least_work is {int(work) + 1}"
    assert row.reason == f"conversions would cost too much: {words}"


def test_without_float_neighbours_everything_is_on_integers():
    model = nn.Sequential(conv(8, 8), nn.ReLU(), conv(8, 8, 3, groups=8), nn.MaxPool2d(2), BasicBlock(8, 8), conv(8, 8))
    rows = statuses(model, 10**6)
    assert not [row.node for row in rows.values() if is_float(row)]


def test_one_float_layer_makes_the_next_ask_again():
    model = nn.Sequential(conv(8, 8), nn.Hardswish(), conv(8, 8), nn.ReLU(), conv(8, 8), nn.MaxPool2d(2), conv(8, 80))
    rows = statuses(model, 9)
    # the first converts its result: 64 / 8; the second and the third what they read, one after the other
    assert all(is_float(rows[name]) for name in ("_0", "_2", "_4"))
    assert not is_float(rows["_6"])  # 640 / 8
    rows = statuses(model, 8)
    assert all(not is_float(rows[name]) for name in ("_0", "_2", "_4", "_6"))


class Adds(nn.Module):
    """A sum of two float values, and one of a value on integers and the sum."""

    def __init__(self):
        super().__init__()
        self.small = conv(8, 8)
        self.large = conv(8, 8, 5)
        self.act = nn.Hardswish()
        self.last = conv(8, 8, 5)

    def forward(self, x):
        x = self.act(x)
        y = self.small(x) + x
        z = self.large(y) + y
        return self.last(z)


def test_a_sum_needs_an_operand_on_integers():
    rows = statuses(Adds(), 100)
    assert is_float(rows["small"])
    assert is_float(rows["add"])
    assert rows["add"].reason == "computed in float: conversions would cost too much; read quantized by add_1, large"
    assert not is_float(rows["large"])
    assert rows["add_1"].status == "quantized"


def test_what_the_user_names_stays():
    model = Adds()
    config = {"overrides": [{"match": {"module": "small"}, "weight": {"bit": 4}}]}
    rows = statuses(model, 100, config)
    assert rows["small"].weight == "int4 sym per-channel narrow"
    assert rows["add"].status == "quantized"


class Twice(nn.Module):
    """One layer, called between float ops and between layers."""

    def __init__(self):
        super().__init__()
        self.shared = conv(8, 8)
        self.other = conv(8, 8, 5)

    def forward(self, x):
        return self.other(self.shared(nn.functional.hardsigmoid(self.shared(self.other(x)))))


def test_all_calls_of_a_layer_or_none():
    rows = statuses(Twice(), 5)
    assert not is_float(rows["shared"])
    assert not is_float(rows["shared_1"])
    rows = statuses(Twice(), 9)
    assert not is_float(rows["other"])
    assert is_float(rows["shared"])
    assert is_float(rows["shared_1"])


def test_where_no_layer_pays_all_compute_in_integers():
    rows = statuses(nn.Sequential(nn.Hardswish(), conv(8, 8), nn.Hardswish()), 64)
    assert rows["_1"].weight
    assert not is_float(rows["_1"])


def test_the_user_can_have_everything_on_integers():
    model = nn.Sequential(nn.Hardswish(), conv(8, 8), nn.Hardswish(), nn.Flatten(), nn.Linear(128, 1000))
    gm = fxqat.prepare_by_platform(model, "ONNXRuntime")
    assert [row.node for row in gm.quant_report.rows if row.weight] == ["_4"]
    gm = fxqat.prepare_by_platform(model, "ONNXRuntime", {"extra_quantizer_dict": {"least_work": 0}})
    assert [row.node for row in gm.quant_report.rows if row.weight] == ["_1", "_4"]
    for wrong in (-1, "none", 1.5, True):
        with pytest.raises(ConfigError, match="least_work must be a number of multiply-accumulates"):
            fxqat.prepare_by_platform(model, "ONNXRuntime", {"extra_quantizer_dict": {"least_work": wrong}})


@pytest.mark.parametrize(
    ("model", "config"),
    [
        (Adds(), {"extra_quantizer_dict": {"least_work": 0}}),
        (Adds(), {"extra_quantizer_dict": {"least_work": 100}}),
        (Adds(), None),  # no layer pays: all compute in integers
    ],
    ids=["all", "some", "none pays"],
)
def test_the_effective_configuration_places_the_same(model, config):
    gm = fxqat.prepare_by_platform(model, "ONNXRuntime", config)
    again = fxqat.prepare_by_platform(model, "ONNXRuntime", effective_config(gm))
    rows = [(row.node, row.status, row.output, row.weight, row.group) for row in gm.quant_report]
    assert rows == [(row.node, row.status, row.output, row.weight, row.group) for row in again.quant_report]
    assert effective_config(again)["overrides"] == effective_config(gm)["overrides"]


# optimize_for: size

SIZE = {"optimize_for": "size"}


class Light(nn.Module):
    """Layers that do not pay for conversions, one of them beside integers, and two that pay."""

    def __init__(self):
        super().__init__()
        self.small = conv(8, 8)
        self.large = conv(8, 8, 5)
        self.after = conv(8, 8)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.last = conv(8, 8, 5)

    def forward(self, x):
        x = self.small(nn.functional.hardswish(x))
        x = nn.functional.hardswish(self.after(self.large(x)))
        return self.last(nn.functional.hardswish(self.up(x)))


def decided(gm):
    return [(row.node, row.status, row.output, row.weight, row.group) for row in gm.quant_report]


def test_for_size_float_layers_store_integers():
    latency, size = statuses(Light(), 50), statuses(Light(), 50, SIZE)
    assert [name for name, row in latency.items() if row.weight] == ["large", "last"]
    assert [name for name, row in size.items() if row.weight] == ["small", "large", "after", "up", "last"]
    assert {name: row.output for name, row in size.items()} == {name: row.output for name, row in latency.items()}
    costly = "weights only: conversions would cost too much: 8 multiply-accumulates for each converted value"
    assert size["small"].reason == f"{costly}, least_work is 50; read quantized by large"
    assert size["after"].reason == f"{costly}, least_work is 50"
    assert size["up"].reason.startswith("weights only: ONNXRuntime has no rule for conv_transpose2d: ")


def test_for_size_the_bias_of_a_float_layer_stays_float():
    gm = fxqat.prepare_by_platform(Light().eval(), replace(ONNXRUNTIME, least_work=50), SIZE)
    with_input = [node.target for node in gm.graph.nodes if "input_fake_quant" in node.kwargs]
    assert with_input == ["large", "last"]  # "after" reads integers, too
    assert gm.quant_report.weights_only == ("small", "after", "up")
    assert ", 3 of them weights only" in str(gm.quant_report)
    x = torch.randn(2, 8, 8, 8)
    fxqat.calibrate(gm, [x])
    fxqat.enable_quantization(gm)
    after = gm.after
    rounded = after.weight_fake_quant.quantize(after.weight)
    assert not torch.equal(rounded, after.weight)
    assert torch.equal(after(x), nn.functional.conv2d(x, rounded, after.bias))


def test_for_size_overrides_win():
    rules = [
        {"match": {"module": "small"}, "weight": {"bit": 4}},
        {"match": {"module": "after"}, "activation": {"observer": "MSE"}},
        {"match": {"module": "up"}, "weight": None},
    ]
    rows = statuses(Light(), 50, SIZE | {"overrides": rules})
    assert rows["small"].weight == "int4 sym per-channel narrow"
    assert rows["small"].reason.startswith("weights only: ")
    assert "changed by overrides[0]" in rows["small"].reason
    assert rows["after"].reason.startswith("QLinearConv: integers in and out")
    assert not rows["up"].weight
    rows = statuses(Light(), 50, SIZE | {"extra_quantizer_dict": {"exclude_module_name": ["small", "up"]}})
    assert [name for name, row in rows.items() if row.weight] == ["large", "after", "last"]
    rows = statuses(Light(), 50, SIZE | {"overrides": [lambda path, now: {"weight": {"bit": 5}}]})
    assert {row.weight for row in rows.values()} == {"", "int5 sym per-channel narrow"}


@pytest.mark.parametrize("rules", [[], [{"match": {"module": "small"}, "weight": {"bit": 4}}]])
def test_for_size_the_effective_configuration_places_the_same(rules, tmp_path):
    spec = replace(ONNXRUNTIME, least_work=50)
    gm = fxqat.prepare_by_platform(Light(), spec, SIZE | {"overrides": rules})
    config = effective_config(gm, tmp_path / "effective.yaml")
    assert config["optimize_for"] == "size"
    again = fxqat.prepare_by_platform(Light(), spec, str(tmp_path / "effective.yaml"))
    assert decided(again) == decided(gm)
    assert again.quant_report.weights_only == gm.quant_report.weights_only
    assert effective_config(again) == config


@pytest.mark.parametrize("backend", ["TSQAT", "ONNXRuntime"])
def test_for_size_without_effect_is_told(backend, caplog):
    model = nn.Sequential(conv(8, 8), nn.ReLU(), conv(8, 8))
    gm = fxqat.prepare_by_platform(model, backend, SIZE)
    told = f"optimize_for='size' changes nothing: no convolution or linear layer is left float on {backend}"
    assert told in gm.quant_report.remarks
    assert told in caplog.text
    assert decided(gm) == decided(fxqat.prepare_by_platform(model, backend, {"optimize_for": "latency"}))


def test_other_backends_quantize_what_they_can():
    model = nn.Sequential(nn.Hardswish(), conv(8, 8), nn.Hardswish())
    gm = fxqat.prepare_by_platform(model, "QNN")
    assert {row.node for row in gm.quant_report.rows if row.weight} == {"_1"}

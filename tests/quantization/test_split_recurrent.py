"""Recurrent modules become chains of layers, or are unrolled; what cannot be either stays float with a reason."""

import pytest
import torch
from torch import nn

from fxqat import convert_export, enable_calibration, enable_quantization, prepare_by_platform
from fxqat.config.effective import effective_config
from fxqat.errors import ConfigError

UNROLL = {"match": {"module": "rnn"}, "recurrent": "unrolled"}


class Net(nn.Module):
    """A recurrent module before a linear layer."""

    def __init__(self, module):
        super().__init__()
        self.rnn = module
        self.last = nn.Linear(module.proj_size or module.hidden_size * (1 + module.bidirectional), 3)

    def forward(self, x):
        return self.last(self.rnn(x)[0])


class NetWithStates(Net):
    """It returns the states as well."""

    def forward(self, x):
        y, (h, c) = self.rnn(x)
        return self.last(y), h, c


class Chain(nn.Module):
    """Two modules; the second gets the states of the first, and is called twice."""

    def __init__(self, **options):
        super().__init__()
        self.a, self.b = nn.LSTM(5, 6, **options), nn.LSTM(5, 6, **options)

    def forward(self, x):
        first, states = self.a(x)
        second, (h, c) = self.b(x, states)
        return first + second, h[0] + c[-1], self.b(x, (h, c))[0]


def quantized(model, x, backend="TSQAT", **config):
    gm = prepare_by_platform(model.eval(), backend, config or None, example_inputs=(x,))
    enable_calibration(gm)
    gm(x)
    enable_quantization(gm)
    return gm


def certificate(gm, x, folder):
    report = convert_export(gm, (x,), folder / "net.onnx")
    assert report.certificate is not None
    return report.certificate


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "dropout": 0.2}, {"bidirectional": True}], ids=str)
def test_a_chain_of_modules_with_states_equals_the_model_and_its_file(options, tmp_path):
    x = torch.randn(4, 3, 5)
    model = Chain(**options)
    gm = quantized(model, x)
    assert all((a - b).abs().max() < 0.1 for a, b in zip(gm(x), model(x), strict=True))
    assert certificate(gm, x, tmp_path).passed
    assert [row.op for row in gm.quant_report].count("lstm") > 3


@pytest.mark.parametrize("backend", ["TSQAT", "Experimental", "QNN"])
def test_a_model_of_a_recurrent_layer_only_is_quantized(backend):
    x = torch.randn(4, 3, 5)
    report = quantized(nn.Sequential(nn.LSTM(5, 6)), x, backend).quant_report
    assert report.row("0").weight.startswith("int8 sym")
    assert report.row("0").status == "quantized"


def test_a_layer_that_is_asked_for_is_split_although_the_backend_has_no_rule(tmp_path):
    x = torch.randn(4, 3, 5)
    gm = quantized(Net(nn.GRU(5, 6)), x, "ONNXRuntime", extra_quantizer_dict={"additional_module_type": [nn.GRU]})
    assert gm.quant_report.row("rnn").weight == "int8 sym per-channel narrow"
    assert certificate(gm, x, tmp_path).passed


def test_an_override_and_an_exclusion_find_the_layers_of_a_module():
    x, net = torch.randn(4, 3, 5), Net(nn.LSTM(5, 6, num_layers=2))
    rows = quantized(net, x, overrides=[{"match": {"module": "rnn"}, "weight": {"bit": 4}}]).quant_report
    assert [rows.row(f"rnn.layer_{number}").weight for number in range(2)] == ["int4 sym per-channel narrow"] * 2
    rows = quantized(net, x, extra_quantizer_dict={"exclude_module_name": ["rnn.layer_1"]}).quant_report
    assert [rows.row(f"rnn.layer_{number}").status for number in range(2)] == ["quantized", "float"]


@pytest.mark.parametrize("tensor", ["output", "value"])
@pytest.mark.parametrize("match", [{"node": "rnn_1"}, {"module": "rnn"}])
def test_the_output_of_a_layer_is_that_of_its_results(tensor, match, tmp_path):
    x, net = torch.randn(4, 3, 5), NetWithStates(nn.LSTM(5, 6))
    gm = quantized(net, x, overrides=[{"match": match, tensor: {"bit": 16}}])
    rows = gm.quant_report
    results = {row.node: row.output for row in rows if row.node.startswith("rnn_1_")}
    assert {"rnn_1_output", "rnn_1_hidden", "rnn_1_cell"} == set(results)
    assert set(results.values()) == {"int16 sym per-tensor"}
    assert rows.row("rnn").output == ""
    assert convert_export(gm, (x,), tmp_path / "net.onnx").certificate.passed


def test_a_function_answers_for_a_layer_and_for_its_results():
    x, net = torch.randn(4, 3, 5), NetWithStates(nn.LSTM(5, 6))
    answers = {"rnn": {"output": {"bit": 16}}, "rnn_1_cell": {"output": {"bit": 6}}}
    gm = quantized(net, x, overrides=[lambda path, current: answers.get(path)])
    found = {row.node: row.output.split()[0] for row in gm.quant_report if row.node.startswith("rnn_1_")}
    assert found == {"rnn_1_output": "int16", "rnn_1_hidden": "int16", "rnn_1_cell": "int6"}
    again = prepare_by_platform(net, "TSQAT", effective_config(gm), example_inputs=(x,)).quant_report
    assert [(row.node, row.output) for row in again] == [(row.node, row.output) for row in gm.quant_report]


def test_a_module_with_projections_stays_whole_with_the_reason():
    model, x = Net(nn.LSTM(5, 6, proj_size=4)).eval(), torch.randn(4, 3, 5)
    row = prepare_by_platform(model, "TSQAT", example_inputs=(x,)).quant_report.row("rnn")
    assert row.status == "float"
    assert "has projections" in row.reason


@pytest.mark.parametrize(
    "module",
    [
        nn.LSTM(5, 4, bidirectional=True, batch_first=True),
        nn.GRU(5, 6),
        nn.RNN(5, 6, nonlinearity="relu", bias=False),
        nn.LSTM(5, 6, proj_size=4),
    ],
    ids=["lstm", "gru", "rnn", "projections"],
)
def test_an_unrolled_module_computes_the_same_and_its_states_can_have_16_bits(module, tmp_path):
    x, net = torch.randn(3, 3, 5), Net(module)
    wide = {"match": {"node": "re:rnn_(hidden|cell).*"}, "output": {"bit": 16}}
    gm = quantized(net, x, overrides=[UNROLL, wide], extra_qconfig_dict={"a_observer": "MinMax"})
    states = [row for row in gm.quant_report if row.node.startswith(("rnn_hidden", "rnn_cell"))]
    assert {row.output.split()[0] for row in states} == {"int16"}
    assert (gm(x) - net(x)).abs().max() < 0.1
    assert certificate(gm, x, tmp_path).passed
    assert any("steps of rnn" in line for line in gm.quant_report.remarks)
    names = [name for name, _ in gm.named_modules() if name.endswith("of_state_0.weight_fake_quant")]
    assert names == ["rnn.of_state_0.weight_fake_quant"]


def test_the_effective_configuration_keeps_the_form():
    x = torch.randn(4, 3, 5)
    gm = quantized(Net(nn.GRU(5, 6)), x, overrides=[UNROLL])
    again = prepare_by_platform(Net(nn.GRU(5, 6)).eval(), "TSQAT", effective_config(gm), example_inputs=(x,))
    assert effective_config(gm)["overrides"][0] == UNROLL
    found = [[(row.node, row.op, row.output, row.weight, row.group) for row in it.quant_report] for it in (again, gm)]
    assert found[0] == found[1]


def test_a_form_that_cannot_be_is_an_error():
    net, x = Net(nn.LSTM(5, 6)).eval(), torch.randn(4, 3, 5)
    with pytest.raises(ConfigError, match="example_inputs"):
        prepare_by_platform(net, "TSQAT", {"overrides": [UNROLL]})
    with pytest.raises(ConfigError, match="recurrent has no effect on 'last'"):
        prepare_by_platform(net, "TSQAT", {"overrides": [UNROLL | {"match": {"module": "last"}}]}, example_inputs=(x,))
    with pytest.raises(ConfigError, match="recurrent must be 'unrolled'"):
        prepare_by_platform(net, "TSQAT", {"overrides": [UNROLL | {"recurrent": "scan"}]})

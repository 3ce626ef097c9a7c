"""Bit widths of recurrent layers, and of a table whose weight a linear layer shares."""

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from fxqat import convert_export, prepare_by_platform
from fxqat.tools.mixed_precision.bank import WidthBank
from fxqat.tools.mixed_precision.costs import average_weight_bits, file_bytes, weight_bytes
from fxqat.tools.mixed_precision.curvature import curvature_scores, own_cross_entropy
from fxqat.tools.mixed_precision.graph_costs import bit_operations
from fxqat.tools.mixed_precision.latency import layer_latency, layer_models
from fxqat.tools.mixed_precision.sensitivity import sensitivity

STEPS, TOKENS, FEATURES = 9, 50, 16
TABLE, LSTM, GRU, LINEAR = "table.weight", "lstm.layer_0.weight", "gru.weight", "linear.weight"


class Tagger(nn.Module):
    """A table, an LSTM of two layers, a GRU in both directions, and two linear layers; the last has the table."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(TOKENS, FEATURES)
        self.lstm = nn.LSTM(FEATURES, FEATURES, 2, batch_first=True)
        self.gru = nn.GRU(FEATURES, 2 * FEATURES, batch_first=True, bidirectional=True)
        self.linear, self.head = nn.Linear(4 * FEATURES, FEATURES), nn.Linear(FEATURES, TOKENS)
        self.head.weight = self.table.weight
        with torch.no_grad():
            for parameter in (*self.lstm.parameters(), *self.gru.parameters(), self.linear.weight):
                parameter.mul_(3)

    def forward(self, tokens):
        x, _ = self.lstm(self.table(tokens))
        x, _ = self.gru(x)
        return self.head(self.linear(x[:, -1]))


@pytest.fixture(scope="module")
def batches():
    torch.manual_seed(1)
    return [(torch.randint(0, TOKENS, (8, STEPS)),) for _ in range(2)]


@pytest.fixture(scope="module")
def model():
    return Tagger().eval()


@pytest.fixture(scope="module")
def bank(model, batches):
    return WidthBank(model, batches, (3, 4, 8), (8,), backend="Experimental")


def widths_of(bank, bits, **others):
    """So many bits for all weights, and others for some."""
    return {name: bits if unit.is_weight else 8 for name, unit in bank.units.items()} | others


def test_the_weights_of_a_layer_are_one_unit(bank):
    weights = {name: unit.tensors for name, unit in bank.units.items() if unit.is_weight}
    assert weights == {
        TABLE: ("table.weight", "head.weight"),
        LSTM: ("lstm.layer_0.weight_ih", "lstm.layer_0.weight_hh"),
        "lstm.layer_1.weight": ("lstm.layer_1.weight_ih", "lstm.layer_1.weight_hh"),
        GRU: ("gru.weight_ih", "gru.weight_hh"),
        LINEAR: ("linear.weight",),
    }
    assert len(bank.units[TABLE].rules(4)) == 2


@pytest.mark.parametrize("name", [TABLE, LSTM, GRU])
def test_a_mixed_model_is_the_one_of_its_rules(bank, model, batches, name):
    widths = widths_of(bank, 8, **{name: 4})
    gm = bank.mix(widths)
    rules = [rule for unit, bits in widths.items() for rule in bank.units[unit].rules(bits)]
    other = prepare_by_platform(model, "Experimental", {"overrides": rules}, example_inputs=batches[0])
    assert [row.weight for row in gm.quant_report] == [row.weight for row in other.quant_report]
    narrow = {row.node for row in gm.quant_report if row.weight.startswith("int4")}
    assert len(narrow) == (2 if name == TABLE else 1)


def test_the_file_has_the_bits_and_tied_weights_once(bank, batches, tmp_path):
    report = convert_export(bank.mix(widths_of(bank, 4)), batches[0], tmp_path / "a.onnx", opset_version=21)
    assert report.certificate.passed
    stored = {t.name: t for t in onnx.load(report.onnx_path).graph.initializer if t.name.endswith("_quantized")}
    weights = {name: t for name, t in stored.items() if "weight" in name}
    assert {t.data_type for t in weights.values()} == {onnx.TensorProto.INT4}
    values = sum(int(np.prod(t.dims)) for t in weights.values())
    assert weight_bytes(bank).of(widths_of(bank, 4)) == values / 2
    assert average_weight_bits(bank).of(widths_of(bank, 4)) == 4


@pytest.mark.parametrize("bits", [4, 8])
def test_the_size_of_the_file_is_known(bank, batches, bits, tmp_path):
    cost, widths = file_bytes(bank, batches[0]), widths_of(bank, bits)
    report = convert_export(bank.mix(widths), batches[0], tmp_path / "a.onnx", opset_version=21, verify=False)
    assert cost.of(widths) == pytest.approx(report.onnx_path.stat().st_size, abs=256)


def test_the_hidden_state_is_float_in_bit_operations(bank, batches):
    sizes = {name: bank.model.get_submodule(name.removesuffix(".weight")).weight_tensors() for name in (LSTM, GRU)}
    for name, tensors in sizes.items():
        inputs, states = (STEPS * sum(tensor.numel() for tensor in found) for found in tensors)
        cost = bit_operations(bank, batches[0])
        saved = cost.of(widths_of(bank, 8)) - cost.of(widths_of(bank, 8, **{name: 4}))
        assert saved == pytest.approx(4 * (8 * inputs + 32 * states))


def test_traces_find_what_running_finds(bank, batches):
    alone, found = (sensitivity(bank, batches, method, probes=64).scores for method in ("alone", "hessian"))
    for name in (TABLE, LSTM, GRU):
        assert 1 / 3 < found[name][4] / alone[name][4] < 3


@pytest.mark.parametrize(("kind", "gate", "place"), [(nn.LSTM, 3, 1), (nn.LSTM, 1, 2), (nn.GRU, 0, 1)])
@pytest.mark.parametrize("name", ["weight_ih_l0_reverse", "weight_hh_l0"])
def test_noise_is_that_of_the_rows_of_a_gate(kind, gate, place, name):
    """Gates of torch's parameters and their places in ONNX's W and R: the second direction follows the first."""
    torch.manual_seed(0)
    model = nn.Sequential(kind(FEATURES, FEATURES, bidirectional=True)).eval()
    x = torch.randn(STEPS, 8, FEATURES)
    bank = WidthBank(model, [(x,)], (4, 8), (8,), backend="Experimental")
    (unit,) = (unit for unit in bank.units.values() if unit.is_weight)
    qat = bank.model.get_submodule(unit.layers[0])
    parameter, gates = getattr(qat, name), len(qat.cell.gates)
    rows = slice(gate * FEATURES, (gate + 1) * FEATURES)

    def of_one_gate(loss, tensors, samples):
        found = [torch.zeros_like(tensor, dtype=torch.float64) for tensor in tensors]
        (one,) = (mask for mask, tensor in zip(found, tensors, strict=True) if tensor is parameter)
        one[rows] = 1
        return found

    scores = curvature_scores(bank, [(x,)], [None], own_cross_entropy, of_one_gate)[unit.name]
    kind_of = 0 if "ih" in name else 1
    start = (gates * name.endswith("reverse") + place) * FEATURES
    stacked = qat.weight_values()[kind_of]
    torch.testing.assert_close(stacked[start : start + FEATURES], parameter[rows])
    for bits, score in scores.items():
        noise = (bank.quants(unit.name, bits)[kind_of].quantize(stacked) - stacked)[start : start + FEATURES]
        assert score == pytest.approx(0.5 * float(noise.detach().double().square().sum()), rel=1e-5)
        assert score > 0


def test_without_switches_both_weights_of_a_layer_off(bank, batches):
    alone, without = (sensitivity(bank, batches, method).scores for method in ("alone", "without"))
    assert alone[GRU][3] > alone[GRU][4] > 4 * alone[GRU][8]
    assert without[GRU][3] > 10 * abs(without[GRU][8])


def test_recurrent_layers_are_timed(bank, batches):
    layers = list(layer_models(bank, widths_of(bank, 8), batches[0]))
    names = [name for name, _ in layers]
    assert sorted(names) == sorted([TABLE, TABLE, LSTM, "lstm.layer_1.weight", GRU, LINEAR])
    kinds = {node.op_type for _, layer in layers for node in layer.graph.node}
    assert {"LSTM", "GRU", "Gather"} <= kinds
    (row,) = layer_latency(bank, batches[0], threads=1, runs=3).rows
    assert {pair[0] for pair in row.pairs} == {TABLE, LSTM, "lstm.layer_1.weight", GRU, LINEAR}
    assert all(time > 0 for times in row.pairs.values() for time in times.values())


class LastStates(nn.Module):
    """One LSTM called twice, of which only the hidden state at the end is read."""

    def __init__(self):
        super().__init__()
        self.lstm, self.back, self.head = nn.LSTM(8, 16), nn.Linear(16, 8), nn.Linear(16, 5)

    def forward(self, x, hidden, cell):
        _, (first, _) = self.lstm(x, (hidden, cell))
        _, (second, _) = self.lstm(self.back(first))
        return self.head(second[0])


def test_each_call_whose_output_is_not_read_is_timed():
    inputs = (torch.randn(7, 3, 8), torch.randn(1, 3, 16), torch.randn(1, 3, 16))
    bank = WidthBank(LastStates().eval(), [inputs], (8,), (8,), backend="Experimental")
    layers = list(layer_models(bank, {}, inputs))
    assert [name for name, _ in layers] == ["lstm.weight", "lstm.weight", "back.weight", "head.weight"]
    assert [len(layer.graph.input) for _, layer in layers] == [3, 1, 1, 1]

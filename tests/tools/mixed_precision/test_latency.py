"""Time of layers: each is cut out of the file unchanged, and timed with and without an integer kernel."""

import numpy as np
import onnxruntime as ort
import pytest
import torch
from torch import nn

from fxqat.errors import ExportError
from fxqat.tools.mixed_precision import latency
from fxqat.tools.mixed_precision.bank import WidthBank
from fxqat.tools.mixed_precision.latency import layer_latency, layer_models


def run(model, **inputs):
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, inputs)[0]


def test_the_cut_out_layers_compute_the_whole_model():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(64, 5)).eval()
    bank = WidthBank(model, [x], (4, 8), (8,))
    for bits in (4, 8):
        widths = {name: bits if unit.is_weight else 8 for name, unit in bank.units.items()}
        layers = dict(layer_models(bank, widths, (x,)))
        assert list(layers) == ["0.weight", "2.weight", "4.weight"]
        gm = bank.mix(widths)
        scales = {}
        for name in ("input", "4"):
            scale, zero_point = bank.units[name].quants(gm)[0].qparams()
            assert float(zero_point) == 0
            scales[name] = float(scale.detach())
        value = np.clip(np.round(x.numpy() / np.float32(scales["input"])), -128, 127).astype(np.int8)
        for name, layer in layers.items():
            (given,) = (entry.name for entry in layer.graph.input)
            value = run(layer, **{given: value if name != "4.weight" else value.reshape(2, -1)})
        found = value.astype(np.float32) * scales["4"]
        np.testing.assert_allclose(found, gm(x).detach().numpy(), atol=1.01 * scales["4"])


def test_time_of_a_choice(bank, batches):
    cost = layer_latency(bank, (batches[0],), threads=1, runs=5)
    (row,) = cost.rows
    layers = {name for pair in row.pairs for name in pair} | set(row.single)
    assert {"a.weight", "b.weight", "c.weight", "head.weight"} <= layers
    for pair, times in row.pairs.items():
        assert set(times) == {(one, other) for one in bank.widths[pair[0]] for other in bank.widths[pair[1]]}
        assert all(0 < milliseconds < 1000 for milliseconds in times.values())
        assert times[2, 8] == times[4, 8]  # same type in the file
    assert cost.of(dict.fromkeys(bank.units, 8)) == pytest.approx(sum(times[8, 8] for times in row.pairs.values()))


class Twice(nn.Module):
    """One layer, called for values of two scales."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return self.layer(self.layer(x).relu())


def test_each_call_of_a_layer_is_timed(monkeypatch):
    x = torch.randn(2, 6)
    bank = WidthBank(Twice().eval(), [x], (8,), (8,))
    layers = list(layer_models(bank, {}, (x,)))
    assert [name for name, _ in layers] == ["layer.weight"] * 2
    monkeypatch.setattr(latency, "layer_models", lambda *args: layers)
    milliseconds = iter([1.0, 2.5])
    monkeypatch.setattr(latency, "_milliseconds", lambda model, threads, runs: next(milliseconds))
    assert layer_latency(bank, (x,)).rows[0].pairs == {("layer.weight", "relu"): {(8, 8): 3.5}}


def test_a_model_that_the_optimizer_breaks_is_timed_without_it(monkeypatch):
    """Integers of 4 bits and symmetric int8 values before a Linear on a 3-D input: see `run_optimized`."""
    x = torch.randn(2, 5, 6)
    bank = WidthBank(nn.Linear(6, 4).eval(), [x], (4, 8), (8,), backend="TSQAT")
    timed, layers = latency._timed, []

    def remember(model, level, threads, runs):
        layers.append((level, model))
        return timed(model, level, threads, runs)

    monkeypatch.setattr(latency, "_timed", remember)
    ((_, times),) = layer_latency(bank, (x,), threads=1, runs=5).rows[0].pairs.items()
    optimized, plain = ort.GraphOptimizationLevel.ORT_ENABLE_ALL, ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    assert [level for level, _ in layers] == [optimized, plain, optimized]
    with pytest.raises(ExportError, match="ONNX Runtime .* cannot run the exported model"):
        timed(layers[0][1], optimized, 1, 1)
    assert set(times) == {(4, 8), (8, 8)}
    assert all(0 < milliseconds < 1000 for milliseconds in times.values())

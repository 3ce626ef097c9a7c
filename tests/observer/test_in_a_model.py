"""Observers by name in a model: calibrated, compiled, exported and compared with ONNX Runtime."""

import json
import math
from pathlib import Path

import pytest
import torch

from fxqat import convert_export, enable_calibration, prepare_by_platform
from fxqat.fake_quantize.state import named_fake_quants
from fxqat.numerics import choose_qparams
from fxqat.observer.base import ObserverBase
from fxqat.observer.observers import OBSERVERS
from tests.models import calibrated, inputs
from tests.observer.test_base import UINT8, builder

END = "_act_fake_quant"


LAYERS = {
    "conv1": ("LSQPlusObserver", "KLDObserver", {}),
    "conv2": ("PoTFloor", "PoTMode", {"pot_scale": True}),
    "fc": ("HistogramL2", "EMAQuantileObserver", {}),
}
"""The observers of the weight and of the output of each layer, as written, and their scheme."""


def test_what_they_choose_is_exported(tmp_path: Path) -> None:
    overrides = [
        {"match": {"module": path}, "weight": {"observer": weight} | scheme, "output": {"observer": output} | scheme}
        for path, (weight, output, scheme) in LAYERS.items()
    ]
    gm = calibrated("conv_bn_relu", "Experimental", {"overrides": overrides})
    quants = dict(named_fake_quants(gm))
    found = [type(quants[f"{path}{end}"].observer) for path in LAYERS for end in (".weight_fake_quant", END)]
    names = ("LSQPlus", "KL", "PoTFloor", "PoTMode", "HistogramL2", "Percentile")
    assert found == [OBSERVERS[name] for name in names]
    for name, quant in quants.items():
        scale, zero_point = choose_qparams(quant.observer.min_val, quant.observer.max_val, quant.scheme)
        assert torch.equal(quant.scale, scale), name
        assert torch.equal(quant.zero_point, zero_point), name
    # raises ParityError where ONNX Runtime computes anything else
    convert_export(gm, inputs("conv_bn_relu"), tmp_path / "model.onnx", tmp_path / "model.json")
    tensors = json.loads((tmp_path / "model.json").read_text())["tensors"].values()
    for path in LAYERS:
        owners = (path, f"{path}{END}")
        of_layer = [tensor for tensor in tensors if tensor["kind"] != "bias" and tensor["module"] in owners]
        scales = [scale for tensor in of_layer for scale in tensor["scale"]]
        assert len(of_layer) == 2
        assert len(scales) > 5
        assert all(math.frexp(scale)[0] == 0.5 for scale in scales) == (path == "conv2"), path


@pytest.mark.parametrize("name", ["Average", "Percentile", "KL", "PoTMode"])
def test_watching_is_one_graph(name: str) -> None:
    torch.compiler.reset()
    observer, plain = builder(name)(UINT8), builder(name)(UINT8)
    compiled: ObserverBase = torch.compile(observer, backend="eager", fullgraph=True)
    x = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    for factor in (1.0, 3.0):
        compiled(x * factor)
        plain(x * factor)
    for key, value in plain.state_dict().items():
        assert torch.equal(value, observer.state_dict()[key]), key
    assert observer.has_seen_data()
    torch.compiler.reset()


class Loop(torch.nn.Module):
    """A recurrence whose states share a scale; in the last step they are the largest."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = [x]
        for _ in range(3):
            states.append(torch.relu(states[-1]) * 2)
        return torch.cat(states)


@pytest.mark.parametrize("name", ["EMAMinMax", "Average", "Percentile", "EMAMSE"])
def test_values_that_share_a_scale_are_one_range_in_each_pass(name: str) -> None:
    x = torch.linspace(0, 1, 1000).reshape(1, -1)
    gm = prepare_by_platform(Loop(), "TSQAT", {"extra_qconfig_dict": {"a_observer": name}}, example_inputs=(x,))
    calls = [node for node in gm.graph.nodes if node.kwargs.get("same_pass")]
    assert calls
    enable_calibration(gm)
    for factor in (1.0, 0.5):
        gm(x * factor)
    ranges = {str(node.target): gm.get_submodule(node.target).observer for node in calls}
    past = {"Average": 0.5}.get(name, 0.9)
    for observer in ranges.values():
        assert float(observer.max_val) == pytest.approx(8 * (past + (1 - past) * 0.5), rel=0.05)

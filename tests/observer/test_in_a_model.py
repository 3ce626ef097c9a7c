"""Observers by name in a model: calibrated, compiled, exported and compared with ONNX Runtime."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fxqat import convert_export
from fxqat.fake_quantize.state import named_fake_quants
from fxqat.numerics import choose_qparams
from fxqat.observer.base import ObserverBase
from fxqat.observer.observers import OBSERVERS
from tests.models import calibrated, inputs
from tests.observer.test_base import UINT8, builder


def config(weight: str, activation: str, **scheme: Any) -> dict[str, Any]:
    return {
        "extra_qconfig_dict": {"w_observer": weight, "a_observer": activation, "w_qscheme": scheme, "a_qscheme": scheme}
    }


@pytest.mark.parametrize(
    ("backend", "weight", "activation", "scheme"),
    [
        ("TSQAT", "LSQPlusObserver", "KLDObserver", {}),
        ("TSQAT", "PoTFloor", "PoTMode", {"pot_scale": True}),
        ("ONNXRuntime", "HistogramL2", "EMAQuantileObserver", {}),
    ],
)
def test_what_they_choose_is_exported(
    backend: str, weight: str, activation: str, scheme: dict[str, Any], tmp_path: Path
) -> None:
    gm = calibrated("conv_bn_relu", backend, config(weight, activation, **scheme))
    quants = [quant for _, quant in named_fake_quants(gm) if quant.scheme.fixed_range is None]
    assert {type(quant.observer) for quant in quants} >= {OBSERVERS["LSQPlus" if "LSQ" in weight else weight]}
    for quant in quants:
        scale, zero_point = choose_qparams(quant.observer.min_val, quant.observer.max_val, quant.scheme)
        assert torch.equal(quant.scale, scale)
        assert torch.equal(quant.zero_point, zero_point)
    # raises ParityError where ONNX Runtime computes anything else
    convert_export(gm, inputs("conv_bn_relu"), tmp_path / "model.onnx", tmp_path / "model.json")
    tensors = json.loads((tmp_path / "model.json").read_text())["tensors"].values()
    scales = [scale for tensor in tensors if tensor["kind"] != "bias" for scale in tensor["scale"]]
    assert len(scales) > 10
    assert all(math.frexp(scale)[0] == 0.5 for scale in scales) == ("PoT" in weight)


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

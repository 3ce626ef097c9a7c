"""The overrides of a warning: pasted into the configuration, they cure what it warned about."""

import logging

import pytest
from torch import nn

from fxqat import calibrate, prepare_by_platform
from tests.quantization.damaged_models import DAMAGED, FORCED, damaged


@pytest.mark.parametrize("backend", ["TSQAT", "QNN"])
@pytest.mark.parametrize("name", DAMAGED)
def test_pasting_them_cures_the_warning(name, backend, caplog):
    model, inputs, nodes = damaged(name)
    forced = FORCED.get(name, [])
    gm = prepare_by_platform(model, backend, {"overrides": forced}, example_inputs=inputs)
    calibrate(gm, [inputs])
    noise = gm.quantization_noise
    assert {node.node for node in noise.problems} == nodes
    assert noise.overrides
    assert str(list(noise.overrides)) in caplog.text
    assert all(f"  {node}: " in caplog.text for node in nodes)

    caplog.clear()
    gm = prepare_by_platform(model, backend, {"overrides": [*forced, *noise.overrides]}, example_inputs=inputs)
    calibrate(gm, [inputs])
    assert gm.quantization_noise.problems == ()
    assert "To keep them float" not in caplog.text
    assert gm.quantization_noise.cosine > min(noise.cosine + 0.03, 0.99) or name in ("outlier", "zeros")


def test_a_damaged_weight():
    model = nn.Sequential(nn.Linear(4096, 4))
    nn.init.normal_(model[0].weight)
    model[0].weight.data[:, 0] = 1000.0
    x = model[0].weight.detach()
    gm = prepare_by_platform(model, "TSQAT")
    calibrate(gm, [x])
    assert {"match": {"module": "0"}, "weight": None} in gm.quantization_noise.overrides
    gm = prepare_by_platform(model, "TSQAT", {"overrides": list(gm.quantization_noise.overrides)})
    calibrate(gm, [x])
    assert gm.quantization_noise.problems == ()


def test_the_nodes_before_a_damaged_one_are_named_as_far_as_needed(caplog):
    caplog.set_level(logging.WARNING, "fxqat")
    model, inputs, _ = damaged("tangent")
    gm = prepare_by_platform(model, "TSQAT", example_inputs=inputs)
    calibrate(gm, [inputs])
    named = [entry["match"]["node"] for entry in gm.quantization_noise.overrides]
    assert named[:2] == ["truediv", "sub"]
    assert "first" not in named
    assert len(caplog.records) == 1

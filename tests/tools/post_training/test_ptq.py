"""The driver: from the float model to an exported file."""

import pytest
import torch
from torch import nn

import fxqat
from fxqat.errors import ConfigError
from fxqat.tools import Reconstruction, ptq
from tests.models import BasicBlock


def model_and_data():
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU6(), nn.Conv2d(8, 8, 1), nn.ReLU()),
        *(BasicBlock(8, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)),
    )
    return model.eval(), [torch.randn(8, 3, 8, 8) for _ in range(3)]


def test_everything_at_once_is_exported(tmp_path):
    model, batches = model_and_data()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gm = ptq(
        model,
        batches,
        "ONNXRuntime",
        equalize=True,
        replace_relu6=True,
        reconstruct=Reconstruction(iterations=20),
        correct_bias=True,
    )
    assert not gm.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    expected, given = model(batches[0]), gm(batches[0])
    assert float((given - expected).square().mean() / expected.square().mean()) < 0.05
    report = fxqat.convert_export(gm, (batches[0],), tmp_path / "model.onnx")
    assert report.certificate.passed
    assert {t.dtype for t in report.tensors if t.kind == "weight"} == {"int8"}


def test_without_options_it_is_calibration():
    model, batches = model_and_data()
    gm = ptq(model, [(batch,) for batch in batches], prepare_custom_config_dict={"bn_mode": "freeze"})
    by_hand = fxqat.prepare_by_platform(model, "TSQAT", {"bn_mode": "freeze"}).eval()
    fxqat.enable_calibration(by_hand)
    for batch in batches:
        by_hand(batch)
    fxqat.enable_quantization(by_hand)
    assert torch.equal(gm(batches[0]), by_hand(batches[0]))


def test_wrong_arguments_are_errors():
    model, batches = model_and_data()
    with pytest.raises(ConfigError, match="at least one batch"):
        ptq(model, [])
    with pytest.raises(ConfigError, match="replace_relu6 is part of the equalization"):
        ptq(model, batches, replace_relu6=True)
    with pytest.raises(ConfigError, match="no LayerNorm or RMSNorm"):
        ptq(model, batches, smooth=True)
    with pytest.raises(ConfigError, match="unknown reconstruction 'brecq'"):
        ptq(model, batches, reconstruct="brecq")

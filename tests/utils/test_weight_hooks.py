"""Weights that hooks of torch compute: why the layer stays float, what to call, and an export without noise."""

import copy
import warnings

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn
from torch.nn.utils import prune, remove_spectral_norm, remove_weight_norm, spectral_norm, weight_norm

import fxqat
from fxqat.utils.weight_hooks import HOOKED, make_weights_permanent_, weight_hooks, why_hooks_forbid


def pruned(layer):
    prune.l1_unstructured(layer, "weight", 0.5)
    prune.random_unstructured(layer, "weight", 0.1)
    prune.random_unstructured(layer, "bias", 0.5)
    return layer


def normed(layer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # deprecated, and still in many models
        return weight_norm(layer)


def unpruned(layer):
    prune.remove(layer, "weight")
    return prune.remove(layer, "bias")


KINDS = {
    "prune": (pruned, unpruned, "torch.nn.utils.prune computes its", "torch.nn.utils.prune.remove(module, 'weight')"),
    "weight_norm": (
        *(normed, remove_weight_norm, "torch.nn.utils.weight_norm computes its weight"),
        "torch.nn.utils.remove_weight_norm(module, 'weight')",
    ),
    "spectral_norm": (
        *(spectral_norm, remove_spectral_norm, "torch.nn.utils.spectral_norm computes its weight"),
        "torch.nn.utils.remove_spectral_norm(module, 'weight')",
    ),
}
X = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(1))


def model_with(make):
    torch.manual_seed(0)
    return nn.Sequential(make(nn.Conv2d(3, 4, 3)), nn.ReLU(), nn.Conv2d(4, 2, 3)).eval()


def calibrated(gm):
    fxqat.calibrate(gm, [X], progress=False)
    fxqat.enable_quantization(gm)
    return gm


def test_prepare_tells_why_the_layer_stays_float_and_the_call_that_helps(caplog):
    make, remove, why, call = KINDS["spectral_norm"]
    model = model_with(make)
    gm = fxqat.prepare_by_platform(model, "TSQAT")
    assert gm.quant_report.row("0").status == "float"
    assert why in gm.quant_report.row("0").reason
    assert f"left float: 0: {gm.quant_report.row('0').reason}" in caplog.text
    assert call in caplog.text
    assert "left float: 0: " in str(gm.quant_report)

    caplog.clear()
    remove(model[0])
    gm = fxqat.prepare_by_platform(model, "TSQAT")
    assert gm.quant_report.row("0").weight
    assert caplog.text == ""


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_file_has_the_computed_weight_and_the_export_warns_of_nothing(kind, when, tmp_path, caplog):
    make = KINDS[kind][0]
    gm = calibrated(fxqat.prepare_by_platform(model_with(make if when == "before" else lambda layer: layer), "TSQAT"))
    if when == "after":
        make(gm.get_submodule("0"))
        calibrated(gm)
    state, hooks = copy.deepcopy(gm.state_dict()), weight_hooks(gm.get_submodule("0"))
    caplog.clear()
    report = fxqat.convert_export(gm, X, tmp_path / "m.onnx")
    assert report.warnings == ()
    assert [record.message for record in caplog.records if record.name == "fxqat"] == []
    session = ort.InferenceSession(str(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(
        session.run(None, {session.get_inputs()[0].name: X.numpy()})[0], gm(X).detach(), atol=1e-5
    )
    names = {tensor.name for tensor in onnx.load(tmp_path / "m.onnx").graph.initializer}
    assert not any("_orig" in name or "weight_g" in name for name in names)
    assert weight_hooks(gm.get_submodule("0")) == hooks
    assert (hooks == []) == (kind != "spectral_norm" and when == "before")  # which became a parametrization
    assert all(torch.equal(value, state[name]) for name, value in gm.state_dict().items())


@pytest.mark.parametrize("kind", KINDS)
def test_permanent_weights_have_the_computed_values(kind):
    make, _, _, _ = KINDS[kind]
    torch.manual_seed(0)
    layer = make(nn.Conv2d(3, 4, 3)).eval()
    expected = layer(X)
    make_weights_permanent_(layer)
    assert weight_hooks(layer) == []
    assert sorted(name for name, _ in layer.named_parameters()) == ["bias", "weight"]
    torch.testing.assert_close(layer(X), expected)


def test_a_hook_of_the_user_is_another_reason():
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(lambda module, inputs, output: output)
    assert why_hooks_forbid(layer) == HOOKED
    prune.l1_unstructured(layer, "weight", 0.5)
    assert why_hooks_forbid(layer) == HOOKED
    assert [name for _, name in weight_hooks(layer)] == ["weight"]


def test_a_recurrent_layer_is_told_the_same(caplog):
    model = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4))
    prune.l1_unstructured(model[1], "weight_hh_l0", 0.5)
    gm = fxqat.prepare_by_platform(model, "TSQAT")
    assert gm.quant_report.row("1").status == "float"
    assert "left float: 1: " in caplog.text
    assert "torch.nn.utils.prune.remove(module, 'weight_hh_l0')" in caplog.text

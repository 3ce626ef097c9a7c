"""BatchNorm re-estimation: statistics of the quantized network, unchanged integers."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import fxqat
from fxqat.errors import CalibrationError, ConfigError
from fxqat.nn.qat import QATLayer
from fxqat.tools import reestimate_batch_norm
from tests.models import calibrate

CONFIG = {"extra_qconfig_dict": {"w_qscheme": {"bit": 4, "scale_bits": 24}}}


def model_and_data(groups=1):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3, groups=groups), nn.BatchNorm2d(8), nn.ReLU(), nn.BatchNorm2d(8))
    batches = [(3 * torch.randn(8, 4, 6, 6) + i,) for i in range(3)]
    return model.eval(), batches


def integers(layer):
    scale, zero_point = layer.weight_fake_quant.qparams()
    weight = layer.folded()[0].detach() / scale.reshape(-1, 1, 1, 1) + zero_point.reshape(-1, 1, 1, 1)
    return weight.round().clamp(-7, 7)


@pytest.mark.parametrize("bn_mode", ["train", "freeze", 5])
def test_statistics_are_the_mean_over_the_batches(bn_mode):
    model, batches = model_and_data()
    gm = calibrate(fxqat.prepare_by_platform(model, "TSQAT", {**CONFIG, "bn_mode": bn_mode}), *batches).eval()
    layer = gm.get_submodule("0")
    assert isinstance(layer, QATLayer)
    before, ints = copy.deepcopy(gm), integers(layer)
    seen = []
    handle = layer.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    assert reestimate_batch_norm(gm, batches) == 2
    handle.remove()
    old = before.get_submodule("0")
    factor = old.bn.weight.detach() / torch.sqrt(old.bn.running_var + old.bn.eps)
    weight = old.weight_fake_quant.quantize(old.folded()[0]).detach() / factor.reshape(-1, 1, 1, 1)
    ys = [nn.functional.conv2d(x, weight, old.bias).transpose(0, 1).flatten(1).double().detach().numpy() for x in seen]
    np.testing.assert_allclose(layer.bn.running_mean, np.mean([y.mean(1) for y in ys], 0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(layer.bn.running_var, np.mean([y.var(1, ddof=1) for y in ys], 0), rtol=1e-4)
    assert torch.equal(integers(layer), ints)
    assert layer.bn_mode == bn_mode
    assert not any(module.training for module in gm.modules())
    assert layer.bn.momentum == 0.1
    assert int(layer.bn.num_batches_tracked) == int(old.bn.num_batches_tracked)


def test_the_mode_is_kept_and_no_batch_is_an_error():
    model, batches = model_and_data(groups=4)
    gm = calibrate(fxqat.prepare_by_platform(model, "TSQAT", CONFIG), *batches).train()
    reestimate_batch_norm(gm, batches)
    assert gm.training
    assert gm.get_submodule("0").training
    assert gm.get_submodule("0").bn.training
    with pytest.raises(ConfigError, match="at least one batch"):
        reestimate_batch_norm(gm, [])


def test_nan_in_the_batches_is_an_error_and_changes_nothing():
    model, batches = model_and_data()
    gm = calibrate(fxqat.prepare_by_platform(model, "TSQAT", CONFIG), *batches)
    before = copy.deepcopy(gm.state_dict())
    batches[1][0][0, 0] = torch.nan
    with pytest.raises(CalibrationError, match=r"NaN or infinity reaches 2 .*, first 0\.bn; nothing is changed"):
        reestimate_batch_norm(gm, batches)
    assert all(torch.equal(value, before[name]) for name, value in gm.state_dict().items())

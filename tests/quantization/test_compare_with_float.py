"""The fake-quant model against the float model: figures, what is warned about, and that nothing else changes."""

import copy
import pickle

import pytest
import torch
from torch import nn

import fxqat
from fxqat import (
    calibrate,
    compare_with_float,
    enable_calibration,
    enable_quantization,
    load_checkpoint,
    load_quant_params,
    prepare_by_platform,
    save_checkpoint,
)
from fxqat.errors import CalibrationError, ConfigError
from fxqat.fake_quantize.state import named_fake_quants
from fxqat.quantization.compare_with_float import compare_outputs
from fxqat.tools import correct_bias
from tests.models import BACKENDS, TOYS, calibrated, inputs
from tests.quantization.damaged_models import Root, damaged


def prepared(model, x, backend="TSQAT"):
    return prepare_by_platform(model, backend, example_inputs=x)


def by_hand(gm, x):
    gm.eval()
    enable_calibration(gm)
    with torch.no_grad():
        gm(x)
    enable_quantization(gm)
    return gm


def test_outputs_end_to_end():
    model, (x,), _ = damaged("outlier")
    gm = by_hand(prepared(model, x), x)
    noise = compare_with_float(gm, [x[:2], x[2:]])
    with torch.no_grad():
        exact, found = model(x).double(), gm(x).double()
    (output,) = noise.outputs
    assert (output.name, noise.batches, noise.failure) == ("output", 2, "")
    assert output.difference.cosine == pytest.approx(
        float(torch.cosine_similarity(exact.flatten(), found.flatten(), 0))
    )
    expected = 10 * torch.log10(exact.square().sum() / (exact - found).square().sum())
    assert output.difference.sqnr == pytest.approx(float(expected), abs=1e-3)
    assert output.difference.max_error == pytest.approx(float((exact - found).abs().max()), rel=1e-4)
    assert noise.cosine == output.difference.cosine
    assert gm.quantization_noise is noise


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", TOYS)
def test_healthy_models_are_not_warned_about_and_stay_as_they_are(name, backend, caplog):
    gm = calibrated(name, backend).train()
    gm.get_submodule(next(path for path, _ in gm.named_children())).eval()
    before = {key: value.clone() for key, value in gm.state_dict().items() if isinstance(value, torch.Tensor)}
    modes = [module.training for module in gm.modules()]
    random = torch.get_rng_state()
    caplog.clear()
    noise = compare_with_float(gm, [inputs(name)])
    assert noise.problems == ()
    assert caplog.text == ""
    assert noise.cosine > 0.95
    assert {node.kind for node in noise} >= {"operation", "weight"}
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in gm.modules()] == modes
    assert all(quant.fake_quant_enabled and not quant.observer_enabled for _, quant in named_fake_quants(gm))
    after = gm.state_dict()
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    assert all(parameter.grad is None for parameter in gm.parameters())


def test_zeros_of_parameters_are_no_problem():
    class ZeroBranch(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn, self.out = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Conv2d(3, 4, 1)
            nn.init.zeros_(self.bn.weight)
            self.bias = nn.Parameter(torch.zeros(3, 1, 1))

        def forward(self, x):
            return self.out(x + self.bn(self.conv(x)) + self.bias * 2)

    x = torch.randn(2, 3, 8, 8)
    gm = prepared(ZeroBranch().eval(), x)
    calibrate(gm, [x])
    assert gm.quantization_noise.problems == ()
    calibrate(gm := prepared(ZeroBranch().eval(), x), [torch.zeros_like(x)])
    assert "x" in {node.node for node in gm.quantization_noise.problems}


def test_a_small_value_that_is_lost_beside_large_ones_is_no_problem():
    class Token(nn.Module):
        def __init__(self):
            super().__init__()
            self.token, self.fc = nn.Parameter(torch.full((1, 1, 8), 1e-6)), nn.Linear(8, 8)

        def forward(self, x):
            return self.fc(torch.cat([self.token.expand(len(x), 1, 8), x], 1))

    x = torch.randn(2, 16, 8)
    gm = prepared(Token().eval(), x)
    calibrate(gm, [x])
    noise = gm.quantization_noise
    assert max(node.error for node in noise) == pytest.approx(1.0)
    assert noise.problems == ()


def test_it_is_dropped_where_other_scales_are_loaded(tmp_path):
    x = torch.randn(4, 3, 8, 8)
    gm = prepared(damaged("outlier")[0], x)
    calibrate(gm, [x])
    save_checkpoint(gm, tmp_path / "m.pth", tmp_path / "m.json")
    assert gm.quantization_noise is not None
    load_checkpoint(gm, tmp_path / "m.pth")
    assert gm.quantization_noise is None
    compare_with_float(gm, [x])
    load_quant_params(gm, tmp_path / "m.json")
    assert gm.quantization_noise is None


def test_it_is_kept_with_copies_until_the_next_calibration():
    x = torch.randn(4, 3, 8, 8)
    gm = prepared(damaged("outlier")[0], x)
    assert gm.quantization_noise is None
    calibrate(gm, [x])
    noise = gm.quantization_noise
    assert copy.deepcopy(gm).quantization_noise == noise
    assert pickle.loads(pickle.dumps(gm)).quantization_noise == noise
    enable_quantization(gm)
    assert gm.quantization_noise == noise
    enable_calibration(gm)
    assert gm.quantization_noise is None
    gm(x)
    enable_quantization(gm)
    assert compare_with_float(nn.DataParallel(gm), [x]) == gm.quantization_noise
    calibrate(gm, [x], compare=False)
    assert gm.quantization_noise is None


def test_a_model_with_two_modes_is_compared_in_eval_mode():
    class TwoModes(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.auxiliary = nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, x):
            y = self.fc(x)
            return (y, self.auxiliary(y)) if self.training else y

    x = torch.randn(4, 8)
    gm = prepared(TwoModes().train(), x)
    calibrate(gm, [x])
    enable_calibration(gm)
    gm(x)
    enable_quantization(gm)
    noise = compare_with_float(gm, [x])
    assert [output.name for output in noise.outputs] == ["output"]
    assert {node.node for node in noise if node.kind == "weight"} == {"fc"}


class Structured(nn.Module):
    """Outputs of all kinds, nested."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x, mask=None):
        y = self.fc(x)
        bad = torch.where(x > 0, float("nan"), y)
        return {"y": (y, [y[:0], None]), "n": y.argmax(-1), "b": y > 0, "nan": bad, "found": (y > 0).nonzero(), "k": 3}


def test_outputs_of_all_kinds():
    x = torch.randn(64, 8)
    x += x.sign()  # quantized, none changes its sign: the same outputs are NaN
    gm = prepared(Structured().eval(), x)
    calibrate(gm, [x])
    found = {output.name: output for output in gm.quantization_noise.outputs}
    assert set(found) == {"y_0", "y_1_0", "n", "b", "nan", "found"}
    assert found["y_0"].difference.cosine > 0.999
    assert found["nan"].difference.cosine > 0.99
    assert found["y_1_0"].difference is None
    assert found["y_1_0"].changed == 0
    assert found["b"].changed < 0.1
    assert found["n"].changed < 0.2


def test_a_comparison_that_fails_does_not_lose_the_calibration(caplog, monkeypatch):
    def fail(*_):
        raise RuntimeError("no memory")

    x = torch.randn(4, 3, 8, 8)
    gm = prepared(damaged("outlier")[0], x)
    monkeypatch.setattr("fxqat.quantization.compare_with_float.measure_noise", fail)
    assert calibrate(gm, [x, x]) == 2
    assert "could not be compared with the float model: RuntimeError: no memory" in caplog.text
    assert gm.quantization_noise is None
    enable_quantization(gm)


def test_a_fake_quant_model_that_fails_is_told(caplog):
    x = Root.inputs()
    gm = prepare_by_platform(Root().eval(), "TSQAT", example_inputs=x)
    calibrate(gm, [x])
    assert "the fake-quant model fails where the float model runs: _LinAlgError" in caplog.text
    assert {node.node for node in gm.quantization_noise.problems} == {"linalg_cholesky"}


def test_errors():
    x = torch.randn(4, 3, 8, 8)
    gm = prepared(damaged("outlier")[0], x)
    with pytest.raises(CalibrationError, match="saw no data"):
        compare_with_float(gm, [x])
    by_hand(gm, x)
    with pytest.raises(ConfigError, match="at least one batch"):
        compare_with_float(gm, [])
    with pytest.raises(ConfigError, match="Put a single batch into a list"):
        compare_with_float(gm, x)
    with pytest.raises(ConfigError, match="prepare_by_platform returned"):
        compare_with_float(nn.Linear(2, 2), [x])
    correct_bias(gm, [x])
    with pytest.raises(ConfigError, match="correct_bias fitted weights or biases"):
        compare_with_float(gm, [x])


def test_training_continues_as_without_it():
    x = torch.randn(4, 3, 8, 8)
    results = []
    for compare in (False, True):
        torch.manual_seed(0)
        gm = prepared(damaged("outlier")[0].train(), x)
        calibrate(gm, [x], compare=compare)
        enable_quantization(gm)
        gm.train()
        loss = (gm(x) * torch.randn(4, 8, 8, 8)).sum()
        loss.backward()
        results.append(
            [loss.detach(), *(parameter.grad for parameter in gm.parameters() if parameter.grad is not None)]
        )
    assert len(results[0]) == len(results[1]) > 4
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_compare_outputs_of_any_structure():
    x = torch.randn(3)
    found = compare_outputs({"a": x, "b": [torch.ones(2, dtype=torch.int64)]}, {"a": x, "b": [torch.tensor([1, 2])]})
    assert [(output.name, output.cosine, output.changed) for output in found] == [("a", 1.0, 0.0), ("b_0", 1.0, 0.5)]
    (other,) = compare_outputs(x, x[:2])
    assert (other.difference, other.changed) == (None, 1.0)
    assert fxqat.compare_with_float is compare_with_float


def test_both_weights_of_a_recurrent_layer_are_compared():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.LSTM(6, 50)).eval(), torch.randn(5, 3, 6)
    with torch.no_grad():
        model[0].weight_hh_l0[:, 0] = 2.5  # so large that the others, up to .14, are rounded to 0
    config = {"extra_qconfig_dict": {"w_observer": "MinMax", "w_qscheme": {"bit": 4}}}
    gm = by_hand(prepare_by_platform(model, "Experimental", config, example_inputs=x), x)
    noise = compare_with_float(gm, [x])
    weights = [node for node in noise if node.kind == "weight"]
    assert [node.node for node in weights] == ["0", "0"]
    (worst,) = (node for node in weights if node.problem)
    assert worst.problem.startswith("rounding its weight_hh costs")
    weight = model[0].weight_hh_l0.detach().abs()
    assert worst.error == pytest.approx(float(weight[:, 1:].sum() / weight.sum()), rel=0.1)
    assert noise.overrides.count({"match": {"module": "0"}, "weight": None}) == 1


@pytest.mark.parametrize(("backend", "expected"), [("Vitis", True), ("OpenVINO", False)])
def test_a_weight_whose_channels_share_a_scale_is_told_from_others(backend, expected):
    x = torch.randn(8, 4)
    gm = fxqat.prepare_by_platform(
        nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1)), backend, example_inputs=x
    )
    fxqat.calibrate(gm, [x], progress=False)
    found = {node.node: node.shares_scale for node in gm.quantization_noise if node.kind == "weight"}
    assert found == {"0": expected, "2": False}  # a single channel has a scale of its own

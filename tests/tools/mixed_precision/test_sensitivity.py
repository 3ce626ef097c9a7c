"""The loss of each width: four methods that agree, files, and resuming."""

import csv

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fxqat.errors import CalibrationError, ConfigError
from fxqat.tools.mixed_precision.bank import WidthBank
from fxqat.tools.mixed_precision.sensitivity import METHODS, divergence, read_sensitivity, sensitivity, squared_error


@pytest.fixture(scope="module")
def found(bank, batches):
    return {method: sensitivity(bank, batches, method, probes=200) for method in METHODS}


@pytest.mark.parametrize("method", ["hessian", "fisher"])
def test_scores_from_derivatives_are_near_the_real_loss(found, method):
    alone, guessed = (
        torch.tensor([loss for losses in found[m].scores.values() for loss in losses.values()]).clamp_min(1e-12).log()
        for m in ("alone", method)
    )
    assert len(alone) > 20
    assert torch.corrcoef(torch.stack((alone, guessed)))[0, 1] > 0.9
    assert abs(float((guessed - alone).median())) < 1.0


@pytest.mark.parametrize("method", ["hessian", "fisher"])
def test_a_computed_weight_has_the_scores_of_the_weight(method):
    torch.manual_seed(0)
    computed = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3)), nn.Tanh(), nn.Conv2d(4, 2, 6))
    stored = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 6))
    weights = {"0.weight": computed[0].weight.detach()}
    stored.load_state_dict(computed.state_dict() | weights, strict=False)
    batches = [torch.randn(8, 3, 8, 8)]
    found = []
    for model in (computed, stored):
        scores = sensitivity(WidthBank(model.eval(), batches), batches, method, probes=20).scores
        found.append([loss for losses in scores.values() for loss in losses.values()])
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    assert max(found[0]) > 1e-4


def test_fewer_bits_lose_more(found):
    for method in ("alone", "hessian", "fisher"):
        for name, losses in found[method].scores.items():
            assert losses[min(losses)] > losses[8], (method, name)
    most = max(found["without"].scores, key=lambda name: found["without"].scores[name].get(2, 0.0))
    assert most.endswith(".weight")


def test_alone_is_a_model_with_one_quantized_unit(bank, batches, found):
    gm = bank.mix({"b.weight": 2})
    for unit in bank.units.values():
        unit.quants(gm)[0].fake_quant_enabled = unit.name == "b.weight"
    with torch.no_grad():
        lost = [divergence(gm(batch), bank.model(batch), None) for batch in batches]
    assert found["alone"].scores["b.weight"][2] == pytest.approx(sum(lost) / 2, rel=1e-4)
    assert sum(lost) > 0


def test_own_measures(bank, batches):
    seen = []

    def measure(outputs, expected, target):
        seen.append(target)
        return squared_error(outputs, expected, target)

    scores = sensitivity(bank, batches[:1], measure=measure).scores
    assert seen == [None] * sum(map(len, bank.widths.values()))
    assert scores["head.weight"][2] > scores["head.weight"][8] > 0


def test_the_task_s_own_loss(bank, batches):
    labels = [bank.model(batch).argmax(1) for batch in batches]

    def loss(outputs, target):
        return F.cross_entropy(outputs, target)

    def measure(outputs, expected, target):
        return float(loss(outputs, target))

    with torch.no_grad():
        usual = sum(measure(bank.model(batch), None, target) for batch, target in zip(batches, labels, strict=True)) / 2
    alone = sensitivity(bank, batches, measure=measure, targets=labels).scores
    assert alone["b.weight"][2] > alone["b.weight"][8] == pytest.approx(usual, abs=1e-3)
    once = sensitivity(bank, batches, "fisher", loss=loss, targets=labels).scores
    twice = sensitivity(bank, batches, "fisher", loss=lambda *a: 2 * loss(*a), targets=labels).scores
    assert twice["b.weight"][2] == pytest.approx(4 * once["b.weight"][2])
    with pytest.raises(ConfigError, match="2 batches, but 1 targets"):
        sensitivity(bank, batches, targets=labels[:1])


def test_it_resumes(bank, batches, tmp_path):
    path = tmp_path / "scores.json"
    count = 0

    def measure(outputs, expected, target):
        nonlocal count
        count += 1
        if count == 8:
            raise KeyboardInterrupt
        return squared_error(outputs, expected, target)

    with pytest.raises(KeyboardInterrupt):
        sensitivity(bank, batches[:1], measure=measure, path=path)
    known = set(read_sensitivity(path).scores)
    assert 0 < len(known) < len(bank.units)
    done = sensitivity(bank, batches[:1], measure=measure, path=path)
    assert count == 8 + sum(len(widths) for name, widths in bank.widths.items() if name not in known)
    assert read_sensitivity(path) == done
    assert done.scores == sensitivity(bank, batches[:1], measure=squared_error).scores


def test_tables_and_files(found, tmp_path):
    result = found["alone"]
    assert "b.weight" in str(result)
    assert "2 bits" in str(result)
    result.write_csv(tmp_path / "scores.csv")
    rows = list(csv.reader((tmp_path / "scores.csv").open()))
    assert rows[0] == ["unit", "bits", "loss"]
    assert {(name, int(bits)): float(loss) for name, bits, loss in rows[1:]} == {
        (name, bits): loss for name, losses in result.scores.items() for bits, loss in losses.items()
    }


def test_wrong_arguments(bank, batches, tmp_path):
    with pytest.raises(ConfigError, match="unknown method 'alon'; known: alone, without"):
        sensitivity(bank, batches, "alon")
    with pytest.raises(ConfigError, match="at least one batch"):
        sensitivity(bank, [])
    (tmp_path / "scores.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not a file of Sensitivity.write_json"):
        sensitivity(bank, batches, path=tmp_path / "scores.json")
    sensitivity(bank, batches, "fisher", path=tmp_path / "fisher.json")
    with pytest.raises(ConfigError, match="has scores of 'fisher'"):
        sensitivity(bank, batches, path=tmp_path / "fisher.json")


def test_a_loss_that_is_nan_is_an_error_and_is_not_written(bank, batches, tmp_path):
    with pytest.raises(CalibrationError, match="the loss of .* is NaN"):
        sensitivity(bank, batches, "alone", lambda *given: float("nan"), path=tmp_path / "scores.json")
    assert not (tmp_path / "scores.json").exists()

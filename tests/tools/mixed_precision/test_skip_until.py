"""Widths are raised by their gain until the target is reached."""

import pytest
import torch

import fxqat
from fxqat.errors import ConfigError
from fxqat.tools.mixed_precision.sensitivity import sensitivity
from fxqat.tools.mixed_precision.skip_until import skip_until


@pytest.fixture(scope="module")
def scores(bank, batches):
    return sensitivity(bank, batches).scores


@pytest.fixture
def metric(net, batches):
    @torch.no_grad()
    def agreement(gm):
        error = (gm(batches[0]) - net(batches[0])).square().mean() / net(batches[0]).square().mean()
        return -10 * float(error.log10())  # dB

    return agreement


def test_it_stops_when_the_target_is_reached(bank, net, batches, scores, metric):
    narrow, wide = (metric(bank.mix({n: pick(w) for n, w in bank.widths.items()})) for pick in (min, max))
    target = (narrow + wide) / 2
    found = skip_until(bank, metric, target, scores)
    assert found.reached
    assert [step.metric >= target for step in found.curve] == [False] * (len(found.curve) - 1) + [True]
    assert found.curve[0].metric == pytest.approx(narrow)
    assert found.curve[-1].metric == pytest.approx(metric(bank.mix(found.widths)))
    assert "target reached" in str(found)
    gm = fxqat.prepare_by_platform(net, "TSQAT", {"overrides": found.overrides}, example_inputs=(batches[0],))
    widths = {name: unit.scheme(gm).bit_width for name, unit in bank.units.items()}
    assert widths == found.widths


def test_the_worst_comes_first(bank, scores, metric):
    found = skip_until(bank, metric, 1e9, scores, most_steps=1)
    assert not found.reached
    gains = {name: scores[name][w[0]] - scores[name][w[1]] for name, w in bank.widths.items()}
    assert found.curve[1].unit == max(gains, key=gains.get)
    assert len(found.curve) == 2


def test_it_ends_when_nothing_is_left(bank, scores, metric):
    widths = {name: max(choice) for name, choice in bank.widths.items()} | {"b.weight": 4}
    found = skip_until(bank, metric, 1e9, scores, widths)
    assert [step.unit for step in found.curve] == ["", "b.weight"]
    assert not found.reached


def test_wrong_arguments(bank, scores, metric):
    with pytest.raises(ConfigError, match="unknown unit 'd'"):
        skip_until(bank, metric, 0.0, scores, {"d": 4})
    with pytest.raises(ConfigError, match="x has no score at 4, 8 bits"):
        skip_until(bank, metric, 0.0, {name: losses for name, losses in scores.items() if name != "x"})

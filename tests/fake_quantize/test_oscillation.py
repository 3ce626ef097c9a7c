"""Oscillation: counting by equation 4 and freezing by algorithm 1 of the paper, against a loop over single weights."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from fxqat.errors import ConfigError
from fxqat.fake_quantize.base import ACTIVATION, WEIGHT
from fxqat.fake_quantize.oscillation import OscillationFakeQuantize, frequency, frozen, set_freeze_threshold
from fxqat.scheme import QuantizeScheme
from tests.builders import make_fake_quant
from tests.reference import as_float64

INT3 = QuantizeScheme(3, per_channel=True)
MOMENTUM = 0.2


def make(threshold: float = math.inf, scheme: QuantizeScheme = INT3) -> OscillationFakeQuantize:
    quant = make_fake_quant(
        scheme, WEIGHT, 0, 2, OscillationFakeQuantize, momentum=MOMENTUM, freeze_threshold=threshold
    )
    quant.set_qparams(torch.tensor([0.5, 0.25]), torch.zeros(2))
    quant.attach(torch.zeros(2, 40))
    return quant


def weights(steps: int) -> list[torch.Tensor]:
    """Weights that move at random by up to a step or two."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 40, generator=generator) * 0.5 for _ in range(steps)]


def follow(integers: list[int], threshold: float) -> tuple[float, bool, int]:
    """Algorithm 1 for one weight: ``(frequency, frozen, integer)`` after the last step."""
    f, average, last, direction, is_frozen = 0.0, float(integers[0]), integers[0], 0, False
    for q in integers[1:]:
        if is_frozen:
            f = (1 - MOMENTUM) * f
            continue
        change = int(np.sign(q - last))
        oscillates = change != 0 and direction != 0 and change != direction
        f = MOMENTUM * oscillates + (1 - MOMENTUM) * f
        direction = change if change else direction
        average = MOMENTUM * q + (1 - MOMENTUM) * average
        last = q
        if f > threshold:
            is_frozen, last = True, int(np.rint(average))
    return f, is_frozen, last


@pytest.mark.parametrize("threshold", [math.inf, 0.3])
def test_frequency_and_freezing_are_the_papers(threshold: float) -> None:
    quant, shown = make(threshold), weights(30)
    for weight in shown:
        y = quant.quantize(weight)
    scale = np.array([[0.5], [0.25]])
    integers = np.stack([np.clip(np.rint(as_float64(weight) / scale), -4, 3) for weight in shown])
    counts = 0
    for index in np.ndindex(2, 40):
        f, is_frozen, last = follow([int(q) for q in integers[(slice(None), *index)]], threshold)
        assert quant.frequency[index].item() == pytest.approx(f, abs=1e-6)
        assert quant.frozen[index].item() == is_frozen
        assert y[index].item() == pytest.approx(last * scale[index[0], 0])
        counts += is_frozen
    assert (counts > 10) == (threshold < 1)
    assert (quant.frequency.max() > 0.3) == (threshold == math.inf)  # what is frozen oscillates no more


def test_integers_are_relative_to_the_zero_point() -> None:
    quant = make(scheme=QuantizeScheme(3, symmetric=False, signed=False, per_channel=True))
    quant.set_qparams(torch.tensor([0.5, 0.25]), torch.tensor([4.0, 1.0]))
    quant.quantize(torch.full((2, 40), 0.5))
    assert quant.integer[0].eq(1).all()  # 1 + 4 is stored
    assert quant.integer[1].eq(2).all()
    quant.frozen.fill_(True)
    assert quant.quantize(torch.zeros(2, 40)).eq(0.5).all()


def test_a_weight_that_moves_one_way_does_not_oscillate() -> None:
    quant = make()
    for step in range(5):
        quant.quantize(torch.full((2, 40), -0.4 + 0.25 * step))
    assert quant.frequency.eq(0).all()
    assert quant.direction.eq(1).all()


def test_eval_mode_and_other_switches_do_not_count() -> None:
    quant = make().eval()
    for weight in weights(3):
        quant.quantize(weight)
    assert quant.integer.isnan().all()
    quant.train()(torch.zeros(2, 40))  # off
    assert quant.integer.isnan().all()
    assert torch.equal(quant.quantize(weights(1)[0]), quant.eval().quantize(weights(1)[0]))


def test_a_frozen_weight_stays_while_its_scale_learns() -> None:
    quant = make(0.1)
    low, high = torch.full((2, 40), 0.2), torch.full((2, 40), 0.3)
    for weight in (low, high, low, high, low):
        quant.quantize(weight)
    assert quant.frozen[0].all()  # between 0 and 1
    assert not quant.frozen[1].any()  # 0.8 and 1.2: 1
    integer = quant.integer.clone()
    with torch.no_grad():
        quant.relative_scale.mul_(1.5)
    x = torch.full((2, 40), 1.1, requires_grad=True)
    y = quant.quantize(x)
    y.backward(torch.ones(2, 40))
    torch.testing.assert_close(y[0], integer[0] * 0.75)
    assert x.grad[0].eq(0).all()
    slope = integer[0].sum().item() * quant.unit_scale[0].item()  # of integer * scale
    expected = slope * quant.grad_scale(x)
    assert quant.relative_scale.grad[0].item() == pytest.approx(expected, rel=1e-5)
    factor = torch.tensor([-2.0, 4.0])
    torch.testing.assert_close(quant.quantize(x, factor=factor)[0], integer[0] * 0.75 / -2.0)
    used = torch.tensor([3.0, 3.0])
    torch.testing.assert_close(quant.target(x, used_scale=used)[0], integer[0] * 3.0)


def test_a_layer_that_is_called_twice_trains() -> None:
    quant = make(0.1)
    x = torch.randn(2, 40, requires_grad=True)
    (quant.quantize(x) + quant.quantize(-x)).sum().backward()
    assert x.grad.abs().sum() > 0
    assert quant.relative_scale.grad.isfinite().all()


def test_the_functions_of_a_model_give_copies_by_name_and_set_the_threshold() -> None:
    model = nn.ModuleDict({"a": make(), "b": nn.Linear(2, 2)})
    for weight in weights(10):
        model["a"].quantize(weight)
    assert set(frequency(model)) == set(frozen(model)) == {"a"}
    assert torch.equal(frequency(model)["a"], model["a"].frequency)
    frequency(model)["a"].zero_()
    assert model["a"].frequency.max() > 0
    set_freeze_threshold(model, 0.0)
    model["a"].quantize(weights(1)[0])
    assert torch.equal(frozen(model)["a"], model["a"].frequency > 0)
    assert frozen(model)["a"].any()
    with pytest.raises(ConfigError, match="no weight of the model has the Oscillation"):
        set_freeze_threshold(model["b"], 0.1)
    for wrong in (-0.1, math.nan):
        with pytest.raises(ConfigError, match="threshold"):
            set_freeze_threshold(model, wrong)
    assert float(model["a"].freeze_threshold) == 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"momentum": 0.0}, r"momentum must be in \(0, 1\], got 0.0"),
        ({"momentum": 1.5}, "momentum must be"),
        ({"freeze_threshold": -1.0}, "freeze_threshold must be a number >= 0 or infinity, got -1.0"),
        ({"freeze_threshold": math.nan}, "freeze_threshold must be"),
        ({"kind": ACTIVATION}, "OscillationFakeQuantize is for weights"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_fake_quant(**{"kind": WEIGHT} | arguments, fake_quantize=OscillationFakeQuantize)
    assert make_fake_quant(kind=WEIGHT, fake_quantize=OscillationFakeQuantize).momentum == 0.01


def test_a_float64_weight_is_counted_as_a_float32_one() -> None:
    narrow, wide = make(threshold=0.1), make(threshold=0.1)
    for weight in weights(20):
        assert torch.equal(wide.quantize(weight.double()).float(), narrow.quantize(weight))
    assert torch.equal(wide.frequency, narrow.frequency)
    assert wide.frozen.any()

"""Learnable: what it learns, with which gradient scale, and that no training breaks it."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from fxqat.errors import ConfigError
from fxqat.fake_quantize.base import ACTIVATION, WEIGHT
from fxqat.fake_quantize.learnable import START, LearnableFakeQuantize
from fxqat.numerics import SCALE_MAX, SCALE_MIN, choose_qparams
from fxqat.observer.min_max import MinMaxObserver
from fxqat.scheme import QuantizeScheme
from tests.builders import INT8, INT8_WEIGHT, UINT8, calibrate, make_fake_quant

HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])


@pytest.mark.parametrize(
    ("scheme", "learned"), [(INT8, ["relative_scale"]), (UINT8, ["relative_scale", "shift"])], ids=str
)
def test_scale_is_learned_and_the_zero_point_of_asymmetric_schemes(scheme: QuantizeScheme, learned: list[str]) -> None:
    quant = calibrate(make_fake_quant(scheme), torch.tensor([-1.0, 1.0]))
    assert sorted(name for name, _ in quant.named_parameters()) == learned
    x = torch.tensor([-2.0, 0.1234, 2.0])
    quant(x).sum().backward()
    assert all(parameter.grad is not None for parameter in quant.parameters())
    assert quant.relative_scale.grad != 0


def test_an_even_zero_point_is_rounded_in_the_forward_pass_and_has_the_same_gradient() -> None:
    even = calibrate(make_fake_quant(replace(UINT8, even_zero_point=True)), torch.tensor([-1.0, 1.0]))
    free = calibrate(make_fake_quant(UINT8), torch.tensor([-1.0, 1.0]))
    x = torch.linspace(-1.5, 1.5, 301)
    for quant, learned in ((even, 126.6), (free, 126.0)):
        quant.store(quant.scale, torch.tensor(learned))
        quant(x).square().sum().backward()
    assert even.qparams()[1] == free.qparams()[1] == 126
    assert torch.equal(even(x), free(x))
    for name in ("relative_scale", "shift"):
        assert getattr(even, name).grad == getattr(free, name).grad != 0


def test_the_zero_point_of_values_that_are_never_negative_is_not_learned() -> None:
    quant = calibrate(make_fake_quant(replace(UINT8, nonnegative=True)), torch.tensor([0.0, 2.55]))
    assert [name for name, _ in quant.named_parameters()] == ["relative_scale"]
    quant(torch.tensor([0.0, 1.0, 9.0])).sum().backward()
    assert (quant.qparams()[1], quant.has_zero_point) == (0, False)
    assert quant(torch.tensor([-1.0, 9.0])).tolist() == pytest.approx([0.0, 2.55])


@pytest.mark.parametrize(
    ("scheme", "kind", "shape", "count"),
    [
        (INT8, WEIGHT, (6, 4, 3, 3), 216),
        (INT8_WEIGHT, WEIGHT, (6, 4, 3, 3), 36),
        (QuantizeScheme(4), ACTIVATION, (8, 5, 7), 35),
        (UINT8, ACTIVATION, (8, 5, 7), 35),
        (UINT8, ACTIVATION, (1, 11), 11),
    ],
)
def test_gradients_are_scaled_by_features_and_levels(
    scheme: QuantizeScheme, kind: str, shape: tuple[int, ...], count: int
) -> None:
    quant = make_fake_quant(scheme, kind, 0, shape[0])
    expected = 1 / math.sqrt(count * scheme.quant_max)
    assert quant.grad_scale(torch.zeros(shape)) == pytest.approx(expected)
    observer = MinMaxObserver(scheme, 0 if scheme.per_channel else None, shape[0])
    doubled = LearnableFakeQuantize(scheme, observer, kind, 0, grad_factor=2.0)
    assert doubled.grad_scale(torch.zeros(shape)) == pytest.approx(2 * expected)


@pytest.mark.parametrize(("kind", "count"), [(WEIGHT, 6), (ACTIVATION, 3)])
def test_gradients_are_those_of_lsq_in_a_unit_that_makes_the_calibrated_scale_start(kind: str, count: int) -> None:
    x = torch.tensor([[-3.0, 0.123, 4.0], [0.5, -0.077, 9.0]])
    found = {}
    for factor in (1.0, 2.0):
        quant = make_fake_quant(UINT8, kind, grad_factor=factor)
        quant.set_qparams(torch.tensor(0.02), torch.tensor(100.0))
        quant.quantize(x).sum().backward()
        found[factor] = (quant.relative_scale.grad.item(), quant.shift.grad.item())
    error = sum(round(v / 0.02) * 0.02 - v for v in (0.123, 0.5, -0.077))
    low, high = -100 * 0.02, 155 * 0.02
    by_scale, by_zero_point = (error + low + 2 * high) / 0.02, -3 * 0.02
    factor = 1 / math.sqrt(count * 255)
    assert found[1.0] == pytest.approx((by_scale * 0.02 / START * factor, by_zero_point / START * factor), rel=1e-5)
    assert found[2.0] == pytest.approx([2 * slope for slope in found[1.0]])


@pytest.mark.parametrize("bits", [2, 8, 16])
def test_the_calibrated_scale_comes_back_exactly(bits: int) -> None:
    quant = make_fake_quant(QuantizeScheme(bits, per_channel=True, narrow_range=False), WEIGHT, 0, 3)
    scale = torch.tensor([0.1, 3e-7, 12345.678])
    quant.set_qparams(scale, quant.zero_point)
    assert torch.equal(quant.scale, scale)
    assert quant.relative_scale.tolist() == [START] * 3


def test_a_step_of_adam_changes_all_scales_by_the_same_share() -> None:
    sizes = torch.tensor([1e-5, 1e-2, 10.0])
    x = torch.randn(3, 200, generator=torch.Generator().manual_seed(0)) * sizes.unsqueeze(1)
    quant = calibrate(make_fake_quant(QuantizeScheme(4, per_channel=True), WEIGHT, 0, 3), x)
    before = quant.scale.detach().clone()
    optimizer = torch.optim.Adam(quant.parameters(), lr=0.001, eps=1e-20)
    (quant.quantize(x) - x).square().sum().backward()
    optimizer.step()
    torch.testing.assert_close((quant.scale / before - 1).abs(), torch.full((3,), 0.001 / START), rtol=1e-3, atol=0)


def test_training_that_is_calibrated_between_forward_and_backward_goes_on() -> None:
    quant = calibrate(make_fake_quant(UINT8), torch.tensor([-1.0, 1.0]))
    y = quant(torch.tensor([-2.0, 0.5, 2.0]))
    quant.observe(torch.tensor([-4.0, 4.0]))
    y.sum().backward()
    assert all(parameter.grad.isfinite() for parameter in quant.parameters())
    assert quant.scale.item() == pytest.approx(8 / 255)


def test_older_state_dicts_with_the_scale_itself_load() -> None:
    quant = make_fake_quant(QuantizeScheme(8, False, False, True), WEIGHT, 0, 3)
    state = quant.state_dict()
    for name in ("relative_scale", "shift", "unit_scale", "calibrated_zero_point", "magnitude"):
        del state[name]
    state |= {"scale": torch.tensor([0.5, -0.25, 0.0]), "zero_point": torch.tensor([3.0, 200.4, 9.0])}
    quant.load_state_dict(state)
    assert quant.scale.tolist() == [0.5, -0.25, 0.0]
    assert quant.qparams()[0].tolist() == [0.5, 0.25, SCALE_MIN]
    assert quant.zero_point.tolist() == pytest.approx([3.0, 200.4, 9.0])


def test_a_scalar_activation_can_be_rounded() -> None:
    quant = calibrate(make_fake_quant(), torch.tensor(1.27))
    x = torch.tensor(0.5041, requires_grad=True)
    y = quant(x)
    y.backward()
    assert y.item() == pytest.approx(0.50, abs=1e-6)
    assert x.grad == 1.0


def test_an_empty_batch_passes() -> None:
    quant = calibrate(make_fake_quant(UINT8), torch.randn(4, 3))
    x = torch.empty(0, 3, requires_grad=True)
    quant(x).sum().backward()
    assert x.grad.shape == (0, 3)
    assert quant.relative_scale.grad == 0.0


@pytest.mark.parametrize("bits", [1, 3])
def test_a_learned_scale_keeps_few_significant_bits(bits: int) -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    x[0] = 12.0
    quant = calibrate(make_fake_quant(QuantizeScheme(4, scale_bits=bits), WEIGHT), x)
    optimizer = torch.optim.SGD(quant.parameters(), lr=50.0)
    used = set()
    for _ in range(100):
        loss = (quant.quantize(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        used.add(quant.qparams()[0].item())
    assert len(used) > 1  # it moves
    assert all(math.frexp(scale)[0] * 2**bits % 1 == 0 for scale in used)


def test_bad_factors_are_refused() -> None:
    for factor in (0.0, -1.0, math.nan):
        with pytest.raises(ConfigError, match="grad_factor"):
            LearnableFakeQuantize(INT8, MinMaxObserver(INT8), WEIGHT, grad_factor=factor)


@pytest.mark.parametrize("scheme", [QuantizeScheme(4), QuantizeScheme(4, signed=False, symmetric=False)], ids=str)
def test_training_finds_a_better_scale(scheme: QuantizeScheme) -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    x[0] = 12.0
    quant = calibrate(make_fake_quant(scheme, WEIGHT), x)
    optimizer = torch.optim.SGD(quant.parameters(), lr=0.1)

    def loss() -> torch.Tensor:
        return (quant(x) - x).square().mean()

    before, scale = loss().item(), quant.scale.item()
    for _ in range(150):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    assert loss().item() < 0.5 * before
    assert quant.scale.item() < 0.8 * scale


def test_the_zero_point_moves_towards_the_data() -> None:
    quant = make_fake_quant(UINT8)
    quant.set_qparams(torch.tensor(0.1), torch.tensor(200.0))
    x = torch.linspace(0.0, 20.0, 500)
    optimizer = torch.optim.SGD([quant.shift], lr=4.0)
    quant.fake_quant_enabled = True
    for _ in range(60):
        optimizer.zero_grad()
        (quant(x) - x).square().mean().backward()
        optimizer.step()
    assert quant.qparams()[1] < 100
    assert quant.zero_point != quant.zero_point.round()
    assert quant.qparams()[1] == quant.zero_point.round()


@pytest.mark.parametrize("rate", [1e2, 1e6, 1e12])
@pytest.mark.parametrize("scheme", [INT8_WEIGHT, UINT8], ids=str)
def test_no_learning_rate_breaks_scale_and_zero_point(scheme: QuantizeScheme, rate: float) -> None:
    torch.manual_seed(0)
    negative = 0
    for _ in range(4):
        quant = calibrate(make_fake_quant(scheme, WEIGHT, 0, 3), torch.randn(3, 50))
        optimizer = torch.optim.SGD(quant.parameters(), lr=rate, momentum=0.9)
        for _ in range(10):
            optimizer.zero_grad()
            y = quant(torch.randn(3, 50))
            (y * torch.randn(3, 50)).sum().backward()
            optimizer.step()
            negative += int((quant.scale < 0).sum())
            scale, zero_point = quant.qparams()
            assert torch.all((scale >= SCALE_MIN) & (scale <= SCALE_MAX))
            assert torch.all((zero_point >= scheme.quant_min) & (zero_point <= scheme.quant_max))
            assert torch.isfinite(y).all()
    assert negative > 0


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_one_bad_batch_does_not_reach_the_parameters(poison: float) -> None:
    quant = calibrate(make_fake_quant(UINT8), torch.randn(100))
    before = [parameter.detach().clone() for parameter in quant.parameters()]
    optimizer = torch.optim.Adam(quant.parameters(), lr=0.1)
    grad = torch.ones(100)
    grad[3] = poison
    quant(torch.randn(100) * 5).backward(grad)
    optimizer.step()
    assert all(torch.isfinite(parameter).all() for parameter in quant.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, quant.parameters(), strict=True))


@pytest.mark.parametrize("start", [-0.02, 1e-20, -1e-20])
def test_a_scale_of_the_wrong_sign_or_size_recovers(start: float) -> None:
    quant = make_fake_quant(INT8, WEIGHT)
    quant.fake_quant_enabled = True
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    calibrate(quant, x)
    with torch.no_grad():
        quant.relative_scale.fill_(start)
    optimizer = torch.optim.Adam(quant.parameters(), lr=1e-3)
    first = (quant(x) - x).square().mean().item()
    for _ in range(200):
        optimizer.zero_grad()
        (quant(x) - x).square().mean().backward()
        optimizer.step()
    last = (quant(x) - x).square().mean().item()
    assert last < max(1e-3, first * 0.01)
    assert quant.qparams()[0] == pytest.approx(choose_qparams(x.min(), x.max(), INT8)[0].item(), rel=0.7)


@HALVES
def test_a_layer_under_autocast_gets_float32_parameters_and_gradients(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    quant, layer, x = make_fake_quant(UINT8), nn.Linear(16, 8), torch.rand(32, 16)
    with torch.autocast("cpu", dtype=dtype):
        y = layer(x)
        calibrate(quant, y)
        rounded = quant(y)
        rounded.float().square().mean().backward()
    assert rounded.dtype == y.dtype == dtype
    assert quant.scale.dtype == quant.relative_scale.grad.dtype == torch.float32
    exact = calibrate(make_fake_quant(UINT8), y)(y.float())
    assert torch.equal(rounded, exact.to(dtype))
    assert torch.isfinite(layer.weight.grad).all()


@pytest.mark.parametrize("kind", [ACTIVATION, WEIGHT])
def test_a_range_that_follows_leaves_the_gradients_of_the_pass_before(kind: str) -> None:
    gradients = []
    for is_followed in (True, False):
        quant, x = make_fake_quant(INT8, kind), torch.linspace(-1.0, 1.0, 7)
        quant.let_follow()
        calibrate(quant, x)
        y = quant(x)
        if is_followed:
            quant(4 * x)
        y.square().sum().backward()
        gradients.append(quant.relative_scale.grad)
    assert torch.equal(*gradients)
    assert gradients[0] != 0.0

"""What every fake-quant does: switches, parameters from the range, state."""

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest
import safetensors.torch
import torch

from fxqat.errors import CheckpointError
from fxqat.fake_quantize.base import ACTIVATION, WEIGHT, FakeQuantizeBase
from fxqat.fake_quantize.dorefa import DoReFaFakeQuantize
from fxqat.fake_quantize.fake_quantizes import FAKE_QUANTIZES
from fxqat.fake_quantize.tqt import TQTFakeQuantize
from fxqat.numerics import SCALE_MAX, SCALE_MIN, choose_qparams, fake_quantize, valid_scale
from fxqat.quantization.insert import build_fake_quant
from fxqat.scheme import QuantizeScheme, TensorQConfig
from tests.builders import INT8, INT8_WEIGHT, UINT8, calibrate, make_fake_quant, make_suitable

KINDS = pytest.mark.parametrize("kind", FAKE_QUANTIZES.values(), ids=list(FAKE_QUANTIZES))
ANY_SCALE = pytest.mark.parametrize("kind", [kind for name, kind in FAKE_QUANTIZES.items() if name != "TQT"])
STORED_SCALE = pytest.mark.parametrize(
    "kind", [kind for name, kind in FAKE_QUANTIZES.items() if name not in ("TQT", "PACT")]
)


@KINDS
def test_off_it_returns_its_input(kind: type[FakeQuantizeBase]) -> None:
    quant = make_suitable(kind)
    x = torch.randn(3, 4)
    assert quant(x) is x
    assert not quant.observer.has_seen_data()
    assert (quant.observer_enabled, quant.fake_quant_enabled) == (False, False)


@KINDS
@pytest.mark.parametrize("scheme", [INT8, UINT8, QuantizeScheme(4, narrow_range=True)], ids=str)
def test_observing_sets_the_parameters_and_rounding_uses_them(
    kind: type[FakeQuantizeBase], scheme: QuantizeScheme
) -> None:
    quant = make_suitable(kind, scheme)
    x = torch.randn(50) * 3 + 1
    quant.observer_enabled = True
    assert quant(x) is x
    target = quant.target(x)
    scale, zero_point = choose_qparams(target.min(), target.max(), quant.scheme)
    torch.testing.assert_close(quant.qparams()[0], scale, rtol=2.0**-20, atol=0.0)
    assert torch.equal(quant.qparams()[1], zero_point)
    quant.fake_quant_enabled = True
    expected = fake_quantize(target, *quant.qparams(), scheme.quant_min, scheme.quant_max)
    assert torch.equal(quant(x), expected)


@KINDS
def test_a_value_already_on_the_grid_is_not_touched_or_watched(kind: type[FakeQuantizeBase]) -> None:
    quant = make_suitable(kind)
    quant.observer_enabled = quant.fake_quant_enabled = True
    x = torch.randn(5)
    assert quant(x, tensor_name="pool", on_grid=True) is x
    assert quant(None) is None
    assert not quant.observer.has_seen_data()


@KINDS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtype_is_kept_and_parameters_stay_float32(kind: type[FakeQuantizeBase], dtype: torch.dtype) -> None:
    quant = make_suitable(kind)
    x = torch.randn(64).to(dtype)
    y = calibrate(quant, x)(x)
    assert y.dtype == dtype
    assert quant.scale.dtype == quant.zero_point.dtype == torch.float32
    error = (y.float() - quant.target(x).float()).abs().max()
    assert error <= quant.scale.item() * 0.5 + 0.02 * (dtype != torch.float32)


@KINDS
def test_channels_that_saw_nothing_keep_their_parameters(kind: type[FakeQuantizeBase]) -> None:
    quant = make_suitable(kind, INT8_WEIGHT, WEIGHT, 0, 2)
    quant.observer.min_val[1], quant.observer.max_val[1] = -127.0, 1.0
    quant.update_from_observer()
    assert quant.scale.tolist() == [1.0, 1.0]
    quant.observer.min_val[0], quant.observer.max_val[0] = -1.0, 254.0
    quant.update_from_observer()
    assert quant.scale.tolist() == [2.0, 1.0]


@KINDS
def test_before_calibration_a_step_is_one(kind: type[FakeQuantizeBase]) -> None:
    quant = make_suitable(kind, UINT8)
    assert (quant.scale.item(), quant.zero_point.item()) == (1.0, 0.0)
    quant.fake_quant_enabled = True
    x = torch.tensor([0.4, 1.6, 300.0, -1.0])
    assert quant(x).tolist() == quant.target(x).round().clamp(0.0, 255.0).tolist()
    signed = make_suitable(kind, QuantizeScheme(symmetric=False))
    assert (signed.scale.item(), signed.zero_point.item()) == (1.0, -128.0)


@ANY_SCALE
@pytest.mark.parametrize(
    ("scheme", "fixed_range", "scale", "zero_point"),
    [
        (UINT8, (0.0, 1.0), 1 / 255, 0.0),
        (QuantizeScheme(symmetric=False), (0.0, 1.0), 1 / 255, -128.0),
        (INT8, (-1.0, 1.0), 1 / 127, 0.0),
    ],
)
def test_a_fixed_range_is_there_from_the_start_and_stays(
    kind: type[FakeQuantizeBase],
    scheme: QuantizeScheme,
    fixed_range: tuple[float, float],
    scale: float,
    zero_point: float,
) -> None:
    fixed = QuantizeScheme(scheme.bit_width, scheme.signed, scheme.symmetric, fixed_range=fixed_range)
    quant = make_suitable(kind, fixed)
    quant.observer_enabled = True
    quant(torch.tensor([-50.0, 50.0]))
    assert quant.scale.item() == pytest.approx(scale, rel=1e-6)
    assert quant.zero_point.item() == zero_point
    assert quant.observer.has_seen_data()


@STORED_SCALE
def test_parameters_in_use_are_valid_and_detached(kind: type[FakeQuantizeBase]) -> None:
    quant = make_suitable(kind, QuantizeScheme(signed=False, symmetric=False, per_channel=True), WEIGHT, 0, 5)
    given = ([-0.5, 0.0, float("nan"), float("inf"), 0.25], [-7.0, 7.4, float("nan"), 1e9, 3.0])
    quant.store(*(torch.tensor(values) for values in given))
    scale, zero_point = quant.qparams()
    assert scale.tolist() == [0.5, SCALE_MIN, SCALE_MAX, SCALE_MAX, 0.25]
    assert zero_point.tolist() == [0.0, 7.0, 0.0, 255.0, 3.0]
    assert [tensor.requires_grad for tensor in (scale, zero_point)] == [False, False]


@STORED_SCALE
def test_rounding_uses_the_parameters_that_are_reported(kind: type[FakeQuantizeBase]) -> None:
    quant = make_suitable(kind, UINT8)
    quant.store(torch.tensor(-0.1), torch.tensor(3.4))
    x = torch.linspace(-3.0, 30.0, 200)
    scale, zero_point = quant.qparams()
    assert (scale.item(), zero_point.item()) == (pytest.approx(0.1), 3.0)
    assert torch.equal(quant.quantize(x), fake_quantize(quant.target(x), scale, zero_point, 0, 255))


@KINDS
@pytest.mark.parametrize("scheme", [INT8, UINT8, QuantizeScheme(4, narrow_range=True)], ids=str)
def test_set_parameters_are_kept_and_count_as_calibrated(kind: type[FakeQuantizeBase], scheme: QuantizeScheme) -> None:
    quant = make_suitable(kind, scheme)
    scale = valid_scale(torch.tensor(0.1234567), quant.scale_bits)
    zero_point = torch.tensor(float(scheme.symmetric_zero_point if scheme.symmetric else 7))
    quant.set_qparams(scale, zero_point)
    assert torch.equal(quant.qparams()[0], scale)
    assert torch.equal(quant.qparams()[1], zero_point)
    assert quant.observer.has_seen_data()


@KINDS
@pytest.mark.parametrize("scheme", [INT8, UINT8, QuantizeScheme(4, narrow_range=True)], ids=str)
def test_set_parameters_follow_from_the_range_that_is_set_with_them(
    kind: type[FakeQuantizeBase], scheme: QuantizeScheme
) -> None:
    quant = make_suitable(kind, scheme)
    zero_point = float(scheme.symmetric_zero_point if scheme.symmetric else 7)
    scale = 0.125 if quant.scheme.scale_bits == 1 else 0.1234567
    quant.set_qparams(torch.tensor(scale), torch.tensor(zero_point))
    quant.update_from_observer()
    assert quant.scale.item() == pytest.approx(scale, rel=1e-6)
    assert quant.zero_point.item() == zero_point


@KINDS
@pytest.mark.parametrize("again", [copy.deepcopy, lambda quant: pickle.loads(pickle.dumps(quant))])
def test_copies_round_alike_and_are_apart(kind: type[FakeQuantizeBase], again: object) -> None:
    quant = calibrate(make_suitable(kind, UINT8), torch.randn(20))
    twin = again(quant)
    x = torch.randn(20)
    assert torch.equal(twin(x), quant(x))
    twin.observe(torch.linspace(-99.0, 99.0, 20))
    assert twin.scale > 10 * quant.scale


@KINDS
def test_switches_travel_with_the_state_dict(kind: type[FakeQuantizeBase]) -> None:
    quant = calibrate(make_suitable(kind), torch.randn(20))
    quant.observer_enabled = True
    state = quant.state_dict()
    twin = make_suitable(kind)
    twin.load_state_dict(state, strict=True)
    assert (twin.observer_enabled, twin.fake_quant_enabled) == (True, True)
    assert torch.equal(twin.scale, quant.scale)
    assert torch.equal(twin.observer.max_val, quant.observer.max_val)


def averaged(state: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What training programs do with a state dict: a moving average in place."""
    for name, value in state.items():
        value.copy_(0.9998 * value + (1.0 - 0.9998) * other[name])
    return state


def saved_as_safetensors(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return safetensors.torch.load(safetensors.torch.save({name: value.clone() for name, value in state.items()}))


def saved_by_torch(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("switches", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize(
    "used",
    [
        lambda state: {name: value.clone() for name, value in state.items()},
        lambda state: {name: value.detach().cpu() for name, value in state.items()},
        lambda state: averaged(averaged({name: value.clone() for name, value in state.items()}, state), state),
        lambda state: {name: sum([value, value, value]) / 3 for name, value in state.items()},
        saved_as_safetensors,
        saved_by_torch,
    ],
    ids=["clone", "cpu", "moving average", "mean", "safetensors", "torch.save"],
)
def test_the_state_dict_is_of_tensors_as_training_programs_expect(
    used: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], switches: tuple[bool, bool]
) -> None:
    quant, twin = calibrate(make_fake_quant(), torch.randn(20)), make_fake_quant()
    quant.observer_enabled, quant.fake_quant_enabled = switches
    twin.observer_enabled, twin.fake_quant_enabled = (not switch for switch in switches)
    state = quant.state_dict()
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    twin.load_state_dict(used(state), strict=True)
    assert (twin.observer_enabled, twin.fake_quant_enabled) == switches
    torch.testing.assert_close(twin.scale, quant.scale)


def test_writing_into_a_state_dict_does_not_switch() -> None:
    quant = calibrate(make_fake_quant(), torch.randn(20))
    quant.state_dict()["_extra_state"].zero_()
    assert (quant.observer_enabled, quant.fake_quant_enabled) == (False, True)
    assert type(quant.fake_quant_enabled) is bool


def test_switches_saved_as_a_dict_are_read() -> None:
    """The form of the first versions."""
    quant = make_fake_quant()
    quant.set_extra_state({"observer_enabled": True, "fake_quant_enabled": False})
    assert (quant.observer_enabled, quant.fake_quant_enabled) == (True, False)


@pytest.mark.parametrize(
    "state", [None, 3, {}, {"observer_enabled": True}, torch.zeros(3), torch.zeros(()), {"observer_enabled": 1}]
)
def test_a_damaged_extra_state_is_refused_and_switches_nothing(state: object) -> None:
    quant = calibrate(make_fake_quant(), torch.randn(20))
    with pytest.raises(CheckpointError, match="must be a tensor of shape"):
        quant.set_extra_state(state)
    assert (quant.observer_enabled, quant.fake_quant_enabled) == (False, True)


@KINDS
def test_dividing_a_factor_out_is_scaling_first(kind: type[FakeQuantizeBase]) -> None:
    quant = make_suitable(kind, INT8_WEIGHT, WEIGHT, 0, 3)
    weight = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    factor = torch.tensor([4.0, -0.3, 1.7])
    wide = factor.unsqueeze(1)
    calibrate(quant, weight * wide)
    around = quant.quantize(weight * wide) / wide
    torch.testing.assert_close(quant.quantize(weight, factor=factor), around, rtol=1e-6, atol=1e-7)
    assert (around - weight).abs().max() > 1e-4


@KINDS
def test_printing_shows_scheme_and_switches(kind: type[FakeQuantizeBase]) -> None:
    text = repr(calibrate(make_suitable(kind, UINT8, ACTIVATION), torch.ones(2)))
    assert "uint8 asym per-tensor" in text
    assert "fake_quant=True" in text


HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


@HALF
@KINDS
def test_half_precision_leaves_scales_and_ranges_in_float32(kind: type[FakeQuantizeBase], dtype: torch.dtype) -> None:
    weight = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    quant = calibrate(make_suitable(kind, INT8_WEIGHT, WEIGHT, 0, 3), weight)
    before = {name: tensor.clone() for name, tensor in [*quant.named_parameters(), *quant.named_buffers()]}
    quant.to(dtype)
    after = dict([*quant.named_parameters(), *quant.named_buffers()])
    assert {name: tensor.dtype for name, tensor in after.items()} == {n: t.dtype for n, t in before.items()}
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert dtype not in {tensor.dtype for tensor in after.values()}


@HALF
@KINDS
def test_a_half_precision_tensor_is_rounded_as_in_float32(kind: type[FakeQuantizeBase], dtype: torch.dtype) -> None:
    weight = torch.randn(3, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    quant = calibrate(make_suitable(kind, INT8_WEIGHT, WEIGHT, 0, 3), weight.float()).to(dtype)
    given = weight.clone().requires_grad_()
    rounded = quant(given)
    rounded.float().square().sum().backward()
    if kind is not DoReFaFakeQuantize:  # its tanh is in the tensor's own precision here
        assert torch.equal(rounded, quant(weight.float()).to(dtype))
    assert rounded.dtype == given.grad.dtype == dtype
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in quant.parameters())


def in_blocks(kind: type[FakeQuantizeBase], axis: int, shape: tuple[int, int]) -> FakeQuantizeBase:
    """A fake-quant of a weight with a scale for each block of 4."""
    scale_bits = 1 if kind.__name__.startswith("TQT") else 24
    scheme = QuantizeScheme(4, per_channel=True, block_size=4, scale_bits=scale_bits)
    config = TensorQConfig(scheme, "MinMax", kind)
    return build_fake_quant(config, WEIGHT, axis, shape[0] * shape[1] // 4)


@KINDS
@pytest.mark.parametrize("axis", [0, 1])
def test_each_block_is_a_channel_of_its_own(kind: type[FakeQuantizeBase], axis: int) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(12, 3) if axis else torch.randn(3, 12)).requires_grad_()
    quant = in_blocks(kind, axis, (12, 3))
    quant.attach(quant.in_blocks(weight.detach()))
    calibrate(quant, weight.detach())
    rows = make_suitable(kind, replace(quant.scheme, block_size=None), WEIGHT, 0, 9)
    of_rows = quant.in_blocks(weight.detach()).clone().requires_grad_()
    rows.attach(of_rows.detach())
    calibrate(rows, of_rows.detach())
    assert torch.equal(quant.scale, rows.scale)
    assert len(quant.scale.unique()) > 1
    factor = torch.tensor([2.0, -0.5, 1.5])
    for given, wide in ((None, None), (factor, factor.repeat(3) if axis else factor.repeat_interleave(3))):
        weight.grad = of_rows.grad = None
        found, expected = quant.quantize(weight, factor=given), rows.quantize(of_rows, factor=wide)
        assert found.shape == weight.shape
        assert torch.equal(quant.in_blocks(found), expected)
        found.square().sum().backward()
        expected.square().sum().backward()
        assert weight.grad is not None
        assert of_rows.grad is not None
        assert torch.equal(quant.in_blocks(weight.grad), of_rows.grad)
    for (name, parameter), (_, other) in zip(quant.named_parameters(), rows.named_parameters(), strict=True):
        assert parameter.grad is not None, name
        assert torch.equal(parameter.grad, other.grad), name


def test_values_of_scales_and_of_channels_spread_over_a_weight_in_blocks() -> None:
    quant, weight = in_blocks(FAKE_QUANTIZES["Learnable"], 1, (8, 2)), torch.zeros(8, 2)
    found = quant.per_weight(torch.tensor([1.0, 2.0, 3.0, 4.0]), weight)
    assert found.T.tolist() == [[1.0] * 4 + [3.0] * 4, [2.0] * 4 + [4.0] * 4]
    assert quant.per_scale(torch.tensor([5.0, 6.0])).tolist() == [5.0, 6.0, 5.0, 6.0]
    quant = in_blocks(FAKE_QUANTIZES["Learnable"], 0, (2, 8))
    found = quant.per_weight(torch.tensor([1.0, 2.0, 3.0, 4.0]), weight.T)
    assert found.tolist() == [[1.0] * 4 + [2.0] * 4, [3.0] * 4 + [4.0] * 4]
    assert quant.per_scale(torch.tensor([5.0, 6.0])).tolist() == [5.0, 5.0, 6.0, 6.0]


@KINDS
@pytest.mark.parametrize("per_channel", [True, False])
def test_in_training_the_range_follows_the_largest_magnitude_of_a_weight(
    kind: type[FakeQuantizeBase], per_channel: bool
) -> None:
    quant = make_suitable(kind, replace(INT8, per_channel=per_channel), WEIGHT, 0, 3)
    weight = torch.randn(3, 40)
    calibrate(quant, weight)
    start = quant.qparams()[0].clone()
    growth = torch.tensor([4.0, 0.25, 16.0])
    for factor in (torch.ones(3), growth, growth * 4):
        quant.follow(weight, factor)
    moved = quant.qparams()[0]
    size = weight.abs().amax(1)
    expected = 4 * growth if per_channel else (4 * growth * size).amax() / size.amax()
    grid = 1.0 if kind is TQTFakeQuantize else 1e-5  # powers of two
    ratio = torch.log2(torch.as_tensor(expected)).expand_as(start)
    torch.testing.assert_close(torch.log2(moved / start), ratio, rtol=0.0, atol=grid)
    quant.follow(weight * growth.reshape(3, 1) * 4)
    assert torch.equal(quant.qparams()[0], moved)


@KINDS
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_leaves_no_trace_in_the_range(kind: type[FakeQuantizeBase], bad: float) -> None:
    quant = make_suitable(kind, INT8_WEIGHT, WEIGHT, 0, 2)
    weight = torch.tensor([[1.0, -2.0], [0.5, 3.0]])
    calibrate(quant, weight)
    quant.follow(weight)
    before = quant.qparams()[0]
    quant.follow(torch.tensor([[bad, 1.0], [0.5, 3.0]]))
    assert torch.equal(quant.qparams()[0], before)
    quant.follow(4 * weight)
    torch.testing.assert_close(quant.qparams()[0], 4 * before)


@pytest.mark.parametrize("case", ["none", "eval", "off", "observing", "fixed", "calibrated", "empty"])
def test_when_a_range_follows_the_weight(case: str) -> None:
    scheme = replace(INT8, fixed_range=(-1.0, 1.0)) if case == "fixed" else INT8
    quant, weight = make_fake_quant(scheme, WEIGHT), torch.linspace(-1.0, 1.0, 9)
    calibrate(quant, weight)
    quant.follow(weight)
    before = quant.qparams()[0]
    if case == "eval":
        quant.eval()
    elif case == "off":
        quant.fake_quant_enabled = False
    elif case == "observing":
        quant.observer_enabled = True
    elif case == "calibrated":
        quant.store_calibrated(*quant.qparams())
    quant.follow(weight[:0] if case == "empty" else 3 * weight)
    torch.testing.assert_close(quant.qparams()[0], before * 3 if case == "none" else before)

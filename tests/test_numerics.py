"""The numerics contract: bit equality with ONNX Runtime, valid parameters, and the choice of parameters."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fxqat.numerics import (
    SCALE_MAX,
    SCALE_MIN,
    choose_qparams,
    covered_range,
    dequantize,
    fake_quantize,
    from_blocks,
    in_blocks,
    per_axis,
    quantize,
    valid_scale,
    valid_zero_point,
)
from fxqat.scheme import QuantizeScheme
from tests.benchmarks.accuracy.bit_equality import (
    Case,
    Count,
    cases,
    compare_random,
    compare_ties,
    onnx_pair,
    parameters,
    random_values,
)

NATIVE = cases()
NARROWER = [
    Case(QuantizeScheme(bits, signed=signed, symmetric=signed, narrow_range=narrow, per_channel=True), 0)
    for bits in (2, 3, 4, 5, 6, 7, 8, 12, 15)
    for signed, narrow in ((True, False), (False, False), (True, True))
    if bits != 8 or narrow
]


@pytest.mark.parametrize("case", NATIVE, ids=str)
def test_random_values_round_as_in_onnx_runtime(case: Case) -> None:
    count = compare_random(case, 400_000, chunk=40_000)
    assert count.values >= 400_000
    assert (count.integers, count.reals) == (0, 0)


@pytest.mark.parametrize("case", NATIVE, ids=str)
def test_every_tie_rounds_as_in_onnx_runtime(case: Case) -> None:
    count = compare_ties(case, scales=2 if case.scheme.bit_width == 16 else 12)
    assert count.values > 2**case.scheme.bit_width
    assert (count.integers, count.reals) == (0, 0)


@pytest.mark.parametrize("case", NARROWER, ids=str)
def test_narrower_ranges_round_as_a_clipped_pair(case: Case) -> None:
    count = compare_random(case, 20_000, chunk=5_000) + compare_ties(case, scales=4)
    assert count.values >= 20_000
    assert (count.integers, count.reals) == (0, 0)


@pytest.mark.parametrize("opset", [13, 18, 19, 21, 23])
@pytest.mark.parametrize(("shape", "axis"), [((5, 4), None), ((5, 4), 1), ((2, 4, 3, 5), 1), ((3, 5, 4), -1)])
def test_every_opset_and_axis_gives_the_same(shape: tuple[int, ...], axis: int | None, opset: int) -> None:
    case = Case(QuantizeScheme(signed=False, symmetric=False), axis)
    channels = () if axis is None else (4,)
    scale, zero_point = torch.rand(channels) + 0.01, torch.randint(0, 256, channels).float()
    x = torch.randn(shape) * 60
    integers, reals = onnx_pair(x, scale, zero_point, case, opset)
    assert torch.equal(quantize(x, scale, zero_point, 0, 255, axis).to(torch.int32), integers)
    assert torch.equal(fake_quantize(x, scale, zero_point, 0, 255, axis), reals)


def test_the_comparison_notices_a_multiplication_by_the_reciprocal() -> None:
    case, random = NATIVE[0], np.random.default_rng(0)
    differ = Count()
    for _ in range(10):
        scale, zero_point = parameters(case, random)
        x = random_values(case, scale, zero_point, 40_000, random)
        wrong = torch.round(x * (1.0 / scale)).clamp(-128, 127).to(torch.int32)
        differ += Count(x.numel(), int((wrong != onnx_pair(x, scale, zero_point, case)[0]).sum()))
    assert differ.values == 400_000
    assert differ.integers > 100


@pytest.mark.parametrize("zero_point", [None, torch.tensor(3.0)])
def test_the_three_functions_fit_together(zero_point: torch.Tensor | None) -> None:
    x, scale = torch.randn(1000) * 4, torch.tensor(0.03)
    q = quantize(x, scale, zero_point, -128, 127)
    assert torch.equal(q, q.round())
    assert torch.equal(dequantize(q, scale, zero_point), fake_quantize(x, scale, zero_point, -128, 127))
    assert torch.equal(dequantize(q.to(torch.int8), scale, zero_point), dequantize(q, scale, zero_point))


@pytest.mark.parametrize("function", [quantize, fake_quantize])
def test_input_is_not_written_to_and_half_precision_is_computed_in_float32(function: object) -> None:
    x = torch.randn(64).half()
    before, scale = x.clone(), torch.tensor(0.013)
    result = function(x, scale, None, -128, 127)
    assert torch.equal(x, before)
    assert result.dtype == torch.float32
    assert torch.equal(result, function(x.float(), scale, None, -128, 127))


def test_valid_scale_is_positive_and_finite_for_anything() -> None:
    hostile = torch.tensor([-0.5, 0.5, 0.0, -0.0, 1e-45, -1e-45, 3e38, math.inf, -math.inf, math.nan])
    scale = valid_scale(hostile)
    assert scale.tolist()[:2] == [0.5, 0.5]
    assert scale.tolist()[2:6] == [SCALE_MIN] * 4
    assert scale.tolist()[6:9] == [SCALE_MAX] * 3
    assert scale[9] == SCALE_MAX
    assert math.isnan(hostile[9])


def test_scales_without_values_take_no_tensor_that_has_some() -> None:
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:  # as torch.compile runs what it does not look into
        assert valid_scale(mode.from_tensor(torch.ones(3)), bits=4).shape == (3,)


def test_the_smallest_bias_scale_is_a_normal_float32() -> None:
    assert float(np.finfo(np.float32).tiny) <= SCALE_MIN * SCALE_MIN
    assert np.isfinite(np.float32(SCALE_MAX) * np.float32(65535))


def test_valid_zero_point_is_an_integer_in_range_for_anything() -> None:
    hostile = torch.tensor([2.4, 2.6, -7.0, 300.0, math.inf, -math.inf, math.nan])
    zero_point = valid_zero_point(hostile, 0, 255)
    assert zero_point.tolist() == [2.0, 3.0, 0.0, 255.0, 255.0, 0.0, 0.0]
    assert hostile[0] == pytest.approx(2.4)


@pytest.mark.parametrize(
    ("dim", "axis", "shape"), [(3, 0, (4, 1, 1)), (3, -1, (1, 1, 4)), (2, 1, (1, 4)), (1, 0, (4,)), (3, None, (4,))]
)
def test_per_axis_shapes(dim: int, axis: int | None, shape: tuple[int, ...]) -> None:
    values = torch.arange(4.0)
    assert per_axis(values, dim, axis).shape == shape
    assert torch.equal(per_axis(values, dim, axis).flatten(), values)
    assert per_axis(torch.tensor(2.0), dim, axis).shape == ()


@pytest.mark.parametrize("bits", [2, 4, 8, 16])
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("low", "high"), [(-1.0, 3.0), (-3.0, 1.0), (0.5, 2.0), (-2.0, -0.5), (-1e-6, 1e6)])
def test_chosen_parameters_cover_the_range_and_zero(
    bits: int, signed: bool, symmetric: bool, low: float, high: float
) -> None:
    scheme = QuantizeScheme(bits, signed=signed, symmetric=symmetric)
    scale, zero_point = choose_qparams(torch.tensor(low), torch.tensor(high), scheme)
    covered = [(limit - zero_point.item()) * scale.item() for limit in (scheme.quant_min, scheme.quant_max)]
    slack = 0.0 if symmetric else 0.5 * scale.item()  # an end may be cut by half a step when zero is put on the grid
    assert covered[0] <= min(low, 0.0) + slack + 1e-6 * abs(low)
    assert covered[1] >= max(high, 0.0) - slack - 1e-6 * abs(high)
    assert zero_point == zero_point.round()
    assert scheme.quant_min <= zero_point <= scheme.quant_max
    assert fake_quantize(torch.tensor(0.0), scale, zero_point, scheme.quant_min, scheme.quant_max) == 0.0


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        (QuantizeScheme(), (3.0 / 127, 0.0)),
        (QuantizeScheme(narrow_range=True), (3.0 / 127, 0.0)),
        (QuantizeScheme(signed=False), (3.0 / 127, 128.0)),
        (QuantizeScheme(signed=False, symmetric=False), (4.0 / 255, 64.0)),
        (QuantizeScheme(symmetric=False), (4.0 / 255, -64.0)),
        (QuantizeScheme(4, narrow_range=True), (3.0 / 7, 0.0)),
        (QuantizeScheme(scale_bits=1), (2.0**-5, 0.0)),
    ],
    ids=str,
)
def test_chosen_parameters_follow_the_formula(scheme: QuantizeScheme, expected: tuple[float, float]) -> None:
    scale, zero_point = choose_qparams(torch.tensor(-1.0), torch.tensor(3.0), scheme)
    assert scale.item() == pytest.approx(expected[0], rel=1e-6)
    assert zero_point.item() == expected[1]


@pytest.mark.parametrize("signed", [True, False])
def test_an_even_zero_point_moves_the_range_by_a_step_at_most(signed: bool) -> None:
    scheme = QuantizeScheme(8, signed=signed, symmetric=False, scale_bits=12, even_zero_point=True)
    low, high = -torch.rand(1000), torch.rand(1000)
    scale, zero_point = choose_qparams(low, high, scheme)
    free = choose_qparams(low, high, replace(scheme, even_zero_point=False))
    assert torch.equal(scale, free[0])
    assert not (zero_point % 2).any()
    assert 0 < (zero_point - free[1]).abs().max() <= 1
    again = choose_qparams(*covered_range(scale, zero_point, scheme), scheme)
    assert torch.equal(again[0], scale)
    assert torch.equal(again[1], zero_point)
    assert not fake_quantize(torch.zeros(1000), scale, zero_point, scheme.quant_min, scheme.quant_max, 0).any()


@pytest.mark.parametrize(("steps", "expected"), [(0.0, 0), (0.4, 0), (0.9, 2), (1.1, 2), (2.2, 2), (4.8, 6), (5.2, 6)])
def test_an_even_zero_point_keeps_the_shorter_side(steps: float, expected: int) -> None:
    """One step of a side of one step is all of it, as with the negative values of SiLU; of the longer side it is 0.4 %.

    ``steps``: length of the shorter side in steps of the scale.
    """
    scheme = QuantizeScheme(8, signed=False, symmetric=False, even_zero_point=True)
    short, long = torch.tensor(steps), torch.tensor(255.0 - steps)
    assert choose_qparams(-short, long, scheme)[1].item() == expected
    above = 255 - choose_qparams(-long, short, scheme)[1].item()  # steps of the shorter side, an odd number
    assert above % 2
    assert 0 <= above - round(steps) <= 1
    _, high = covered_range(*choose_qparams(-long, short, scheme), scheme)
    assert high > short - 0.5


def test_an_even_zero_point_divides_what_a_rounded_scale_cuts_off() -> None:
    """The scale is rounded down by 4 %, and the zero point is odd: the side above 0 loses less."""
    scheme = QuantizeScheme(8, signed=False, symmetric=False, scale_bits=4, even_zero_point=True)
    for low, high in ((-6.22, 6.22), (-6.215, 6.22), (-6.22, 6.215)):
        scale, zero_point = choose_qparams(torch.tensor(low), torch.tensor(high), scheme)
        assert scale.item() == 0.046875
        assert round(-low / 0.046875) == 133
        assert zero_point.item() == 132


def test_even_zero_points_stay_within_the_range() -> None:
    values = torch.tensor([float("nan"), -1e30, 1e30, 127.0, 125.0, -127.0])
    assert valid_zero_point(values, -127, 127, 2).tolist() == [-126, -126, 126, 126, 124, -126]
    assert values.isnan().sum() == 1  # not changed


@pytest.mark.parametrize(("signed", "expected"), [(False, 0), (True, -128)])
def test_values_that_are_never_negative_have_the_smallest_integer_as_zero_point(signed: bool, expected: int) -> None:
    scheme = QuantizeScheme(8, signed=signed, symmetric=False, nonnegative=True)
    scale, zero_point = choose_qparams(torch.tensor([0.0, -0.5]), torch.tensor([2.55, 2.55]), scheme)
    torch.testing.assert_close(scale, torch.full((2,), 0.01))
    assert zero_point.tolist() == [expected, expected]


@pytest.mark.parametrize("step", [1, 2])
def test_ends_that_occur_are_covered_where_there_is_room(step: int) -> None:
    """A rounded scale leaves room; the zero point must not leave it on one side and cut off the other."""
    scheme = QuantizeScheme(signed=False, symmetric=False, scale_bits=4, even_zero_point=step == 2)
    low, high = -torch.rand(2000, generator=torch.Generator().manual_seed(0)), torch.linspace(0.0, 2.0, 2000)
    scale, zero_point = choose_qparams(low, high, scheme, ends_occur=True)
    below, above = (covered.double() for covered in covered_range(scale, zero_point, scheme))
    steps = (-low.double() / scale.double() / step).ceil() * step + (high.double() / scale.double()).ceil()
    fits = steps <= scheme.quant_max
    assert fits.any()
    assert ((below <= low) & (above >= high))[fits].all()
    assert torch.equal(zero_point % step, torch.zeros_like(zero_point))


def test_power_of_two_scales_are_exact_and_cover() -> None:
    exponents = torch.arange(-38, 39)
    scheme = QuantizeScheme(scale_bits=1)
    exact = torch.ldexp(torch.ones(77), exponents)
    scale, _ = choose_qparams(-exact * 127, exact * 127, scheme)
    assert torch.equal(scale, exact)
    ranges = torch.rand(10_000, generator=torch.Generator().manual_seed(0)) * 10 + 1e-3
    scale, _ = choose_qparams(-ranges, ranges, scheme)
    assert torch.all(torch.frexp(scale).mantissa == 0.5)
    assert torch.all(scale.double() * 127 >= ranges.double() * (1 - 1e-6))
    assert torch.all(scale.double() * 127 < ranges.double() * (2 + 1e-6))


@pytest.mark.parametrize("bits", [1, 2, 4, 5, 12, 23, 24])
def test_scales_are_rounded_to_their_significant_bits(bits: int) -> None:
    scale = torch.exp2(80 * torch.rand(20_000, generator=torch.Generator().manual_seed(0)) - 40)
    mantissa, exponent = np.frexp(scale.double().numpy())
    for up, function in ((False, lambda v: np.floor(v + 0.5)), (True, np.ceil)):
        expected = np.ldexp(function(mantissa * 2.0**bits) / 2.0**bits, exponent)
        found = valid_scale(scale, bits, up)
        np.testing.assert_array_equal(found.double().numpy(), expected)
        assert torch.equal(valid_scale(found, bits, up), found)
        assert torch.equal(valid_scale(-scale, bits, up), found)


@pytest.mark.parametrize(("bit_width", "per_channel"), [(8, False), (8, True), (9, False), (16, False)])
def test_a_range_is_covered_or_nearly(bit_width: int, per_channel: bool) -> None:
    scheme, cover = QuantizeScheme(bit_width, scale_bits=4, per_channel=per_channel), per_channel or bit_width > 8
    high = torch.rand(10_000, generator=torch.Generator().manual_seed(0)) * 10 + 1e-3
    scale, _ = choose_qparams(-high, high, scheme)
    ratio = scale.double() * scheme.quant_max / high.double()
    assert ratio.min() >= (1 - 1e-6 if cover else 1 - 1 / 16)
    assert ratio.max() <= (1 + 1 / 8 if cover else 1 + 1 / 16)


def test_sums_of_products_are_exact_when_scales_have_few_bits() -> None:
    """Scales with few bits: sums are the same in any order, and the same as in float64."""
    random = torch.Generator().manual_seed(0)
    weights = (35 * torch.randn(64, 1152, generator=random)).round().clamp(-127, 127)
    values = (25 * torch.randn(1152, 400, generator=random)).round().clamp(0, 255)
    scales = torch.rand(64, 1, generator=random) * 1e-2, torch.tensor(0.0237)
    order = torch.randperm(1152, generator=random)
    exact = {}
    for bits in (4, 24):
        a, b = weights * valid_scale(scales[0], bits + 2 if bits < 24 else bits), values * valid_scale(scales[1], bits)
        reference = a.double() @ b.double()
        sums = (a @ b, a[:, order] @ b[order])
        exact[bits] = [float((total.double() == reference).float().mean()) for total in sums]
    assert min(exact[4]) > 0.999
    assert max(exact[24]) < 0.1


@pytest.mark.parametrize("symmetric", [True, False])
def test_hostile_ranges_still_give_valid_parameters(symmetric: bool) -> None:
    scheme = QuantizeScheme(symmetric=symmetric, per_channel=True)
    low = torch.tensor([0.0, -3.4e38, -1e-44, -math.inf, 5.0])
    high = torch.tensor([0.0, 3.4e38, 1e-44, math.inf, 5.0])
    scale, zero_point = choose_qparams(low, high, scheme)
    assert torch.all((scale >= SCALE_MIN) & (scale <= SCALE_MAX))
    assert scale[0] == SCALE_MIN
    assert torch.all((zero_point >= -128) & (zero_point <= 127) & (zero_point == zero_point.round()))


@pytest.mark.parametrize("axis", [0, 1])
def test_a_matrix_in_blocks_and_back(axis):
    matrix = torch.arange(24).reshape(4, 6)
    size = (3, 2)[axis]
    rows = in_blocks(matrix, size, axis)
    assert rows.shape == (24 // size, size)
    neighbours = matrix[0, :3] if axis == 0 else matrix[:2, 0]
    assert torch.equal(rows[0], neighbours)
    assert torch.equal(from_blocks(rows, matrix.shape, axis), matrix)
    firsts = from_blocks(rows[:, 0], matrix.shape, axis)
    assert torch.equal(firsts, matrix[:, ::3] if axis == 0 else matrix[::2])

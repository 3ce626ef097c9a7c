"""Gradients of the straight-through fake-quant against the LSQ and LSQ+ formulas in float64."""

import math

import numpy as np
import pytest
import torch

from fxqat.fake_quantize import kernels, straight_through
from fxqat.fake_quantize.straight_through import FakeQuantizeSTE
from fxqat.numerics import SCALE_MAX, SCALE_MIN, fake_quantize
from tests.reference import (
    Gradients,
    as_float64,
    away_from_ties,
    fake_quantize_reference,
    lsq_reference,
    on_axis,
)

LIMITS = [(-128, 127), (-127, 127), (0, 255), (-2, 1), (0, 15), (-32768, 32767)]
AXES = [
    ((40, 3), None, None),
    ((3, 50), 0, 3),
    ((5, 4, 6), 1, 4),
    ((5, 6, 4), -1, 4),
    ((2, 3, 4, 5, 6), 1, 3),
    ((64,), 0, 64),
]


def run(
    x: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    limits: tuple[int, int],
    grad: torch.Tensor,
    *,
    axis: int | None = None,
    factor: torch.Tensor | None = None,
    used_scale: torch.Tensor | None = None,
    unit_scale: torch.Tensor | None = None,
    grad_scale: float = 1.0,
    scale_bits: int = 24,
    input_kept: bool = True,
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Output and gradients of the autograd function, every tensor input a fresh leaf."""
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in (x, scale, zero_point)]
    output = FakeQuantizeSTE.apply(
        *leaves, factor, used_scale, unit_scale, *limits, axis, grad_scale, scale_bits, input_kept
    )
    output.backward(grad.to(output.dtype))
    return output.detach(), [None if leaf is None else leaf.grad for leaf in leaves]


def problem(
    shape: tuple[int, ...], axis: int | None, channels: int | None, limits: tuple[int, int], seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(x, scale, zero_point, grad)`` with x away from ties: inside, below and above the range."""
    random = np.random.default_rng(seed)
    size = () if channels is None else (channels,)
    scale = np.exp2(random.uniform(-8, 3, size)).astype(np.float32)
    zero_point = random.integers(limits[0], limits[1] + 1, size).astype(np.float32)
    q = away_from_ties(shape, limits, seed) - on_axis(np.asarray(zero_point), len(shape), axis)
    x = (q * on_axis(np.asarray(scale), len(shape), axis)).astype(np.float32)
    grad = random.standard_normal(shape).astype(np.float32)
    x, scale, zero_point, grad = (torch.from_numpy(np.asarray(value)) for value in (x, scale, zero_point, grad))
    return x, scale, zero_point, grad


def assert_gradients(found: list[torch.Tensor | None], expected: Gradients, weight: float = 1.0) -> None:
    """Compare gradients; those of scale and zero point are ``weight`` times the reference."""
    np.testing.assert_array_equal(as_float64(found[0]), expected.x)
    for tensor, reference in zip(found[1:], (expected.scale, expected.zero_point), strict=True):
        if tensor is not None:
            size = np.abs(reference).max() * weight
            np.testing.assert_allclose(as_float64(tensor), reference * weight, rtol=2e-4, atol=1e-4 * size + 1e-9)


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize(("shape", "axis", "channels"), AXES)
def test_gradients_are_those_of_the_papers(
    shape: tuple[int, ...], axis: int | None, channels: int | None, limits: tuple[int, int]
) -> None:
    x, scale, zero_point, grad = problem(shape, axis, channels, limits)
    numbers = [as_float64(tensor) for tensor in (x, scale, zero_point)]
    output, found = run(x, scale, zero_point, limits, grad, axis=axis, grad_scale=0.25)
    np.testing.assert_allclose(
        as_float64(output), fake_quantize_reference(*numbers, limits, axis), rtol=1e-6, atol=1e-9
    )
    expected = lsq_reference(*numbers, limits, as_float64(grad), axis)
    assert 0 < np.count_nonzero(expected.x) < x.numel()
    assert_gradients(found, expected, weight=0.25)


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize(("shape", "axis", "channels"), AXES)
def test_what_is_saved_instead_of_the_input_gives_its_gradients(
    shape: tuple[int, ...],
    axis: int | None,
    channels: int | None,
    limits: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "LIBRARY", None)  # they save something else: see test_kernels.py
    monkeypatch.setattr(straight_through, "SMALL", 0)
    x, scale, zero_point, grad = problem(shape, axis, channels, limits)
    numbers = [as_float64(tensor) for tensor in (x, scale, zero_point)]
    output, found = run(x, scale, zero_point, limits, grad, axis=axis, input_kept=False)
    expected = lsq_reference(*numbers, limits, as_float64(grad), axis)
    np.testing.assert_array_equal(as_float64(found[0]), expected.x)
    assert_gradients([found[0], None, found[2]], expected)
    error = np.abs(as_float64(found[1]) - expected.scale)
    other = tuple(dim for dim in range(x.dim()) if channels is None or dim != axis % x.dim())
    size = np.abs(as_float64(grad)).sum(other) if other else np.abs(as_float64(grad))
    # each ratio, at most half, is off by at most 2**-11 of itself in float16, and x / scale by 2**-24 of itself
    steps = limits[1] - limits[0]
    assert np.all(error <= (2.0**-12 + 2.0**-23 * steps) * size + 2e-4 * np.abs(expected.scale) + 1e-6)


@pytest.mark.parametrize("with_kernels", [False, True])
def test_a_large_input_that_nobody_keeps_is_saved_in_fewer_bytes(
    with_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not with_kernels:
        monkeypatch.setattr(kernels, "LIBRARY", None)
    elif kernels.LIBRARY is None:
        pytest.skip(f"kernels: {kernels.STATE}")
    monkeypatch.setattr(straight_through, "SMALL_FOR_CODES" if with_kernels else "SMALL", 1000)

    def bytes_saved(size: int, input_kept: bool) -> list[int]:
        saved = []
        x = torch.randn(size, requires_grad=True)
        scale = torch.tensor(0.1, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t):
            FakeQuantizeSTE.apply(x, scale, None, None, None, None, -8, 7, None, 1.0, 24, input_kept)
        return sorted(size for size in saved if size > 12)

    output = [] if with_kernels else [4]  # torch's operators save it; its reader saves it as well
    assert bytes_saved(2000, True) == [2000 * size for size in (4, *output)]
    assert bytes_saved(2000, False) == [2000 if with_kernels else 4000]
    assert bytes_saved(1000, False) == [1000 * size for size in (4, *output)]


@pytest.mark.parametrize("limits", [(-127, 127), (0, 15)], ids=str)
@pytest.mark.parametrize("per_channel_scale", [True, False])
@pytest.mark.parametrize(("shape", "axis"), [((4, 60), 0), ((6, 4, 5), 1)])
def test_a_factor_is_multiplied_before_and_divided_after(
    shape: tuple[int, ...], axis: int, per_channel_scale: bool, limits: tuple[int, int]
) -> None:
    channels = 4 if per_channel_scale else None
    x, scale, zero_point, grad = problem(shape, axis if per_channel_scale else None, channels, limits)
    factor = torch.tensor([2.0, 0.375, -1.5, -0.25])
    wide = on_axis(as_float64(factor), len(shape), axis)
    x = (x.double() / torch.from_numpy(wide)).float()
    numbers = [as_float64(tensor) for tensor in (x, scale, zero_point)]
    output, found = run(x, scale, zero_point, limits, grad, axis=axis, factor=factor)
    scale_axis = axis if per_channel_scale else None
    expected = fake_quantize_reference(numbers[0] * wide, *numbers[1:], limits, scale_axis) / wide
    np.testing.assert_allclose(as_float64(output), expected, rtol=1e-6, atol=1e-9)
    repeated = (np.broadcast_to(value, (4,)) for value in numbers[1:])
    each = lsq_reference(numbers[0], *repeated, limits, as_float64(grad), axis, as_float64(factor))
    shared = Gradients(each.x, each.scale.sum(), each.zero_point.sum())  # one scale serves every channel
    assert_gradients(found, each if per_channel_scale else shared)


@pytest.mark.parametrize("steps", [2.25, 40.0])
def test_a_scalar_has_the_gradients_of_a_tensor_of_one(steps: float) -> None:
    x, scale, zero_point, grad = (torch.tensor(value) for value in (steps * 0.5, 0.5, 3.0, 1.5))
    output, found = run(x, scale, zero_point, (0, 15), grad)
    same, wanted = run(x.reshape(1), scale, zero_point, (0, 15), grad.reshape(1))
    assert torch.equal(output, same[0])
    assert [tensor.item() for tensor in found] == [tensor.item() for tensor in wanted]


@pytest.mark.parametrize("zero_point", [None, 0.0, 2.0])
def test_the_ends_of_the_range_count_as_inside(zero_point: float | None) -> None:
    offset = 0.0 if zero_point is None else zero_point
    q = torch.tensor([-8.0, -7.9375, 6.9375, 7.0, 7.0625, 8.5, -8.5, 0.0]) - offset
    scale = torch.tensor(0.25)
    point = None if zero_point is None else torch.tensor(zero_point)
    _, (to_x, to_scale, _) = run(q * 0.25, scale, point, (-8, 7), torch.ones(8))
    assert to_x.tolist() == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0]
    inside = (-0.0625) + 0.0625
    outside = (-8 - offset) + (7 - offset) * 2
    assert to_scale.item() == inside + outside


@pytest.mark.parametrize(
    ("x", "expected"), [(0.3, -0.3), (0.6, 0.4), (1.5, 0.5), (-1.4, 0.4), (100.0, 7.0), (-100.0, -8.0)]
)
def test_scale_gradient_of_one_value_is_the_formula_of_lsq(x: float, expected: float) -> None:
    output, (to_x, to_scale, to_zero_point) = run(
        torch.tensor([x]), torch.tensor(1.0), None, (-8, 7), torch.tensor([1.0])
    )
    assert to_scale.item() == pytest.approx(expected, abs=1e-6)
    assert to_x.item() == float(abs(x) < 10)
    assert output.item() == float(np.clip(np.rint(x), -8, 7))
    assert to_zero_point is None


@pytest.mark.parametrize(("x", "expected"), [(0.3, 0.0), (100.0, -0.5), (-100.0, -0.5)])
def test_zero_point_gradient_of_one_value_is_the_formula_of_lsq_plus(x: float, expected: float) -> None:
    _, found = run(torch.tensor([x]), torch.tensor(0.5), torch.tensor(3.0), (0, 15), torch.tensor([1.0]))
    assert found[2].item() == expected
    assert found[0].item() == float(expected == 0.0)


def test_a_negative_scale_is_used_by_its_size_and_learned_with_the_opposite_sign() -> None:
    x, scale, zero_point, grad = problem((30, 3), 1, 3, (-8, 7))
    output, found = run(x, scale, zero_point, (-8, 7), grad, axis=1)
    mirrored, other = run(x, -scale, zero_point, (-8, 7), grad, axis=1)
    assert torch.equal(output, mirrored)
    assert torch.equal(found[0], other[0])
    assert torch.equal(found[1], -other[1])


@pytest.mark.parametrize("hostile", [0.0, math.nan, math.inf, -math.inf, 1e-45, -3e38])
def test_any_scale_gives_a_finite_output_and_finite_gradients(hostile: float) -> None:
    x = torch.tensor([-2.0, 0.0, 1.5, 3e38])
    output, found = run(x, torch.tensor(hostile), torch.tensor(hostile), (-128, 127), torch.ones(4))
    assert torch.isfinite(output).all()
    assert output.abs().max() <= 255 * SCALE_MAX
    assert all(torch.isfinite(tensor).all() for tensor in found)


def test_a_broken_gradient_does_not_reach_scale_and_zero_point_of_its_channel_only() -> None:
    x = torch.tensor([[0.3, 20.0], [0.3, 20.0]])
    grad = torch.tensor([[1.0, math.nan], [1.0, 1.0]])
    _, found = run(x, torch.ones(2), torch.zeros(2), (-8, 7), grad, axis=0)
    assert found[1].tolist() == [0.0, pytest.approx(6.7)]
    assert found[2].tolist() == [0.0, -1.0]
    _, found = run(x, torch.ones(2), torch.zeros(2), (-8, 7), torch.full((2, 2), math.inf), axis=0)
    assert found[1].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("axis", [None, 0])
def test_half_precision_is_computed_in_float32(
    dtype: torch.dtype, axis: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "LIBRARY", None)  # they add in another order, and take float32 only
    x, scale, zero_point, grad = problem((3, 200), axis, None if axis is None else 3, (-128, 127))
    x, grad = x.to(dtype), grad.to(dtype)
    output, found = run(x, scale, zero_point, (-128, 127), grad, axis=axis)
    exact, wanted = run(x.float(), scale, zero_point, (-128, 127), grad.float(), axis=axis)
    assert output.dtype == found[0].dtype == dtype
    assert torch.equal(output, exact.to(dtype))
    assert torch.equal(found[0], wanted[0].to(dtype))
    assert found[1].dtype == torch.float32
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found[2], wanted[2], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_changes_nothing(dtype: torch.dtype) -> None:
    x, scale, zero_point, grad = problem((3, 200), 0, 3, (0, 255))
    outside = run(x, scale, zero_point, (0, 255), grad, axis=0)
    with torch.autocast("cpu", dtype=dtype):
        inside = run(x, scale, zero_point, (0, 255), grad, axis=0)
    assert torch.equal(inside[0], outside[0])
    assert all(torch.equal(a, b) for a, b in zip(inside[1], outside[1], strict=True))


def test_a_scale_that_is_given_is_used_and_the_own_one_learned() -> None:
    x, scale, _, grad = problem((3, 50), 0, 3, (-127, 127))
    expected, wanted = run(x, scale, None, (-127, 127), grad, axis=0)
    output, found = run(x, -scale / 2, None, (-127, 127), grad, axis=0, used_scale=scale)
    assert torch.equal(output, expected)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], -wanted[1])


@pytest.mark.parametrize("input_kept", [True, False])
@pytest.mark.parametrize(("shape", "axis", "channels"), [((300, 300), None, None), ((3, 30000), 0, 3)], ids=str)
def test_a_unit_multiplies_the_scale(
    shape: tuple[int, ...], axis: int | None, channels: int | None, input_kept: bool
) -> None:
    x, scale, zero_point, grad = problem(shape, axis, channels, (-128, 127))
    unit = torch.full_like(scale, -0.25) if channels is None else torch.tensor([0.25, 4.0, -2.0])
    options = {"axis": axis, "scale_bits": 9, "input_kept": input_kept}
    expected, wanted = run(x, scale, zero_point, (-128, 127), grad, **options)
    output, found = run(x, scale / unit, zero_point, (-128, 127), grad, unit_scale=unit, **options)
    assert torch.equal(output, expected)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1] * unit)
    assert torch.equal(found[2], wanted[2])


@pytest.mark.parametrize("layout", ["channels_last", "transposed", "strided", "expanded"])
def test_memory_layout_of_input_and_gradient_makes_no_difference(layout: str) -> None:
    x, scale, zero_point, grad = problem((4, 3, 6, 6), 1, 3, (-128, 127))
    if layout == "expanded":
        grad = torch.ones(()).expand(4, 3, 6, 6)
    plain = run(x, scale, zero_point, (-128, 127), grad.contiguous(), axis=1)
    if layout == "channels_last":
        x = x.to(memory_format=torch.channels_last)
    elif layout == "transposed":
        grad = grad.transpose(2, 3).contiguous().transpose(2, 3)
    elif layout == "strided":
        x = x.repeat_interleave(2, dim=3)[..., ::2]
    output, found = run(x, scale, zero_point, (-128, 127), grad, axis=1)
    assert torch.equal(output, plain[0])
    assert torch.equal(found[0], plain[1][0])
    torch.testing.assert_close(found[1], plain[1][1], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(found[2], plain[1][2], rtol=1e-5, atol=1e-4)


def test_only_what_needs_a_gradient_gets_one() -> None:
    x, scale = torch.randn(5), torch.tensor(0.1, requires_grad=True)
    FakeQuantizeSTE.apply(x, scale, None, None, None, None, -8, 7, None, 1.0).sum().backward()
    assert x.grad is None
    assert scale.grad is not None
    leaf, constant = torch.randn(5, requires_grad=True), torch.tensor(SCALE_MIN)
    FakeQuantizeSTE.apply(leaf, constant, None, None, None, None, -8, 7, None, 1.0).sum().backward()
    assert constant.grad is None
    assert leaf.grad.tolist() == [0.0] * 5


def test_second_derivatives_are_refused() -> None:
    x = torch.randn(5, requires_grad=True)
    y = FakeQuantizeSTE.apply(x, torch.tensor(0.1), None, None, None, None, -8, 7, None, 1.0)
    (first,) = torch.autograd.grad((y**2).sum(), x, create_graph=True)
    assert first.shape == x.shape
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_forward_is_the_pure_function() -> None:
    x, scale, zero_point, grad = problem((7, 5), 0, 7, (-128, 127))
    output, _ = run(x, scale, zero_point, (-128, 127), grad, axis=0)
    assert torch.equal(output, fake_quantize(x, scale, zero_point, -128, 127, 0))
    with torch.no_grad():
        again = FakeQuantizeSTE.apply(x, scale, zero_point, None, None, None, -128, 127, 0, 1.0)
    assert torch.equal(again, output)


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize(("axis", "channels"), [(None, None), (0, 9)])
def test_a_sparse_gradient_is_taken_as_the_dense_one(axis: int | None, channels: int | None, kept: bool) -> None:
    x, scale, zero_point, grad = problem((9, 4), axis, channels, (-128, 127))
    grad[[1, 5]] = 0
    (_, dense), (_, sparse) = (
        run(x, scale, zero_point, (-128, 127), given, axis=axis, input_kept=kept) for given in (grad, grad.to_sparse(1))
    )
    for expected, found in zip(dense, sparse, strict=True):
        assert torch.equal(expected, found)

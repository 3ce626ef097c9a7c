"""The compiled kernels against torch's operators (forward: the same bits) and float64 formulas (gradients)."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from fxqat.fake_quantize import kernels, straight_through
from fxqat.fake_quantize.straight_through import FakeQuantizeSTE, rounded_again
from fxqat.nn.bias import BIAS_LIMIT, INT32_LIMIT, fake_quantize_bias, floor_for, weight_scale_floor
from fxqat.numerics import SCALE_MAX, valid_scale
from tests.reference import Gradients, as_float64, lsq_reference

needs_kernels = pytest.mark.skipif(kernels.LIBRARY is None, reason=f"kernels: {kernels.STATE}")

CODE_ERROR = 1 / 504
"""Half a code, in steps of the grid."""


class Case(NamedTuple):
    """Arguments of ``FakeQuantizeSTE``."""

    x: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None = None
    factor: torch.Tensor | None = None
    used_scale: torch.Tensor | None = None
    unit_scale: torch.Tensor | None = None
    limits: tuple[int, int] = (-128, 127)
    axis: int | None = None
    scale_bits: int = 24
    step: int = 1
    grad_scale: float = 1.0

    def layout(self) -> kernels.Layout | None:
        return kernels.layout(self.x, *self[1:6], self.axis)

    def result(self, input_kept: bool = True) -> torch.Tensor:
        settings = (*self.limits, self.axis, self.grad_scale, self.scale_bits, input_kept, self.step)
        return FakeQuantizeSTE.apply(*self[:6], *settings)

    def gradients(self, grad: torch.Tensor, input_kept: bool = True) -> list[torch.Tensor]:
        """Of x, scale and zero point, if there is one."""
        leaves = [None if value is None else value.detach().requires_grad_() for value in self[:3]]
        self._replace(x=leaves[0], scale=leaves[1], zero_point=leaves[2]).result(input_kept).backward(grad)
        return [leaf.grad for leaf in leaves if leaf is not None]


@contextmanager
def torch_operators() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "LIBRARY", None)
        yield


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Any NaN equals any other: torch's own differ between the first elements of a tensor and the last."""
    patterns = [torch.where(each.isnan(), math.nan, each).contiguous().view(torch.int32) for each in (a, b)]
    return a.shape == b.shape and torch.equal(*patterns)


def hard_values(shape: tuple[int, ...], scale: float, seed: int = 0) -> torch.Tensor:
    """NaN, infinities, both zeros, subnormals, huge numbers, ties, boundaries, and random values beyond the range."""
    random = torch.Generator().manual_seed(seed)
    special = [math.nan, math.inf, -math.inf, -0.0, 0.0, 1e-45, -1e-45, 1e-39, -1e-39, 3.4e38, -3.4e38, 1e-30, -0.3]
    ties = torch.cat([torch.arange(-20, 20), torch.arange(-132, -120), torch.arange(120, 132), torch.arange(250, 260)])
    values = torch.cat([torch.tensor(special), (ties + 0.5) * scale, ties * scale])
    size = math.prod(shape)
    x = torch.randn(size, generator=random) * scale * 80
    places = torch.randperm(size, generator=random)[: len(values)]
    x[places] = values[: len(places)]
    return x.reshape(shape)


def channel_values(channels: int, low: float, high: float, seed: int) -> torch.Tensor:
    return torch.empty(channels).uniform_(low, high, generator=torch.Generator().manual_seed(seed))


SCHEMES = {
    "symmetric": {},
    "narrow": {"limits": (-127, 127)},
    "unsigned": {"limits": (0, 255)},
    "2 bits": {"limits": (-2, 1)},
    "16 bits": {"limits": (-32768, 32767)},
    "zero point": {"zero_point": 3.4},
    "zero point, unsigned": {"zero_point": 7.5, "limits": (0, 255)},
    "even zero point": {"zero_point": 7.0, "limits": (0, 255), "step": 2},
    "zero point of NaN": {"zero_point": math.nan},
    "zero point beyond the range": {"zero_point": 1e9, "limits": (-8, 7), "step": 3},
    "power of two": {"scale_bits": 1},
    "few bits": {"scale_bits": 9},
    "factor": {"factor": -1.7},
    "used scale": {"used_scale": 0.11, "zero_point": 2.0},
    "unit": {"unit_scale": 0.9},
    "unit, few bits": {"unit_scale": 3.1, "scale_bits": 9, "zero_point": 2.0},
    "everything": {"factor": 0.3, "used_scale": 0.07, "unit_scale": 0.7, "zero_point": -3.0, "limits": (-8, 7)},
}
PLACES = [
    ((700,), None),
    ((9, 90), None),
    ((3, 250), 0),
    ((250, 3), 1),
    ((250, 3), -1),
    ((5, 4, 40), 1),
    ((2, 3, 8, 5, 6), 2),
    ((600,), 0),
    ((3, 40000), 0),
    ((40000, 3), 1),
    ((2, 20000, 2), 1),
    ((120000,), None),
]


def case(scheme: dict[str, Any], shape: tuple[int, ...], axis: int | None, x: torch.Tensor | None = None) -> Case:
    """A case of a scheme; per channel, everything differs between the channels."""
    numbers = {
        key: value for key, value in scheme.items() if key in ("zero_point", "factor", "used_scale", "unit_scale")
    }
    others = {key: value for key, value in scheme.items() if key not in numbers}
    if axis is None:
        values = {key: torch.tensor(value) for key, value in numbers.items()}
        scale = torch.tensor(0.1)
    else:
        channels = shape[axis]
        values = {key: value * channel_values(channels, 0.5, 1.5, 1) for key, value in numbers.items()}
        scale = channel_values(channels, 0.05, 0.2, 2)
    return Case(hard_values(shape, 0.1) if x is None else x, scale, **values, **others, axis=axis)


def assert_same_forward(problem: Case) -> None:
    assert problem.layout() is not None
    # the sign of torch's zero depends on the place in memory where a limit is 0, too
    added = 0.0 if problem.zero_point is not None and problem.zero_point.isnan().any() else -0.0
    for input_kept in (True, False):
        leaves = problem._replace(x=problem.x.detach().requires_grad_())
        found = leaves.result(input_kept).detach()
        with torch_operators():
            expected = problem.result()
        assert same_bits(found + added, expected + added)
        assert found.stride() == expected.stride()


@needs_kernels
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.parametrize(("shape", "axis"), PLACES, ids=str)
def test_forward_has_the_bits_of_torch(
    shape: tuple[int, ...], axis: int | None, scheme: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(straight_through, "SMALL_FOR_CODES", 0)
    assert_same_forward(case(scheme, shape, axis))


@needs_kernels
@pytest.mark.parametrize("bits", [1, 2, 9, 23, 24])
def test_any_scale_is_the_valid_one(bits: int) -> None:
    hard = [0.0, -0.0, math.nan, math.inf, -math.inf, 1e-45, -3e38, 3e38, SCALE_MAX, -SCALE_MAX, 1.5, 1.4999999]
    scale = torch.cat([torch.tensor(hard), torch.randn(500, generator=torch.Generator().manual_seed(0))])
    x = torch.cat([torch.linspace(-300, 300, 63), torch.tensor([math.nan])]).expand(len(scale), 64)
    assert_same_forward(Case(x, scale, axis=0, scale_bits=bits))


@needs_kernels
@pytest.mark.parametrize("arranged", ["channels_last", "transposed", "strided", "expanded", "flipped", "one row"])
@pytest.mark.parametrize("axis", [None, 0, 1, 2, 3])
def test_forward_of_any_arrangement_in_memory(arranged: str, axis: int | None) -> None:
    x = hard_values((4, 3, 6, 10), 0.1)
    x = {
        "channels_last": lambda: x.to(memory_format=torch.channels_last),
        "transposed": lambda: x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
        "strided": lambda: x.repeat_interleave(2, dim=3)[..., ::2],
        "expanded": lambda: x[:, :1].expand(4, 3, 6, 10),
        "flipped": lambda: x.flip(2)[1:].transpose(0, 2),
        "one row": lambda: x[:1].to(memory_format=torch.channels_last),
    }[arranged]()
    assert_same_forward(case(SCHEMES["zero point"], tuple(x.shape), axis, x))


@needs_kernels
@pytest.mark.parametrize("shared", ["scale", "zero_point", "factor", "used_scale", "unit_scale"])
def test_one_value_for_all_channels_beside_values_per_channel(shared: str) -> None:
    problem = case(SCHEMES["everything"], (6, 5, 30), 1)
    problem = problem._replace(**{shared: getattr(problem, shared)[0]})
    assert_same_forward(problem)
    grad = torch.randn(6, 5, 30, generator=torch.Generator().manual_seed(3))
    problem = problem._replace(x=problem.x.nan_to_num(0.0, 0.0, 0.0).clamp(-30, 30))
    found = problem.gradients(grad)
    with torch_operators():
        expected = problem.gradients(grad)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@needs_kernels
def test_a_scalar_and_one_channel() -> None:
    assert_same_forward(Case(torch.tensor(0.26), torch.tensor(0.1), torch.tensor(2.0)))
    assert_same_forward(Case(torch.randn(1, 7), torch.full((1,), 0.1), torch.full((1,), 2.0), axis=0))


@pytest.mark.parametrize("axis", [None, 1])
def test_an_empty_tensor(axis: int | None) -> None:
    scale = torch.tensor(0.1) if axis is None else torch.full((3,), 0.1)
    problem = Case(torch.empty(0, 3), scale, axis=axis)
    assert problem.layout() is None
    to_x, to_scale = problem.gradients(torch.empty(0, 3))
    assert to_x.shape == (0, 3)
    assert to_scale.tolist() == torch.zeros_like(scale).tolist()


def exact(problem: Case, grad: torch.Tensor) -> Gradients:
    zero_point = torch.zeros_like(problem.scale) if problem.zero_point is None else problem.zero_point
    numbers = (as_float64(value) for value in (problem.x, problem.scale, zero_point))
    return lsq_reference(*numbers, problem.limits, as_float64(grad), problem.axis)


def summed(values: torch.Tensor, problem: Case) -> np.ndarray:
    """Sums of a tensor of x's shape per scale, in float64."""
    wide = as_float64(values)
    if problem.axis is None:
        return wide.sum()
    axis = problem.axis % wide.ndim
    return wide.sum(tuple(dim for dim in range(wide.ndim) if dim != axis))


def smooth_case(shape: tuple[int, ...], axis: int | None, limits: tuple[int, int], seed: int) -> Case:
    """Random values of which some are outside, whole zero points, scales whose bits are few: x / scale is exact."""
    random = torch.Generator().manual_seed(seed)
    size = () if axis is None else (shape[axis],)
    scale = 2.0 ** torch.randint(-4, 3, size, generator=random)
    middle = (limits[0] + limits[1]) // 2
    zero_point = torch.full(size, float(middle)) + torch.randint(-2, 2, size, generator=random)
    steps = torch.randn(shape, generator=random) * (limits[1] - limits[0]) / 4
    wide = (values if axis is None else values.reshape([-1 if d == axis % len(shape) else 1 for d in range(len(shape))])
            for values in (scale, zero_point))  # fmt: skip
    wide_scale, wide_zero_point = wide
    return Case((steps - wide_zero_point + middle) * wide_scale, scale, zero_point, limits=limits, axis=axis)


@needs_kernels
@pytest.mark.parametrize("limits", [(-128, 127), (0, 255), (-8, 7)], ids=str)
@pytest.mark.parametrize(("shape", "axis"), PLACES, ids=str)
def test_gradients_are_as_exact_as_those_of_torch(
    shape: tuple[int, ...], axis: int | None, limits: tuple[int, int]
) -> None:
    problem = smooth_case(shape, axis, limits, seed=0)
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    found = problem.gradients(grad)
    with torch_operators():
        of_torch = problem.gradients(grad)
    expected = exact(problem, grad)
    assert same_bits(found[0], of_torch[0])
    np.testing.assert_array_equal(as_float64(found[0]), expected.x)
    for ours, theirs, wanted in zip(found[1:], of_torch[1:], expected[1:], strict=True):
        size = np.abs(wanted).max()
        error, error_of_torch = (np.abs(as_float64(each) - wanted).max() for each in (ours, theirs))
        assert error <= 2 * error_of_torch + 1e-6 * size


@needs_kernels
@pytest.mark.parametrize("limits", [(-128, 127), (0, 255), (-8, 7), (-32768, 32767)], ids=str)
@pytest.mark.parametrize(("shape", "axis"), [place for place in PLACES if math.prod(place[0]) > 4096], ids=str)
def test_what_8_bit_codes_lose(
    shape: tuple[int, ...], axis: int | None, limits: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = smooth_case(shape, axis, limits, seed=2)
    spy = Spy(kernels.backward)
    monkeypatch.setattr(kernels, "backward", spy)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    for grad, is_error in ((noise, False), (problem.result() - problem.x, True)):  # the second: of the squared error
        found = problem.gradients(grad, input_kept=False)
        expected = exact(problem, grad)
        np.testing.assert_array_equal(as_float64(found[0]), expected.x)
        error = np.abs(as_float64(found[1]) - expected.scale)
        assert np.all(error <= CODE_ERROR * summed(grad.abs(), problem) + 1e-5 * np.abs(expected.scale) + 1e-9)
        if is_error and math.prod(shape) // expected.scale.size > 1000:
            assert np.all(error <= 1e-3 * np.abs(expected.scale))
        np.testing.assert_allclose(as_float64(found[2]), expected.zero_point, rtol=1e-4, atol=1e-3)
    assert [args[0].dtype for args in spy.calls] == [torch.int8] * 2


@needs_kernels
@pytest.mark.parametrize("bits", [1, 9, 24])
@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("bad", [None, math.nan, math.inf])
@pytest.mark.parametrize("with_units", [True, False])
def test_rounding_of_a_bias_has_the_bits_of_torch(
    bits: int, per_channel: bool, bad: float | None, with_units: bool
) -> None:
    random = torch.Generator().manual_seed(0)
    for size in (1, 7, 300):
        bias = torch.randn(size, generator=random) * 10.0 ** torch.randint(-9, 9, (size,), generator=random)
        bias[size // 2] = 0.0 if bad is None else bad
        weight_scale = 10.0 ** torch.randint(-9, 1, (size,), generator=random) * channel_values(size, -1.5, 1.5, 4)
        weight_scale = weight_scale if per_channel else weight_scale[0]
        input_scale = torch.tensor(-0.0173)
        units = (torch.tensor(0.77), weight_scale.abs() * 1.3) if with_units else (None, None)
        found = kernels.round_bias(bias, input_scale, weight_scale, *units, bits, bits, BIAS_LIMIT, INT32_LIMIT)
        assert found is not None
        if with_units:
            input_scale, weight_scale = input_scale * units[0], weight_scale * units[1]
        scale = valid_scale(input_scale, bits)
        floor = floor_for(weight_scale, weight_scale_floor(bias, scale), 1)
        expected = torch.maximum(valid_scale(weight_scale, bits), floor)
        assert same_bits(found[0], expected)
        assert same_bits(bias + found[1], fake_quantize_bias(bias, scale * expected))


@needs_kernels
def test_biases_that_the_kernels_do_not_round() -> None:
    bias, one, bits = torch.ones(4), torch.tensor(1.0), (None, None, 24, 24, BIAS_LIMIT, INT32_LIMIT)
    assert kernels.round_bias(bias, one, torch.ones(4), *bits) is not None
    for other in (torch.ones(2), torch.ones(4).double(), torch.ones(8)[::2]):
        assert kernels.round_bias(bias, one, other, *bits) is None
    assert kernels.round_bias(bias, torch.ones(1), torch.ones(4), *bits) is None
    assert kernels.round_bias(bias.double(), one, torch.ones(4), *bits) is None
    for units in ((torch.ones(1), None), (None, one), (None, torch.ones(4).double())):
        assert kernels.round_bias(bias, one, torch.ones(4), *units, *bits[2:]) is None


def product(problem: Case, value: torch.Tensor, again: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """``value @ rounded x.T``, and the other tensors that autograd saves for it."""
    x_hat = problem.result()
    with rounded_again(x_hat) if again else nullcontext():
        y = torch.nn.functional.linear(value, x_hat)
    node = y.grad_fn
    assert node is not None
    return y, [t for t in (node._saved_self, node._saved_mat2) if t is not None and t.data_ptr() == x_hat.data_ptr()]


@needs_kernels
@pytest.mark.parametrize(
    "scheme", ["symmetric", "zero point, unsigned", "few bits", "factor", "used scale", "everything"]
)
@pytest.mark.parametrize("axis", [None, 0, 1])
def test_what_is_rounded_again_in_the_backward_pass_is_not_kept(scheme: str, axis: int | None) -> None:
    problem = case(SCHEMES[scheme], (90, 70), axis, torch.randn(90, 70, generator=torch.Generator().manual_seed(1)))
    value, grad = (torch.randn(5, size, generator=torch.Generator().manual_seed(size)) for size in (70, 90))
    found = []
    for again in (False, True):
        leaves = [tensor.clone().requires_grad_() for tensor in (value, problem.x, problem.scale)]
        y, kept = product(problem._replace(x=leaves[1], scale=leaves[2]), leaves[0], again)
        assert len(kept) == (not again)
        found.append([y.detach(), *torch.autograd.grad(y, leaves, grad)])
    assert all(same_bits(a, b) for a, b in zip(*found, strict=True))


@needs_kernels
def test_second_derivatives_of_what_is_rounded_again() -> None:
    random = torch.Generator().manual_seed(0)
    value, x = (torch.randn(size, 70, generator=random, requires_grad=True) for size in (5, 90))
    found = []
    for again in (False, True):
        y, _ = product(Case(x, torch.tensor(0.02)), value, again)
        (first,) = torch.autograd.grad(y.pow(2).sum(), value, create_graph=True)
        found.append(torch.autograd.grad(first.pow(2).sum(), [value, x]))
    assert all(same_bits(a, b) for a, b in zip(*found, strict=True))


@needs_kernels
def test_a_weight_that_was_written_to_is_not_rounded_again() -> None:
    value, x = torch.randn(5, 70, requires_grad=True), torch.randn(90, 70, requires_grad=True)
    y, _ = product(Case(x, torch.tensor(0.02)), value, again=True)
    with torch.no_grad():
        x.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@needs_kernels
def test_other_hooks_on_saved_tensors_are_left_alone() -> None:
    value, x = torch.randn(5, 70, requires_grad=True), torch.randn(90, 70, requires_grad=True)
    seen: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.numel()) or t, lambda t: t):
        _, kept = product(Case(x, torch.tensor(0.02)), value, again=True)
    assert len(kept) == 1
    assert {350, 6300} <= set(seen)
    with torch.autograd.graph.disable_saved_tensors_hooks("none"):
        _, kept = product(Case(x, torch.tensor(0.02)), value, again=True)
    assert len(kept) == 1


class Spy:
    """Calls a function and keeps its arguments."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *args: Any) -> Any:
        self.calls.append(args)
        return self.function(*args)


@needs_kernels
@pytest.mark.parametrize("input_kept", [True, False])
@pytest.mark.parametrize(("shape", "axis"), [((150000,), None), ((3, 50000), 0), ((50000, 3), 1), ((10, 5, 3000), 1)])
def test_the_number_of_threads_makes_no_difference(shape: tuple[int, ...], axis: int | None, input_kept: bool) -> None:
    problem = smooth_case(shape, axis, (-128, 127), seed=4)
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            results.append([problem.result(input_kept), *problem.gradients(grad, input_kept)])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(results[0], other, strict=True))


@needs_kernels
@pytest.mark.parametrize("arranged", ["strided", "expanded", "transposed"])
@pytest.mark.parametrize("input_kept", [True, False])
def test_gradients_of_any_arrangement_in_memory(arranged: str, input_kept: bool) -> None:
    problem = smooth_case((40, 6, 30), 1, (-128, 127), seed=6)
    grad = torch.randn(40, 6, 30, generator=torch.Generator().manual_seed(7))
    if arranged == "expanded":
        grad = grad[:, :1].expand(40, 6, 30)
    plain = problem.gradients(grad.contiguous(), input_kept)
    if arranged == "strided":
        problem = problem._replace(x=problem.x.repeat_interleave(2, dim=2)[..., ::2])
    elif arranged == "transposed":
        problem = problem._replace(x=problem.x.transpose(0, 2).contiguous().transpose(0, 2))
    found = problem.gradients(grad, input_kept)
    assert torch.equal(found[0], plain[0])
    for a, b in zip(found[1:], plain[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)


@needs_kernels
@pytest.mark.parametrize("input_kept", [True, False])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["x", "grad inside", "grad outside"])
def test_a_bad_batch_moves_no_parameter(where: str, bad: float, input_kept: bool) -> None:
    x = torch.linspace(-9.0, 9.0, 40000).add(0.01).repeat(3, 1)
    grad = torch.ones(3, 40000)
    if where == "x":
        x[1, 20000] = bad
    else:
        grad[1, 20000 if where == "grad inside" else 0] = bad
    problem = Case(x, torch.full((3,), 1.0), torch.zeros(3), limits=(-8, 7), axis=0)
    found = problem.gradients(grad, input_kept)
    with torch_operators():
        expected = problem.gradients(grad, input_kept)
    if where == "x" and math.isnan(bad):  # torch's own gradient at NaN depends on the place in memory
        found[0][1, 20000] = expected[0][1, 20000]
    torch.testing.assert_close(found[0], expected[0], equal_nan=True, rtol=0, atol=0)
    for a, b in zip(found[1:], expected[1:], strict=True):
        assert torch.isfinite(a).all()
        assert ((a == 0) == (b == 0)).all()
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-2)
    if where != "x":
        assert found[1][1] == 0.0
        assert all(found[1][[0, 2]] != 0.0)


@needs_kernels
@pytest.mark.parametrize("input_kept", [True, False])
@pytest.mark.parametrize(("shape", "axis"), [((9000,), None), ((4, 3000), 0), ((30, 5, 60), -2)])
@pytest.mark.parametrize("with_zero_point", [True, False])
def test_gradients_of_the_kernels_result_by_torch(
    shape: tuple[int, ...], axis: int | None, input_kept: bool, with_zero_point: bool
) -> None:
    problem = smooth_case(shape, axis, (-8, 7), seed=8)
    leaves = [value.requires_grad_() for value in problem[: 2 + with_zero_point]]
    problem = problem._replace(zero_point=leaves[2] if with_zero_point else None)
    result = problem.result(input_kept)
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(9))
    expected = torch.autograd.grad(result, leaves, grad, retain_graph=True)
    with Watch() as watch:
        found = torch.autograd.grad(result, leaves, grad)
    assert any("sum" in name for name in watch.names)
    assert torch.equal(found[0], expected[0])
    for a, b in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)


class Watch(TorchDispatchMode):
    """Keeps the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: D105
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@needs_kernels
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:FutureWarning")
def test_only_float32_on_cpu_is_taken() -> None:
    plain = torch.ones(4, 4)
    assert kernels.usable(plain)
    assert kernels.usable(torch.nn.Parameter(plain))
    with torch.inference_mode():
        assert kernels.usable(torch.ones(2))
    for other in (plain.half(), plain.bfloat16(), plain.double(), plain.to_sparse(), plain.to("meta"), plain.int()):
        assert not kernels.usable(other)
    assert not kernels.usable(torch.complex(plain, plain).conj().imag)  # lazily negated
    seen: list[bool] = []
    torch.vmap(lambda row: seen.append(kernels.usable(row)) or row)(plain)
    torch.func.grad(lambda row: seen.append(kernels.usable(row)) or row.sum())(plain)
    with torch._subclasses.FakeTensorMode() as mode:
        seen += [kernels.usable(torch.ones(2)), kernels.usable(mode.from_tensor(plain))]
    with Watch():
        seen.append(kernels.usable(plain))
    torch.jit.trace(lambda x: seen.append(kernels.usable(x)) or x + 1, plain, check_trace=False)
    assert seen == [False] * 6


@needs_kernels
def test_parameters_of_another_kind_are_left_to_torch() -> None:
    x, scale = torch.randn(4, 4), torch.full((4,), 0.1)
    assert Case(x, scale, axis=0).layout() == kernels.Layout(1, 4, 4, 1)
    assert Case(x, scale.double(), axis=0).layout() is None
    assert Case(x, torch.full((8,), 0.1)[::2], axis=0).layout() is None
    assert Case(x, scale, axis=None).layout() is None
    assert Case(x, torch.full((1,), 0.1), axis=0).layout() is None


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_computed_by_torch(dtype: torch.dtype) -> None:
    problem = smooth_case((40, 30), 1, (-128, 127), seed=1)
    problem = problem._replace(x=problem.x.to(dtype))
    grad = torch.ones(40, 30, dtype=dtype)
    assert problem.layout() is None
    found = [problem.result(), *problem.gradients(grad)]
    with torch_operators():
        expected = [problem.result(), *problem.gradients(grad)]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@needs_kernels
def test_tracers_see_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = smooth_case((40, 30), 1, (-128, 127), seed=1)
    expected = problem.result()
    spy = Spy(kernels.forward)
    monkeypatch.setattr(kernels, "forward", spy)

    def function(x: torch.Tensor) -> torch.Tensor:
        return problem._replace(x=x).result()

    graph = make_fx(function)(problem.x)
    assert torch.equal(graph(problem.x), expected)
    assert spy.calls == []
    function(problem.x)
    assert len(spy.calls) == 1


def test_the_switch() -> None:
    program = "from fxqat.fake_quantize import kernels; print(kernels.LIBRARY, kernels.STATE, sep=';')"
    environment = {**os.environ, kernels.SWITCH: "0"}
    found = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "None;switched off by FXQAT_KERNELS=0"


@needs_kernels
def test_kernels_of_another_source_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "kernels.c"
    other.write_bytes(kernels.SOURCE.read_bytes() + b"\n")
    monkeypatch.setattr(kernels, "SOURCE", other)
    library, state = kernels._load()
    assert library is None
    assert "another version" in state


def test_a_library_that_is_none_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(kernels.SWITCH, raising=False)
    monkeypatch.setattr(kernels, "__file__", str(tmp_path / "kernels.py"))
    assert kernels._load() == (None, "not built")
    (tmp_path / f"_kernels{kernels.EXTENSION_SUFFIXES[0]}").write_bytes(b"not a library")
    library, state = kernels._load()
    assert library is None
    assert state.startswith("not loaded: ")

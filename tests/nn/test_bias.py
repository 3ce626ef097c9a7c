"""The int32 bias: its rounding, its gradient, and raised weight scales where it would overflow."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxqat.nn.bias import (
    INT32_LIMIT,
    fake_quantize_bias,
    floor_for,
    quantize_bias,
    weight_scale_floor,
)
from fxqat.numerics import SCALE_MAX, SCALE_MIN

PROPERTY = settings(max_examples=200, deadline=None, derandomize=True)
SIZES = st.floats(2.0**-30, 2.0**20, width=32)


def test_the_limit_is_the_largest_float32_that_int32_holds() -> None:
    limit = np.float32(INT32_LIMIT)
    assert int(limit) == INT32_LIMIT < 2**31
    assert int(np.nextafter(limit, np.float32(np.inf))) == 2**31


def test_bias_integers_round_half_to_even_and_saturate() -> None:
    bias = torch.tensor([0.5, 1.5, -2.5, 1e12, -1e12, 3.2])
    q = quantize_bias(bias, torch.ones(6))
    assert q.tolist() == [0.0, 2.0, -2.0, INT32_LIMIT, -INT32_LIMIT, 3.0]
    assert q.to(torch.int32).tolist() == [0, 2, -2, int(INT32_LIMIT), -int(INT32_LIMIT), 3]


@PROPERTY
@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=8), st.floats(2.0**-18, 4.0, width=32))
def test_simulated_bias_is_bit_for_bit_the_stored_one(values: list[float], scale: float) -> None:
    bias, scales = torch.tensor(values), torch.full((len(values),), scale)
    stored = quantize_bias(bias, scales).to(torch.int32).float() * scales
    simulated = fake_quantize_bias(bias, scales)
    if torch.all(bias.abs() / scale < 2**31 - 256):
        assert torch.equal(simulated, stored)
    assert torch.equal(quantize_bias(bias, scales), quantize_bias(bias, scales).round())


@pytest.mark.parametrize("scale", [1e-6, 1.0, 100.0])
def test_gradient_passes_straight_through(scale: float) -> None:
    bias = torch.tensor([0.3, -7.0, 0.0], requires_grad=True)
    fake_quantize_bias(bias, torch.full((3,), scale)).backward(torch.tensor([1.0, -2.0, 3.0]))
    assert bias.grad.tolist() == [1.0, -2.0, 3.0]
    steps = fake_quantize_bias(bias, torch.full((3,), scale)).detach() / scale
    assert torch.allclose(steps, steps.round(), rtol=1e-6, atol=0)


@PROPERTY
@given(SIZES, st.floats(2.0**-30, 2.0**10, width=32), st.floats(SCALE_MIN, 1.0, width=32))
def test_above_its_floor_a_weight_scale_never_overflows_the_bias(
    bias: float, input_scale: float, weight_scale: float
) -> None:
    biases, scales = torch.tensor([bias, -bias]), torch.tensor(input_scale)
    floor = floor_for(torch.ones(2), weight_scale_floor(biases, scales), groups=1)
    used = scales * torch.maximum(torch.full((2,), weight_scale), floor)
    unclamped = biases.double() / used.double()
    assert torch.all(unclamped.abs() < 2**31 - 128)
    assert torch.all((fake_quantize_bias(biases, used) - biases).abs() <= used * 0.501 + biases.abs() * 2.0**-22)
    exact_floor = bias / (2.0**30 * input_scale)  # half of the int32 range is left to the products
    assert torch.all((floor >= exact_floor) | (floor == SCALE_MAX))
    assert torch.all((floor <= exact_floor * 2.001) | (floor == SCALE_MIN))  # a power of two
    assert torch.all(torch.frexp(floor).mantissa == 0.5)


def test_a_bias_of_zero_needs_no_floor() -> None:
    floor = weight_scale_floor(torch.zeros(3), torch.tensor(0.1))
    assert floor.tolist() == [0.0, 0.0, 0.0]
    assert floor_for(torch.ones(3), floor, 1).tolist() == [SCALE_MIN] * 3


def test_floors_are_shared_as_the_weight_scales_are() -> None:
    floor = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 0.5])
    assert floor_for(torch.tensor(1.0), floor, 1).tolist() == 8.0
    assert floor_for(torch.ones(6), floor, 1).tolist() == [1.0, 2.0, 4.0, 4.0, 8.0, 0.5]
    assert floor_for(torch.ones(3), floor, 2).tolist() == [4.0, 8.0, 4.0]
    assert floor_for(torch.ones(2), floor, 3).tolist() == [8.0, 4.0]


def test_the_floor_is_no_part_of_the_gradient() -> None:
    bias = torch.tensor([2.0], requires_grad=True)
    assert not weight_scale_floor(bias, torch.tensor(0.5)).requires_grad

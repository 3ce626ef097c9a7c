"""The kernels of scales for GPUs against those for CPUs; ``test_triton_kernels.py`` runs them in the interpreter."""

from __future__ import annotations

import importlib
import math
from types import ModuleType

import pytest
import torch

from fxqat.fake_quantize import kernels
from fxqat.nn.bias import BIAS_LIMIT, INT32_LIMIT
from tests.fake_quantize.test_kernels import channel_values, needs_kernels, same_bits
from tests.fake_quantize.test_triton_kernels import of_kernels, there

pytestmark = [needs_kernels, of_kernels, pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # numpy, of NaN


@pytest.fixture(scope="module")
def triton_scales() -> ModuleType:
    return importlib.import_module("fxqat.fake_quantize.triton_scales")


@pytest.mark.parametrize("bits", [1, 9, 24])
@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("bad", [None, math.nan, math.inf])
@pytest.mark.parametrize("with_units", [True, False])
def test_rounding_of_a_bias_has_the_bits_of_the_kernels_for_cpus(
    bits: int, per_channel: bool, bad: float | None, with_units: bool, triton_scales: ModuleType
) -> None:
    random = torch.Generator().manual_seed(0)
    for size in (1, 7, 1300):
        bias = torch.randn(size, generator=random) * 10.0 ** torch.randint(-9, 9, (size,), generator=random)
        bias[size // 2] = 0.0 if bad is None else bad
        weight_scale = 10.0 ** torch.randint(-9, 1, (size,), generator=random) * channel_values(size, -1.5, 1.5, 4)
        weight_scale = weight_scale if per_channel else weight_scale[0]
        units = (torch.tensor(0.77), weight_scale.abs() * 1.3) if with_units else (None, None)
        tensors = (bias, torch.tensor(-0.0173), weight_scale, *units)
        settings = (bits, bits, BIAS_LIMIT, INT32_LIMIT)
        expected = kernels.round_bias(*tensors, *settings)
        found = triton_scales.round_bias(*map(there, tensors), *settings)
        assert expected is not None
        assert all(same_bits(a.cpu(), b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("with_factor", [True, False])
@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("bad", [None, math.nan, math.inf])
def test_growth_has_the_bits_of_the_kernels_for_cpus(
    bad: float | None, per_channel: bool, with_factor: bool, triton_scales: ModuleType
) -> None:
    for channels in (1, 7, 1300):
        weight = torch.randn(channels, 3, 5, generator=torch.Generator().manual_seed(channels))
        weight[channels // 2] = 0.0 if bad is None else bad
        before = channel_values(channels, 0.1, 3.0, 7)
        before[::4] = 0.0
        before = before if per_channel else before[-1]
        factor = channel_values(channels, -2.0, 2.0, 5) if with_factor else None
        magnitudes = before.clone(), there(before.clone())
        expected = kernels.growth(weight, factor, magnitudes[0], 0, 1e-3)
        found = triton_scales.growth(there(weight), there(factor), magnitudes[1], 0, 1e-3)
        assert expected is not None
        assert same_bits(found.cpu(), expected)
        assert same_bits(magnitudes[1].cpu(), magnitudes[0])

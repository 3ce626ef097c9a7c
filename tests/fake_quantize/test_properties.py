"""Properties of fake-quantization for random schemes, parameters and values."""

from typing import NamedTuple

import numpy as np
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fxqat.fake_quantize.base import WEIGHT
from fxqat.fake_quantize.learnable import START
from fxqat.numerics import choose_qparams, fake_quantize, quantize
from fxqat.scheme import QuantizeScheme
from tests.builders import make_fake_quant
from tests.reference import as_float64, away_from_ties, lsq_reference

PROPERTY = settings(max_examples=100, deadline=None, derandomize=True)


class Quantizer(NamedTuple):
    """A scheme with parameters that are valid for it."""

    scheme: QuantizeScheme
    scale: torch.Tensor
    zero_point: torch.Tensor

    def round(self, x: torch.Tensor) -> torch.Tensor:
        """Fake-quantize per tensor."""
        return fake_quantize(x, self.scale, self.zero_point, self.scheme.quant_min, self.scheme.quant_max)


@st.composite
def schemes(draw: st.DrawFn) -> QuantizeScheme:
    """Any scheme without power-of-two or fixed range."""
    flags = {name: draw(st.booleans()) for name in ("signed", "symmetric", "narrow_range")}
    return QuantizeScheme(draw(st.integers(2, 16)), **flags)


@st.composite
def quantizers(draw: st.DrawFn) -> Quantizer:
    """Any scheme with any scale, and any zero point it may have."""
    scheme = draw(schemes())
    scale = draw(st.floats(2.0**-20, 2.0**10, width=32))
    zero_point = scheme.symmetric_zero_point
    if not scheme.symmetric:
        zero_point = draw(st.integers(scheme.quant_min, scheme.quant_max))
    return Quantizer(scheme, torch.tensor(scale), torch.tensor(float(zero_point)))


def reals(quantizer: Quantizer, steps: np.ndarray) -> torch.Tensor:
    """Values in steps, centred on the range of a quantizer and as wide, as real values."""
    scheme = quantizer.scheme
    span = scheme.quant_max - scheme.quant_min
    middle = (scheme.quant_max + scheme.quant_min) / 2 - quantizer.zero_point.item()
    return torch.from_numpy(((steps * span + middle) * quantizer.scale.item()).astype(np.float32))


STEPS = hnp.arrays(np.float64, 24, elements=st.floats(-0.8, 0.8))


@PROPERTY
@given(quantizers(), STEPS)
def test_rounding_twice_is_rounding_once(quantizer: Quantizer, steps: np.ndarray) -> None:
    once = quantizer.round(reals(quantizer, steps))
    assert torch.equal(quantizer.round(once), once)
    assert torch.isfinite(once).all()


@PROPERTY
@given(quantizers(), STEPS)
def test_order_is_kept(quantizer: Quantizer, steps: np.ndarray) -> None:
    x = reals(quantizer, np.sort(steps))
    rounded = quantizer.round(x)
    assert torch.all(rounded[1:] >= rounded[:-1])
    low, high = (
        (limit - quantizer.zero_point) * quantizer.scale
        for limit in (quantizer.scheme.quant_min, quantizer.scheme.quant_max)
    )
    assert torch.all((rounded >= low) & (rounded <= high))


@PROPERTY
@given(quantizers(), STEPS)
def test_the_error_inside_the_range_is_at_most_half_a_step(quantizer: Quantizer, steps: np.ndarray) -> None:
    x = reals(quantizer, steps)
    scheme, scale = quantizer.scheme, quantizer.scale.double()
    q = x.double() / scale + quantizer.zero_point
    inside = (q >= scheme.quant_min) & (q <= scheme.quant_max)
    error = (quantizer.round(x).double() - x.double()).abs()
    slack = x.double().abs() * 2.0**-23  # of the float32 division and multiplication
    assert torch.all(error[inside] <= scale / 2 + slack[inside])
    below, above = q < scheme.quant_min, q > scheme.quant_max
    integers = quantize(x, quantizer.scale, quantizer.zero_point, scheme.quant_min, scheme.quant_max)
    assert torch.all(integers[below] == scheme.quant_min)
    assert torch.all(integers[above] == scheme.quant_max)


@PROPERTY
@given(quantizers())
def test_zero_is_zero(quantizer: Quantizer) -> None:
    scheme = quantizer.scheme
    assert quantizer.round(torch.tensor(0.0)) == 0.0
    q = quantize(torch.tensor(0.0), quantizer.scale, quantizer.zero_point, scheme.quant_min, scheme.quant_max)
    assert q == quantizer.zero_point


@PROPERTY
@given(schemes(), st.floats(-1e6, 1e6, width=32), st.floats(-1e6, 1e6, width=32))
def test_an_observed_range_is_covered_to_one_step(scheme: QuantizeScheme, one: float, other: float) -> None:
    low, high = torch.tensor(min(one, other)), torch.tensor(max(one, other))
    assume(high - low > 1e-6 or max(abs(one), abs(other)) > 1e-6)
    quantizer = Quantizer(scheme, *choose_qparams(low, high, scheme))
    assert quantizer.round(torch.tensor(0.0)) == 0.0
    for end in (low, high):
        # half a step of rounding, and half a step that an end loses when zero is put on the grid
        assert (quantizer.round(end) - end).abs() <= quantizer.scale * (1 + 1e-5) + end.abs() * 2.0**-22


@PROPERTY
@given(schemes(), st.integers(-3, 2), st.integers(0, 2**31 - 1))
def test_per_channel_is_per_tensor_on_every_slice(scheme: QuantizeScheme, axis: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 4, 4, generator=generator) * 50
    scale = torch.rand(4, generator=generator) + 0.01
    zero_point = torch.randint(scheme.quant_min, scheme.quant_max + 1, (4,), generator=generator).float()
    whole = fake_quantize(x, scale, zero_point, scheme.quant_min, scheme.quant_max, axis)
    for channel in range(4):
        alone = Quantizer(scheme, scale[channel], zero_point[channel]).round(x.select(axis, channel))
        assert torch.equal(whole.select(axis, channel), alone)
    assert whole.shape == x.shape


@PROPERTY
@given(schemes(), st.booleans(), st.integers(0, 2**31 - 1))
def test_learned_scale_gradient_is_the_formula(scheme: QuantizeScheme, per_channel: bool, seed: int) -> None:
    limits = (scheme.quant_min, scheme.quant_max)
    scheme = QuantizeScheme(scheme.bit_width, scheme.signed, scheme.symmetric, per_channel, scheme.narrow_range)
    quant = make_fake_quant(scheme, WEIGHT, axis=0, channels=3)
    random = np.random.default_rng(seed)
    chosen = torch.from_numpy(np.asarray(np.exp2(random.uniform(-6, 2, quant.scale.shape))))
    quant.store(chosen, quant.zero_point)
    scale, zero_point = quant.qparams()
    steps = torch.from_numpy(away_from_ties((3, 40), limits, seed).astype(np.float32))
    axis = 0 if per_channel else None
    wide = (-1, 1) if per_channel else ()
    x = ((steps - zero_point.reshape(wide)) * scale.reshape(wide)).requires_grad_()
    grad = torch.from_numpy(random.standard_normal((3, 40)).astype(np.float32))
    quant.quantize(x).backward(grad)
    expected = lsq_reference(*map(as_float64, (x, scale, zero_point)), limits, as_float64(grad), axis)
    count = 40 if per_channel else 120
    factor = 1 / np.sqrt(count * scheme.quant_max)
    slope = expected.scale * as_float64(scale) / START * factor  # by the relative scale
    size = np.abs(slope).max()
    np.testing.assert_allclose(as_float64(quant.relative_scale.grad), slope, rtol=1e-3, atol=1e-3 * size)
    np.testing.assert_array_equal(as_float64(x.grad), expected.x)

"""The modules of the lowered graph: the integers and reals that training simulated."""

import pytest
import torch
from torch.nn import functional as F

from fxqat.nn import deployed
from fxqat.nn.deployed import QuantizeDequantize, RoundedTensor, attention, integer_type, stored_bias, stored_weight
from fxqat.numerics import dequantize, fake_quantize, quantize
from fxqat.scheme import QuantizeScheme

SCHEMES = [
    QuantizeScheme(bits, signed=signed, symmetric=signed, narrow_range=narrow, per_channel=per_channel)
    for bits in (2, 4, 8, 12, 16)
    for signed, narrow in ((True, False), (True, True), (False, False), (False, True))
    for per_channel in (True, False)
]
HELD = {2: torch.int8, 4: torch.int8, 8: torch.int8, 12: torch.int16, 16: torch.int16}
UNSIGNED = {torch.int8: torch.uint8, torch.int16: torch.uint16}
EVERY_OPSET = pytest.mark.parametrize("opset", [21, 25])
EVERY_SCHEME = pytest.mark.parametrize("scheme", SCHEMES, ids=str)


def parameters(scheme: QuantizeScheme, channels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random scale and zero point of a scheme."""
    generator = torch.Generator().manual_seed(0)
    shape = (channels,) if scheme.per_channel else ()
    scale = torch.rand(shape, generator=generator) + 0.01
    zero_point = torch.randint(scheme.quant_min, scheme.quant_max + 1, shape, generator=generator).float()
    return scale, torch.full(shape, float(scheme.symmetric_zero_point)) if scheme.symmetric else zero_point


def values(scheme: QuantizeScheme, shape: tuple[int, ...]) -> torch.Tensor:
    """Random values well beyond the range of a scheme."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 2.0**scheme.bit_width


def held_in(scheme: QuantizeScheme) -> torch.dtype:
    """The type that torch holds the integers of a scheme in."""
    dtype = HELD[scheme.bit_width]
    return dtype if scheme.signed else UNSIGNED[dtype]


@EVERY_OPSET
@EVERY_SCHEME
def test_a_pair_rounds_as_training_did_within_and_beyond_the_range(scheme: QuantizeScheme, opset: int) -> None:
    axis = 1 if scheme.per_channel else None
    scale, zero_point = parameters(scheme, 4)
    x = values(scheme, (50, 4, 5))
    pair = QuantizeDequantize(scheme, scale, zero_point, opset, axis)
    limits = (scheme.quant_min, scheme.quant_max)
    assert torch.equal(pair(x), fake_quantize(x, scale, zero_point, *limits, axis))
    assert pair.zero_point.dtype == held_in(scheme) == integer_type(scheme)
    assert pair.fills_storage == (scheme.bit_width in (4, 8, 16) and not scheme.narrow_range)


@EVERY_OPSET
@EVERY_SCHEME
def test_a_value_is_clipped_to_the_scheme_before_a_pair_that_saturates_to_the_type(
    scheme: QuantizeScheme, opset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale, zero_point = parameters(scheme, 4)
    axis = 0 if scheme.per_channel else None
    width = int(scheme.storage(opset).removeprefix("u").removeprefix("int"))
    low = -(2 ** (width - 1)) if scheme.signed else 0

    def saturating(x: torch.Tensor, *arguments: object) -> torch.Tensor:
        return fake_quantize(x, scale, zero_point, low, low + 2**width - 1, axis)

    monkeypatch.setattr(deployed, "fake_quantize", saturating)
    pair = QuantizeDequantize(scheme, scale, zero_point, opset, axis)
    reached = pair(torch.stack([torch.full((4,), -1e30), torch.full((4,), 1e30)], dim=1))
    for column, limit in enumerate((scheme.quant_min, scheme.quant_max)):
        assert torch.equal(reached[:, column], ((limit - zero_point) * scale).expand(4))


@EVERY_SCHEME
@pytest.mark.parametrize("axis", [0, 1])
def test_a_stored_weight_is_the_simulated_one(scheme: QuantizeScheme, axis: int) -> None:
    scale, zero_point = parameters(scheme, 4)
    weight = values(scheme, (4, 4, 3))
    stored = stored_weight(weight, scheme, scale, zero_point, axis)
    limits = (scheme.quant_min, scheme.quant_max)
    channel = axis if scheme.per_channel else None
    assert stored.integers.dtype == stored.zero_point.dtype == held_in(scheme)
    assert torch.equal(stored(), fake_quantize(weight, scale, zero_point, *limits, channel))
    whole = stored.integers.to(torch.int32).float()
    assert torch.equal(whole, quantize(weight, scale, zero_point, *limits, channel))


@EVERY_SCHEME
def test_a_rounded_tensor_is_the_stored_one(scheme: QuantizeScheme) -> None:
    scale, zero_point = parameters(scheme, 4)
    weight = values(scheme, (4, 6))
    pair = QuantizeDequantize(scheme, scale, zero_point, 21, 0 if scheme.per_channel else None)
    held = RoundedTensor(weight, pair)
    assert torch.equal(held(), stored_weight(weight, scheme, scale, zero_point, 0)())
    assert torch.equal(held.values, weight)


def test_a_stored_bias_is_int32() -> None:
    scale, integers = torch.tensor([0.5, 2.0]), torch.tensor([-(2.0**30), 7.0])
    stored = stored_bias(integers, scale)
    assert stored.integers.dtype == stored.zero_point.dtype == torch.int32
    assert stored().tolist() == [-(2.0**29), 14.0]
    assert torch.equal(stored(), dequantize(integers, scale, None, 0))


@pytest.mark.parametrize("rank", [2, 3, 4, 5, 6])
def test_attention_of_any_rank_is_that_of_torch(rank: int) -> None:
    lead = (2, 3, 2, 2)[: rank - 2]
    query, key, value = torch.randn(*lead, 5, 4), torch.randn(*lead, 7, 4), torch.randn(*lead, 7, 4)
    ones = [1] * (rank - 2)
    for mask in (None, torch.rand(5, 7) > 0.3, torch.randn(*lead, 1, 7), torch.randn(*ones, 5, 7)):
        expected = F.scaled_dot_product_attention(query, key, value, mask)
        torch.testing.assert_close(attention(query, key, value, mask), expected)
    causal = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.3)
    torch.testing.assert_close(attention(query, key, value, None, 0.0, True, scale=0.3), causal)

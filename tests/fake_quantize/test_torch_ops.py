"""The torch operators: torch can trace all of them, and those that do not compute say so."""

import pytest
import torch

from fxqat.fake_quantize import torch_ops
from fxqat.numerics import dynamic_quantize

OPERATORS = torch.ops.fxqat


def test_a_value_is_rounded_by_its_own_range() -> None:
    x = torch.randn(3, 4)
    q, scale, zero_point = dynamic_quantize(x)
    assert torch.equal(torch_ops.dynamic_quantize_dequantize(x), (q - zero_point) * scale)
    assert set(torch.library.opcheck(torch_ops.dynamic_quantize_dequantize, (x,)).values()) == {"SUCCESS"}


def test_what_takes_the_place_of_a_part_has_its_shape_and_type() -> None:
    x, q = torch.empty(3, 4, device="meta"), torch.empty(3, 4, dtype=torch.uint8, device="meta")
    rounded, real = OPERATORS.quantize_dequantize(x, 0), OPERATORS.dequantize(q, 1)
    assert rounded.shape == real.shape == (3, 4)
    assert rounded.dtype == real.dtype == torch.float32


@pytest.mark.parametrize("name", ["quantize_dequantize", "dequantize"])
def test_it_computes_nothing(name: str) -> None:
    with pytest.raises(NotImplementedError, match=f"fxqat::{name}"):
        getattr(OPERATORS, name)(torch.randn(3), 0)
    with pytest.raises(NotImplementedError, match="fxqat::dequantize.stored"):
        OPERATORS.dequantize.stored(0, [3])


def test_what_is_kept_is_a_copy() -> None:
    x = torch.randn(3, 4)
    kept = torch_ops.keep(x)
    assert torch.equal(kept, x)
    assert kept.data_ptr() != x.data_ptr()
    assert set(torch.library.opcheck(torch.ops.fxqat.keep.default, (x,)).values()) == {"SUCCESS"}

"""The torch operators: they compute the pure functions, and torch can trace all of them."""

import pytest
import torch

from fxqat.fake_quantize import torch_ops
from fxqat.numerics import dequantize, fake_quantize, quantize

STORAGE = [(torch.int8, -128, 127), (torch.uint8, 0, 255), (torch.int16, -32768, 32767), (torch.uint16, 0, 65535)]


def pair_arguments(
    dtype: torch.dtype, low: int, high: int, axis: int | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(x, scale, zero_point)`` with the zero point in its integer type."""
    shape = () if axis is None else (4,)
    generator = torch.Generator().manual_seed(0)
    zero_point = torch.randint(low, high + 1, shape, generator=generator).to(dtype)
    scale = torch.rand(shape, generator=generator) + 0.01
    return torch.randn(3, 4, 5, generator=generator) * (high - low) / 2, scale, zero_point


@pytest.mark.parametrize(("dtype", "low", "high"), STORAGE, ids=lambda value: str(value))
@pytest.mark.parametrize("axis", [None, 1])
def test_operators_compute_the_pure_functions(dtype: torch.dtype, low: int, high: int, axis: int | None) -> None:
    x, scale, zero_point = pair_arguments(dtype, low, high, axis)
    real = zero_point.to(torch.int32).float()
    rounded = torch_ops.quantize_dequantize(x, scale, zero_point, low, high, axis or 0)
    assert torch.equal(rounded, fake_quantize(x, scale, real, low, high, axis))
    integers = quantize(x, scale, real, low, high, axis).to(torch.int32).to(dtype)
    assert torch.equal(
        torch_ops.dequantize(integers, scale, zero_point, axis or 0), dequantize(integers, scale, real, axis)
    )
    assert torch.equal(torch_ops.dequantize(integers, scale, zero_point, axis or 0), rounded)


@pytest.mark.parametrize("axis", [None, 1])
def test_torch_accepts_the_operators(axis: int | None) -> None:
    x, scale, zero_point = pair_arguments(torch.int8, -128, 127, axis)
    pair = torch.library.opcheck(torch_ops.quantize_dequantize, (x, scale, zero_point, -128, 127, axis or 0))
    stored = torch.library.opcheck(torch_ops.dequantize, (x.to(torch.int8), scale, zero_point, axis or 0))
    assert set(pair.values()) == {"SUCCESS"}
    assert set(stored.values()) == {"SUCCESS"}


def test_operators_become_one_node_each_in_an_exported_program() -> None:
    class Pair(torch.nn.Module):
        def forward(self, x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor) -> torch.Tensor:
            return torch_ops.quantize_dequantize(x, scale, zero_point, -128, 127, 0) + 1

    program = torch.export.export(Pair(), pair_arguments(torch.int8, -128, 127, None))
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert targets.count("fxqat.quantize_dequantize.default") == 1
    assert len(targets) == 2


def test_what_is_kept_is_a_copy() -> None:
    x = torch.randn(3, 4)
    kept = torch_ops.keep(x)
    assert torch.equal(kept, x)
    assert kept.data_ptr() != x.data_ptr()
    assert set(torch.library.opcheck(torch.ops.fxqat.keep.default, (x,)).values()) == {"SUCCESS"}

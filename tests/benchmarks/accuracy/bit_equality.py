"""Bit equality of one quantizer with ONNX Runtime's QuantizeLinear and DequantizeLinear.

For every integer type, signed and unsigned, per tensor and per channel: ``fxqat.numerics`` and ONNX Runtime (graph
optimizations off) quantize random values and every exact tie; the integers and reals that differ are counted. Zeros of
different sign count as equal, because an integer has no negative zero. Prints a table; the exit status is 1 if anything
differs.

    python tests/benchmarks/accuracy/bit_equality.py
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import onnx
import onnxruntime as ort
import torch
from onnx import helper
from prettytable import PrettyTable

from fxqat.numerics import fake_quantize, per_axis, quantize
from fxqat.scheme import QuantizeScheme

CHANNELS = 16
WIDEST_OPSET = 25
"""The opset that has the types of every width."""


@dataclass(frozen=True)
class Case:
    """One quantizer: a scheme, and the channel axis or None."""

    scheme: QuantizeScheme
    axis: int | None

    def __str__(self) -> str:
        return f"{self.scheme}" + ("" if self.axis is None else f" (axis {self.axis})")


@dataclass(frozen=True)
class Count:
    """The number of values compared, and of those that differ as integers or as reals."""

    values: int = 0
    integers: int = 0
    reals: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(self.values + other.values, self.integers + other.integers, self.reals + other.reals)


def cases(bit_widths: tuple[int, ...] = (2, 4, 8, 16)) -> list[Case]:
    """Every combination of width, signedness and granularity, symmetric if signed."""
    return [
        Case(QuantizeScheme(bit_width=bits, signed=signed, symmetric=signed, per_channel=axis is not None), axis)
        for bits in bit_widths
        for signed in (True, False)
        for axis in (None, 0)
    ]


@lru_cache
def _session(storage: str, axis: int, opset: int) -> ort.InferenceSession:
    """A Q/DQ pair whose zero point and integers are int32 outside, because numpy has no 4- and 2-bit types."""
    dtype = onnx.TensorProto.DataType.Value(storage.upper())
    real, integer = onnx.TensorProto.FLOAT, onnx.TensorProto.INT32
    nodes = [
        helper.make_node("Cast", ["zero_point"], ["z"], to=dtype),
        helper.make_node("QuantizeLinear", ["x", "scale", "z"], ["typed"], axis=axis),
        helper.make_node("DequantizeLinear", ["typed", "scale", "z"], ["x_hat"], axis=axis),
        helper.make_node("Cast", ["typed"], ["q"], to=integer),
    ]
    inputs = [("x", real), ("scale", real), ("zero_point", integer)]
    outputs = [("q", integer), ("x_hat", real)]
    values = [[helper.make_tensor_value_info(name, kind, None) for name, kind in side] for side in (inputs, outputs)]
    graph = helper.make_graph(nodes, "pair", *values)
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=13 if opset == 25 else 10
    )
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def onnx_pair(
    x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, case: Case, opset: int = WIDEST_OPSET
) -> tuple[torch.Tensor, torch.Tensor]:
    """The integers (as int32) and reals that ONNX Runtime computes from ``x``.

    If the scheme is narrower than its storage type, ``x`` is clipped to the scheme's range first, as in a file.
    """
    scheme = case.scheme
    if not scheme.fills_storage(opset):
        low, high = ((bound - zero_point) * scale for bound in (scheme.quant_min, scheme.quant_max))
        low, high = (per_axis(bound, x.dim(), case.axis) for bound in (low, high))
        x = torch.minimum(torch.maximum(x, low), high)
    session = _session(scheme.storage(opset), case.axis or 0, opset)
    feeds = {"x": x.numpy(), "scale": scale.numpy(), "zero_point": zero_point.numpy().astype(np.int32)}
    integers, reals = session.run(None, feeds)
    return torch.from_numpy(integers), torch.from_numpy(reals)


def compare(x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, case: Case) -> Count:
    """Quantize ``x`` with fxqat and with ONNX Runtime, and count the differences."""
    scheme = case.scheme
    limits = (scheme.quant_min, scheme.quant_max)
    offset = None if scheme.symmetric and scheme.symmetric_zero_point == 0 else zero_point
    integers, reals = onnx_pair(x, scale, zero_point, case)
    ours = quantize(x, scale, offset, *limits, case.axis).to(torch.int32)
    ours_hat = fake_quantize(x, scale, offset, *limits, case.axis)
    return Count(x.numel(), int((ours != integers).sum()), int((ours_hat != reals).sum()))


def parameters(case: Case, random: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales over 24 binary orders of magnitude, and zero points over the whole range."""
    shape = () if case.axis is None else (CHANNELS,)
    scale = np.exp2(random.uniform(-20, 4, shape)).astype(np.float32)
    zero_point = random.integers(case.scheme.quant_min, case.scheme.quant_max + 1, shape)
    if case.scheme.symmetric:
        zero_point = np.full(shape, case.scheme.symmetric_zero_point)
    return torch.from_numpy(np.asarray(scale)), torch.from_numpy(np.asarray(zero_point, dtype=np.float32))


def random_values(
    case: Case, scale: torch.Tensor, zero_point: torch.Tensor, count: int, random: np.random.Generator
) -> torch.Tensor:
    """Random reals of shape ``(count,)`` or ``(CHANNELS, count / CHANNELS)``.

    Half are uniform over 1.3 times the range, a quarter are normal with a standard deviation of a quarter of the range,
    and a quarter lie within a few float32 steps of a tie. The last ones are extremes: infinities, the largest and the
    smallest float32.
    """
    scheme = case.scheme
    shape = (count,) if case.axis is None else (CHANNELS, count // CHANNELS)
    steps = scheme.quant_max - scheme.quant_min + 1
    length = shape[-1]
    q = random.random(shape, dtype=np.float32)
    q = (q - 0.5) * (1.3 * steps) + (scheme.quant_min + steps / 2)
    quarter = length // 4
    q[..., :quarter] = random.standard_normal((*shape[:-1], quarter), dtype=np.float32) * (steps / 4)
    near = q[..., quarter : 2 * quarter]
    near[...] = (np.floor(near) + 0.5) * (1 + random.integers(-3, 4, near.shape) * np.float32(2**-24))
    q[..., quarter:] -= per_axis(zero_point, len(shape), case.axis).numpy()
    x = q.astype(np.float32) * per_axis(scale, len(shape), case.axis).numpy()
    extremes = [np.inf, -np.inf, 3.4e38, -3.4e38, 1e-45, -1e-45, 0.0]
    x[..., -len(extremes) :] = extremes
    return torch.from_numpy(x)


def tie_values(case: Case, scale: torch.Tensor, zero_point: torch.Tensor) -> torch.Tensor:
    """Every tie ``(k + 1/2) * scale`` inside and just outside the range, and its two neighbours in float32."""
    scheme = case.scheme
    k = np.arange(scheme.quant_min - 3, scheme.quant_max + 4, dtype=np.float64) + 0.5
    shape = (-1,) if case.axis is None else (-1, 1)
    k = k - zero_point.numpy().astype(np.float64).reshape(shape)
    tie = (k * scale.numpy().astype(np.float64).reshape(shape)).astype(np.float32)
    inf = np.float32(np.inf)
    return torch.from_numpy(np.concatenate([tie, np.nextafter(tie, -inf), np.nextafter(tie, inf)], axis=-1))


def compare_random(case: Case, count: int, chunk: int, seed: int = 0) -> Count:
    """Compare ``count`` random values, with new parameters for each chunk."""
    random = np.random.default_rng(seed)
    total = Count()
    while total.values < count:
        scale, zero_point = parameters(case, random)
        size = max(CHANNELS * 32, min(chunk, count - total.values) // CHANNELS * CHANNELS)
        total += compare(random_values(case, scale, zero_point, size, random), scale, zero_point, case)
    return total


def compare_ties(case: Case, scales: int = 24, seed: int = 0) -> Count:
    """Compare all ties, for random scales and for powers of two (then a tie is exact in float32)."""
    random = np.random.default_rng(seed)
    total = Count()
    for i in range(scales):
        scale, zero_point = parameters(case, random)
        if i % 2:
            scale = torch.exp2(torch.floor(torch.log2(scale)))
        total += compare(tie_values(case, scale, zero_point), scale, zero_point, case)
    return total


def table(count: int, chunk: int) -> Iterator[tuple[str, Count, Count]]:
    """For each case: its name, and the counts of random values and of ties."""
    for case in cases():
        yield str(case), compare_random(case, count, chunk), compare_ties(case)


def main() -> int:
    """Print the table; the result is 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--values", type=int, default=20_000_000, help="random values per row")
    parser.add_argument("--chunk", type=int, default=1_000_000, help="values at a time")
    arguments = parser.parse_args()
    printed = PrettyTable(["quantizer", "type", "random values", "ties", "integers that differ", "reals that differ"])
    printed.align = "r"
    printed.align["quantizer"] = "l"
    differ = 0
    for (name, random, ties), case in zip(table(arguments.values, arguments.chunk), cases(), strict=True):
        both = random + ties
        storage = case.scheme.storage(WIDEST_OPSET)
        printed.add_row([name, storage, f"{random.values:,}", f"{ties.values:,}", both.integers, both.reals])
        differ += both.integers + both.reals
    print(printed)
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())

"""Verify a .tflite file: does LiteRT compute with it what the fake-quant model computes?

As for the ONNX file (:mod:`fxqat.onnx.verify`), integers are compared tensor by tensor, in two ways: *step by step*,
where the readers of each quantized tensor get the integers of the fake-quant model, and *end to end*, where the file
runs freely. Both are done with LiteRT's reference kernels and with its default ones.

LiteRT's kernels compute with multipliers of 31 bits in place of float scales, so a value beside a rounding boundary may
become the next integer. Rules, for both kinds of kernels:

1. step by step, no value is off by 2 steps or more; of all values of the file, at most ``MAX_OFF_BY_ONE`` are off by 1,
   and of one tensor's at most ``MAX_OF_TENSOR`` and three more. Values on a rounding boundary are not counted: those
   within ``TIE`` of a step of it, because torch rounds a half to even, LiteRT up or away from zero; and averages and
   products of two activations within ``2**-(k+1)``, because kernels round them twice, first to a multiple of ``2**-k``;
2. step by step, every output agrees with the model's, see :mod:`fxqat.onnx.output_parity`.

A tensor of the file is recognized by its scale, its zero point and its shape in any order of the dimensions that the
converter writes, and among several by its values: the converter moves, joins and drops transposes. A tensor that the
converter made part of one operator is not in the file; it is listed, and the operator is judged by the next tensor. Of
several tensors that the file has as one, the first is judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from prettytable import PrettyTable

from fxqat.errors import ParityError
from fxqat.onnx.output_parity import MAX_ERROR, compare
from fxqat.onnx.verify import Shares, shares
from fxqat.scheme import QuantizedTensor
from fxqat.tflite.flatbuffer import (
    graph_of,
    integer_tensors,
    operators,
    quantization_of,
    read_model,
    with_given_integers,
    with_tensors_out,
)
from fxqat.tflite.run_tflite import Kernels, run_tflite

MAX_OFF_BY_ONE, MAX_OF_TENSOR = 0.01, 0.05
TIE = 1e-4
KERNELS: tuple[Kernels, ...] = ("reference", "default")


@dataclass(frozen=True)
class TfliteTensorParity:
    """One quantized tensor, computed by one kind of kernels.

    Args:
        name: its name in the parameter file.
        size: number of values compared.
        step: the comparison step by step.
        free: the comparison end to end.
    """

    name: str
    size: int
    step: Shares
    free: Shares

    @property
    def passed(self) -> bool:
        """Rule 1 for one tensor."""
        return self.step.off_by_2_plus == 0 and self.off_by_1 <= 3 + MAX_OF_TENSOR * self.size

    @property
    def off_by_1(self) -> int:
        """Step by step, the number of values off by 1 that are not on a rounding boundary."""
        return round((self.step.off_by_1 - self.step.ties) * self.size)


@dataclass(frozen=True)
class TfliteOutputParity:
    """One float output, computed by one kind of kernels.

    Args:
        name: its name.
        step_error: relative error step by step, see :class:`~fxqat.onnx.output_parity.Difference`.
        step_mismatches: step by step: integers, NaN and infinities that differ.
        cosine: cosine similarity end to end, for information.
    """

    name: str
    step_error: float
    step_mismatches: int
    cosine: float

    @property
    def passed(self) -> bool:
        """Rule 2."""
        return self.step_mismatches == 0 and self.step_error <= MAX_ERROR


@dataclass(frozen=True)
class KernelParity:
    """The comparison with one kind of kernels.

    Args:
        tensors: every quantized tensor that the file computes.
        outputs: every output.
    """

    tensors: tuple[TfliteTensorParity, ...]
    outputs: tuple[TfliteOutputParity, ...]

    @property
    def passed(self) -> bool:
        """Whether all rules hold."""
        off, size = sum(tensor.off_by_1 for tensor in self.tensors), sum(tensor.size for tensor in self.tensors)
        all_hold = all(tensor.passed for tensor in self.tensors) and all(output.passed for output in self.outputs)
        return all_hold and off <= max(1.0, MAX_OFF_BY_ONE * size)


@dataclass(frozen=True)
class TfliteCertificate:
    """The results of the comparison; prints as a table.

    Args:
        kernels: the comparison by kind of kernels, ``"reference"`` and ``"default"``.
        joined: quantized tensors that the file does not have, because the converter made one operator of what computes
            and what reads them.
        float_operators: the operators of the file that compute in float, with their number.
        versions: the versions of the packages.
    """

    kernels: Mapping[str, KernelParity]
    joined: tuple[str, ...]
    float_operators: Mapping[str, int]
    versions: Mapping[str, str]

    @property
    def passed(self) -> bool:
        """Whether all rules hold with both kinds of kernels."""
        return all(parity.passed for parity in self.kernels.values())

    def as_json(self) -> dict[str, Any]:
        """The certificate as a dict for JSON."""
        return {"format": "fxqat.tflite_parity", "version": 1, "passed": self.passed} | asdict(self)

    def __str__(self) -> str:
        header = ["tensor", "kernels", "step: off by 1", "step: 2+", "free: off by 1", "free: 2+", "verdict"]
        table = PrettyTable(header, align="l")
        lines = []
        for kernels, parity in self.kernels.items():
            for t in parity.tensors:
                found = [f"{v:.4%}" for s in (t.step, t.free) for v in (s.off_by_1, s.off_by_2_plus)]
                table.add_row([t.name, kernels, *found, "" if t.passed else "FAILED"])
            lines += [
                f"output {o.name}, {kernels} kernels: error {o.step_error:.3g} step by step, cosine {o.cosine:.7f} "
                f"end to end{'' if o.passed else '  FAILED'}"
                for o in parity.outputs
            ]
        in_float = ", ".join(f"{number} {name}" for name, number in self.float_operators.items())
        head = f"LiteRT parity {'passed' if self.passed else 'FAILED'}; operators in float: {in_float or 'none'}"
        return "\n".join([head, str(table), *lines])


def verify_tflite(
    content: bytes,
    inputs: Sequence[np.ndarray],
    tensors: Sequence[QuantizedTensor],
    integers: Mapping[str, np.ndarray],
    reals: Mapping[str, np.ndarray],
    outputs: Mapping[str, np.ndarray],
    versions: Mapping[str, str],
) -> TfliteCertificate:
    """Run a file in LiteRT and compare.

    Args:
        content: the file, with float inputs and outputs.
        inputs: its inputs, in its order and layout.
        tensors: the quantized activations, with signed zero points.
        integers: their values in the fake-quant model, by name.
        reals: the values before they were rounded, by name.
        outputs: the outputs of the fake-quant model, by name.
        versions: versions of packages, for the certificate.

    Raises:
        ExportError: LiteRT cannot load or run the file.
        ParityError: an output has another shape than the model's.
    """
    indices = integer_tensors(read_model(content))
    free_file, last = with_tensors_out(content, indices), len(outputs)
    free = {kind: run_tflite(free_file, inputs, kind) for kind in KERNELS}
    found = dict(zip(indices, free["reference"][last:], strict=True))
    places = recognize(content, found, tensors, integers, reals)
    judged = {place.index: (name, place) for name, place in reversed(places.items())}  # the first name of each
    step_file, given = with_given_integers(content, {index: place.values for index, (_, place) in judged.items()})
    kernels: dict[str, KernelParity] = {}
    for kind in KERNELS:
        step = run_tflite(step_file, [*inputs, *given], kind)
        by_step, freely = (
            dict(zip(judged, step[last:], strict=True)),
            dict(zip(indices, free[kind][last:], strict=True)),
        )
        kernels[kind] = KernelParity(
            tuple(
                TfliteTensorParity(name, p.values.size, *(shares(v[i], p.values, p.at_tie) for v in (by_step, freely)))
                for i, (name, p) in reversed(judged.items())
            ),
            tuple(
                _compare_output(name, expected, *pair)
                for (name, expected), *pair in zip(outputs.items(), step[:last], free[kind][:last], strict=True)
            ),
        )
    joined = tuple(tensor.name for tensor in tensors if tensor.name not in places)
    return TfliteCertificate(kernels, joined, float_operators(content), versions)


def require_tflite_parity(certificate: TfliteCertificate) -> None:
    """Check that all rules hold.

    Raises:
        ParityError: one does not.
    """
    if not certificate.passed:
        raise ParityError(
            f"the .tflite file does not compute what the model computes; nothing was written.\n{certificate}"
        )


def float_operators(content: bytes) -> dict[str, int]:
    """The operators of a file that compute in float, with their number."""
    found: dict[str, int] = {}
    for operator in operators(read_model(content)):
        if operator.is_float:
            found[operator.name] = found.get(operator.name, 0) + 1
    return found


@dataclass(frozen=True)
class Place:
    """Where the file has a quantized tensor.

    Args:
        index: the index of the tensor.
        values: the integers that it should have, in the layout of the file.
        at_tie: which of them were real values on a rounding boundary.
    """

    index: int
    values: np.ndarray
    at_tie: np.ndarray


def recognize(
    content: bytes,
    found: Mapping[int, np.ndarray],
    tensors: Sequence[QuantizedTensor],
    integers: Mapping[str, np.ndarray],
    reals: Mapping[str, np.ndarray],
) -> dict[str, Place]:
    """Where the file has each quantized tensor, by name; those that it does not have are left out.

    Args:
        content: the file.
        found: the values that it computes, by index.
        tensors: the quantized activations.
        integers: the values that they should have, by name.
        reals: these values before they were rounded, by name.
    """
    model = read_model(content)
    graph, near = graph_of(model), _boundaries(model)
    parameters: dict[tuple[float, int], list[int]] = {}
    for index in found:
        quantization = quantization_of(graph.tensors[index])
        if quantization is not None:
            key = (float(quantization[0][0]), int(quantization[1][0]))
            parameters.setdefault(key, []).append(index)
    places = {}
    for tensor in tensors:
        steps = reals[tensor.name].astype(np.float64) / tensor.scale[0]
        distance = np.abs(steps - np.floor(steps) - 0.5)
        both = (integers[tensor.name].astype(np.int8), distance)
        candidates = [
            (float(np.abs(found[index].astype(np.int32) - values).mean()), Place(index, values, far <= near[index]))
            for index in parameters.get((tensor.scale[0], tensor.zero_point[0]), ())
            for values, far in zip(*(_layouts(array, found[index].shape) for array in both), strict=True)
        ]
        if candidates:
            places[tensor.name] = min(candidates, key=lambda each: each[0])[1]  # the first of several equal ones
    return places


def _boundaries(model: Any) -> dict[int, float]:
    """How near to a rounding boundary, in steps, a value of each computed tensor is not counted."""
    graph = graph_of(model)
    near = {}
    for operator in operators(model):
        for index in operator.outputs:
            near[index] = TIE
            if operator.name in ("MEAN", "BATCH_MATMUL") and not operator.is_float:
                multiplier = _multiplier(operator.name, *(graph.tensors[i] for i in (index, *operator.inputs[:2])))
                near[index] += 2.0 ** (np.frexp(multiplier)[1] - 1) if multiplier < 0.5 else 0.0
    return near


def _multiplier(name: str, result: Any, x: Any, y: Any) -> float:
    """What an operator multiplies its sum of integers by."""
    multiplier = x.quantization.scale[0] / result.quantization.scale[0]
    other = np.prod(result.shape) / np.prod(x.shape) if name == "MEAN" else y.quantization.scale[0]
    return float(multiplier * other)


def _layouts(values: np.ndarray, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    """The values in each layout of the given shape: as they are, channels last, channels first."""
    if values.size != int(np.prod(shape)):
        return
    orders = [values]
    if values.ndim > 2:
        orders += [np.moveaxis(values, 1, -1), np.moveaxis(values, -1, 1)]
    sizes = [size for size in shape if size > 1]
    for order in orders:
        if order is values or [size for size in order.shape if size > 1] == sizes:
            yield np.ascontiguousarray(order).reshape(shape)


def _compare_output(name: str, expected: np.ndarray, step: np.ndarray, free: np.ndarray) -> TfliteOutputParity:
    if step.shape != expected.shape:
        raise ParityError(
            f"output {name}: the .tflite file computes the shape {step.shape}, the model {expected.shape}; nothing was "
            "written."
        )
    difference = compare(step, expected)
    return TfliteOutputParity(name, difference.error, difference.mismatches, compare(free, expected).cosine)

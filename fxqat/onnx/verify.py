"""Verify: does the file compute what the fake-quant model computes? The answer is the parity certificate.

The file runs in ONNX Runtime with graph optimizations disabled, so that every node computes what the ONNX standard
defines. Its integers are compared with those of the fake-quant model, tensor by tensor, in two ways:

* step by step: every operation that reads a quantized tensor gets the integers of the fake-quant model, so each tensor
  is judged alone. The verdict is based on this comparison;
* end to end: the file runs freely. Rounding turns a tiny difference at a boundary into a whole step, and deep networks
  spread it; these shares show how far. The first tensor with a wrong value is named.

Rules:

1. step by step, no value is off by 2 steps or more, and at most ``MAX_OFF_BY_ONE`` of a tensor's values, or a single
   one, is off by 1 (float sums in another order can move a value across a rounding boundary). Values within ``TIE`` of
   a step of a boundary are not counted: a function of a quantized tensor has few different values, and if one of them
   lies on a boundary, so do all its copies. For 16 bits, whose steps are 256 times finer, ``TIE`` is 256 times larger;
2. end to end, rule 1 holds for every tensor that is computed from exact tensors;
3. step by step, every output agrees with the model's, see :mod:`fxqat.onnx.output_parity`, and every index selects
   the value that it should, see :mod:`fxqat.onnx.selections`.

There is no limit for the end-to-end error of the outputs: how far one step spreads depends on the network, not on the
file. What ONNX Runtime's optimizer makes of the file is no rule either, because it is not what the file says, but if it
fails or changes an output much, the user hears of it: :meth:`ParityCertificate.warnings`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from prettytable import PrettyTable

from fxqat.errors import ExportError, ParityError
from fxqat.onnx.external_data import values_of
from fxqat.onnx.name_tensors import QUANTIZERS
from fxqat.onnx.opset import opset_of
from fxqat.onnx.ort_runs import (
    COMPUTED,
    run,
    run_optimized,
    sums_saturate,
    with_integers_in,
    with_integers_out,
    with_reals_out,
)
from fxqat.onnx.output_parity import OutputParity, compare
from fxqat.onnx.selections import (
    DATA,
    SIZE,
    SelectionParity,
    add_sizes,
    compare_selection,
    indices_of,
    match_selections,
)

MAX_OFF_BY_ONE = 0.005
MIN_OPTIMIZED = 0.99
"""Below this cosine, ONNX Runtime's optimizer is said to change an output."""

SATURATES = (
    " On this processor, x86 without VNNI, ONNX Runtime's sums of products of uint8 and int8 saturate. To run the file "
    'in ONNX Runtime on such a processor, export it with runtime="onnxruntime_avx2": the same integers, with weights '
    "in uint8"
)
INTEGER_PRODUCTS = ("MatMulInteger", "ConvInteger", "DynamicQuantizeLSTM")
"""Operators that compute such sums without an optimizer."""

TIE = 1e-4
LEVELS = {onnx.TensorProto.INT16: 2**16, onnx.TensorProto.UINT16: 2**16}
"""Number of integers of the types with more than 8 bits."""


@dataclass(frozen=True)
class Shares:
    """Shares of a tensor's values that are off by 1, and by 2 or more steps.

    Args:
        off_by_1: share of values one step off.
        off_by_2_plus: share of values off by more.
        ties: share of values one step off that lie on a rounding boundary; 0 for tensors that pass without it.
    """

    off_by_1: float
    off_by_2_plus: float
    ties: float = 0.0

    @property
    def off(self) -> float:
        """Share of values that are off at all."""
        return self.off_by_1 + self.off_by_2_plus

    def within(self, size: int) -> bool:
        """Rule 1 for a tensor of ``size`` values; one value may always be off by 1."""
        counted = round((self.off_by_1 - self.ties) * size)
        return self.off_by_2_plus == 0 and counted <= max(1.0, MAX_OFF_BY_ONE * size)


@dataclass(frozen=True)
class TensorParity:
    """One quantized tensor.

    Args:
        name: its name in the file.
        size: number of values compared.
        step: the comparison step by step.
        free: the comparison end to end.
        is_first: whether, end to end, it is computed from exact tensors only.
    """

    name: str
    size: int
    step: Shares
    free: Shares
    is_first: bool

    @property
    def off_by_0(self) -> float:
        """Share of equal values, end to end."""
        return 1.0 - self.free.off

    @property
    def off_by_1(self) -> float:
        """Share of values one step off, end to end."""
        return self.free.off_by_1

    @property
    def off_by_2_plus(self) -> float:
        """Share of values two or more steps off, end to end."""
        return self.free.off_by_2_plus

    @property
    def passed(self) -> bool:
        """Rules 1 and 2."""
        return self.step.within(self.size) and (self.free.within(self.size) or not self.is_first)


@dataclass(frozen=True)
class ParityCertificate:
    """The results of the comparison; prints as a table.

    Args:
        tensors: every quantized tensor.
        outputs: every output.
        off_share: end to end, the share of all compared values that are off.
        first_diverging: end to end, the first tensor with a wrong value.
        onnxruntime_version: the version of ONNX Runtime.
        selections: the indices of every sort and maximum that was compared by the values it selects.
        optimized_error: the error of ONNX Runtime at full optimization, None if it runs.
        optimized_without: the names of optimizers that this run left out, see
            :func:`~fxqat.onnx.ort_runs.run_optimized`.
        second_size: the comparison at another size of the open dimensions, None if the file has none.
        end_to_end: the float model compared with the fake-quant model and the file, for information: the figures of
            ``fxqat.quantization.end_to_end``; None if there are none.
    """

    tensors: tuple[TensorParity, ...]
    outputs: tuple[OutputParity, ...]
    off_share: float
    first_diverging: str | None
    onnxruntime_version: str
    selections: tuple[SelectionParity, ...] = ()
    optimized_error: str | None = None
    optimized_without: tuple[str, ...] = ()
    second_size: ParityCertificate | None = None
    end_to_end: dict[str, Any] | None = None

    @property
    def passed(self) -> bool:
        """Whether all rules hold."""
        all_hold = all(tensor.passed for tensor in self.tensors) and all(output.passed for output in self.outputs)
        selected = all(selection.passed for selection in self.selections)
        return all_hold and selected and (self.second_size is None or self.second_size.passed)

    def warnings(self, model: onnx.ModelProto) -> tuple[str, ...]:
        """What a user of the file ``model`` must hear although it is right."""
        if self.optimized_error is not None:
            return (
                f"ONNX Runtime {self.onnxruntime_version} cannot load or run this file at its default optimization "
                f"level: {self.optimized_error}. The file itself is right: without optimizations it computes what the "
                "model computes. Set options.graph_optimization_level, or the session configuration entry "
                "session.disable_quant_qdq=1.",
            )
        changes = {o.name: o.optimized_change for o in self.outputs if o.optimized_change is not None}
        far = [f"{name} {change:.4f}" for name, change in changes.items() if change < MIN_OPTIMIZED]
        if not far:
            return ()
        return (
            f"at its default optimization level ONNX Runtime {self.onnxruntime_version} computes something else than "
            f"the file says. Cosine to the output without optimizations: {', '.join(far)}. Compare the accuracy of "
            f"both on your data.{f'{SATURATES}.' if _saturates(model) else ''}",
        )

    def as_json(self) -> dict[str, Any]:
        """The certificate as a dict for JSON.

        Version 2 has ``step_error``, ``step_mismatches`` and ``optimized_change`` of an output, ``selections``,
        ``optimized_error``, ``optimized_without`` and ``second_size``.
        """
        return {"format": "fxqat.parity", "version": 2, "passed": self.passed} | asdict(self)

    def summary(self) -> str:
        """The verdict and the outputs, without the table of tensors."""
        return "\n".join([self._head(), *self._ends()])

    def _head(self) -> str:
        verdict = "passed" if self.passed else "FAILED"
        return f"parity {verdict}: {self.off_share:.4%} of the quantized values off, first: {self.first_diverging}"

    def __str__(self) -> str:
        header = ["tensor", "step: off by 1", "step: 2+", "free: off by 1", "free: 2+", "verdict"]
        table = PrettyTable(header, align="l")
        for t in self.tensors:
            shares = [f"{value:.4%}" for s in (t.step, t.free) for value in (s.off_by_1, s.off_by_2_plus)]
            table.add_row([t.name, *shares, "" if t.passed else "FAILED"])
        return "\n".join([self._head(), str(table), *self._ends()])

    def _ends(self) -> list[str]:
        lines = [
            f"indices {s.name}: {s.ties} of {s.size} select an equal value instead, {s.wrong} another one"
            for s in self.selections
        ]
        lines += [_line(output) for output in self.outputs]
        lines += _end_to_end_lines(self.end_to_end)
        if self.optimized_error is not None:
            lines.append(f"ONNX Runtime fails at full optimization: {self.optimized_error}")
        if self.optimized_without:
            lines.append(f"full optimization ran without {', '.join(self.optimized_without)}, to save memory")
        second = [] if self.second_size is None else [f"at another size: {self.second_size}"]
        return [*lines, *second]


def verify(
    model: onnx.ModelProto,
    inputs: Sequence[np.ndarray],
    integers: Mapping[str, np.ndarray],
    outputs: Sequence[np.ndarray],
    selections: Mapping[str, Sequence[np.ndarray]] | None = None,
) -> ParityCertificate:
    """Run a model in ONNX Runtime and compare.

    Args:
        model: the exported model.
        inputs: its inputs, in the order of the graph.
        integers: int32 arrays of the fake-quant model, by the name of the quantized tensor in the file.
        outputs: the outputs of the fake-quant model.
        selections: the indices that it selects, see :func:`~fxqat.onnx.selections.match_selections`.

    Raises:
        ExportError: ONNX Runtime cannot load or run the model.
        ParityError: an output has another shape than the model's.
    """
    quantizers = [node for node in model.graph.node if node.op_type in QUANTIZERS and node.input[0] in integers]
    feeds = dict(zip([value.name for value in model.graph.input], inputs, strict=True))
    plain = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    indices = match_selections(model, selections or {})
    free = run(with_integers_out(model, quantizers, indices), feeds, plain)
    indices = {name: array for name, array in indices.items() if array.shape == free[name + COMPUTED].shape}
    step_model, step_feeds = with_integers_in(model, quantizers, integers, indices)
    add_sizes(step_model, (node.input[0] for node in model.graph.node if indices_of(node) in indices))
    step = run(step_model, feeds | step_feeds, plain)
    optimized = run_optimized(model, feeds)
    tensors = _compare_tensors(model, step, free, integers, indices, {})
    doubtful = {t.name for t in tensors if not t.passed}
    if doubtful:
        is_constant = [node for node in quantizers if node.op_type == "QuantizeLinear"]
        suspects = [node for node in is_constant if node.input[0] in doubtful]
        given = feeds | step_feeds
        reals = given | run(with_reals_out(step_model, doubtful - given.keys()), given, plain)
        tensors = _compare_tensors(model, step, free, integers, indices, ties_of(model, suspects, reals))
    off = sum(t.free.off * t.size for t in tensors)
    names = [value.name for value in model.graph.output]
    return ParityCertificate(
        tensors=tensors,
        outputs=tuple(
            _compare_output(name, expected, step, free, optimized.outputs)
            for name, expected in zip(names, outputs, strict=True)
        ),
        off_share=off / max(1, sum(t.size for t in tensors)),
        first_diverging=next((t.name for t in tensors if t.free.off > 0), None),
        onnxruntime_version=ort.__version__,
        selections=tuple(
            compare_selection(
                node, step[name + DATA], step[name + COMPUTED], indices[name], step.get(node.input[0] + SIZE)
            )
            for node in model.graph.node
            if (name := indices_of(node)) in indices
        ),
        optimized_error=optimized.error,
        optimized_without=optimized.without,
    )


def require_parity(
    model: onnx.ModelProto,
    inputs: Sequence[np.ndarray],
    integers: Mapping[str, np.ndarray],
    outputs: Sequence[np.ndarray],
    selections: Mapping[str, Sequence[np.ndarray]] | None = None,
) -> ParityCertificate:
    """Run :func:`verify` and return the certificate if all rules hold.

    Raises:
        ParityError: a rule does not hold.
        ExportError: ONNX Runtime cannot load or run the model.
    """
    certificate = verify(model, inputs, integers, outputs, selections)
    if not certificate.passed:
        raise ParityError(
            f"the exported file does not compute what the model computes; nothing was written.\n{certificate}"
            f"{_INPUTS_WITH_NAN if any(map(_has_nan, inputs)) else ''}{_saturation(model)}"
        )
    return certificate


def _saturation(model: onnx.ModelProto) -> str:
    """What the processor has to do with a failure; empty if it has nothing to do with it."""
    if not any(node.op_type in INTEGER_PRODUCTS for node in model.graph.node) or not _saturates(model):
        return ""
    return f"{SATURATES}. Or export with verify=False if the file will run on a processor with VNNI."


def _saturates(model: onnx.ModelProto) -> bool:
    """Whether sums of a file's products may saturate on this processor: weights are int8."""
    is_int8 = (tensor.data_type == onnx.TensorProto.INT8 for tensor in model.graph.initializer if tensor.dims)
    return any(is_int8) and sums_saturate()


def check_model(model: onnx.ModelProto, opset_version: int, path: Path | None = None) -> None:
    """Check the model with ``onnx.checker``, in full.

    Args:
        model: the model.
        opset_version: the opset that it must have.
        path: its file, if tensors of it are not in ``model``.

    Raises:
        ExportError: the checker rejects it, or it has another opset.
    """
    if opset_of(model) != opset_version:
        raise ExportError(f"asked for opset {opset_version}, the exporter reached {opset_of(model)}")
    try:
        onnx.checker.check_model(model if path is None else str(path), full_check=True)
    except Exception as cause:  # checker and shape inference have separate error types
        raise ExportError(f"onnx.checker rejects the exported model: {cause}") from cause


def _end_to_end_lines(end_to_end: dict[str, Any] | None) -> list[str]:
    if end_to_end is None:
        return []
    found = [(o["name"], what, o[what]) for o in end_to_end["example_inputs"] for what in ("fake_quant", "file")]
    found += [(o["name"], "fake_quant, calibration data", o) for o in end_to_end["calibration"] or ()]
    return [
        f"output {name}, float to {what.replace('_', '-')}: "
        + (
            f"cosine {o['cosine']:.5f}, {o['sqnr']:.1f} dB"
            if "cosine" in o
            else f"{o['changed']:.2%} of the values differ"
        )
        for name, what, o in found
    ]


def _line(output: OutputParity) -> str:
    optimized = "none" if output.cosine_optimized is None else f"{output.cosine_optimized:.7f}"
    wrong = f", {output.step_mismatches} values that differ" if output.step_mismatches else ""
    return (
        f"output {output.name}: error {output.step_error:.3g} and cosine {output.step_cosine:.7f} step by step{wrong}, "
        f"cosine {output.cosine:.7f} end to end (largest difference {output.max_abs_error:.3g}), {optimized} at full "
        f"optimization{'' if output.passed else '  FAILED'}"
    )


_INPUTS_WITH_NAN = "\nThe example inputs hold NaN, which has no integer: give others."


def _has_nan(array: np.ndarray) -> bool:
    return np.issubdtype(array.dtype, np.floating) and bool(np.isnan(array).any())


def _compare_output(
    name: str,
    expected: np.ndarray,
    step: Mapping[str, np.ndarray],
    free: Mapping[str, np.ndarray],
    optimized: Mapping[str, np.ndarray] | None,
) -> OutputParity:
    if step[name].shape != expected.shape:
        raise ParityError(
            f"output {name}: the exported file computes the shape {step[name].shape}, the model {expected.shape}; "
            "nothing was written."
        )
    by_step, end_to_end = compare(step[name], expected), compare(free[name], expected)
    is_float = expected.dtype.kind == "f"
    return OutputParity(
        name=name,
        step_error=by_step.error,
        step_mismatches=by_step.mismatches,
        step_cosine=by_step.cosine,
        cosine=end_to_end.cosine,
        max_abs_error=end_to_end.max_abs,
        cosine_optimized=compare(optimized[name], expected).cosine if optimized else None,
        optimized_change=compare(optimized[name], free[name]).cosine if optimized and is_float else None,
    )


def _compare_tensors(
    model: onnx.ModelProto,
    step: Mapping[str, np.ndarray],
    free: Mapping[str, np.ndarray],
    integers: Mapping[str, np.ndarray],
    indices: Mapping[str, np.ndarray],
    ties: Mapping[str, np.ndarray],
) -> tuple[TensorParity, ...]:
    tainted: set[str] = set()
    result = []
    for node in model.graph.node:
        is_tainted = any(name in tainted for name in node.input)
        if node.op_type in QUANTIZERS and node.input[0] in integers:
            name, expected = node.input[0], integers[node.input[0]]
            at_tie = ties.get(name, np.zeros((), bool))
            both = (run[node.output[0] + COMPUTED] for run in (step, free))
            step_shares, free_shares = (shares(found, expected, at_tie) for found in both)
            result.append(TensorParity(name, expected.size, step_shares, free_shares, not is_tainted))
            is_tainted = is_tainted or free_shares.off > 0
        selected = indices.get(indices_of(node))
        if selected is not None and not np.array_equal(free[indices_of(node) + COMPUTED], selected):
            is_tainted = True
        if is_tainted:
            tainted.update(node.output)
    return tuple(result)


def ties_of(
    model: onnx.ModelProto, quantizers: Sequence[onnx.NodeProto], reals: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Which values of each tensor lie on a rounding boundary, by the name of the tensor."""
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    result = {}
    for node in quantizers:
        steps = reals[node.input[0]].astype(np.float64)  # then in place: attention over windows is large
        scale = values_of(constants[node.input[1]]).astype(np.float64)
        if scale.ndim:
            axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 1)
            scale = scale.reshape([-1 if dim == axis % steps.ndim else 1 for dim in range(steps.ndim)])
        steps = np.divide(steps, scale, out=steps)
        steps -= np.floor(steps)
        levels = LEVELS.get(constants[node.input[2]].data_type, 2**8)
        result[node.input[0]] = np.abs(steps - 0.5) <= TIE * levels / 2**8
    return result


def shares(found: np.ndarray, expected: np.ndarray, at_tie: np.ndarray | bool = False) -> Shares:
    """The shares of the values that are off, ``at_tie`` says which of them lie on a rounding boundary."""
    difference = np.abs(found.astype(np.int32, copy=False) - expected)  # integers of at most 16 bits
    size, off_by_1 = max(1, difference.size), difference == 1
    counts = (off_by_1.sum(), (difference >= 2).sum(), (off_by_1 & at_tie).sum())
    return Shares(*(int(count) / size for count in counts))

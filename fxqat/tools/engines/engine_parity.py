"""Does an engine compute what the file says, and which operators does it run on integers?

The integers of ONNX Runtime without optimizations, which the parity certificate has proven to be those of the
fake-quant model, are compared with the engine's, tensor by tensor:

* *alone*: the engine computes each tensor from the right integers of the tensors before it;
* *together*: the same, with the operators that compute these tensors inside (:mod:`fxqat.tools.engines.cut_file`). It
  shows what the engine fuses. It must compute what the file says; values that are off *alone* are off here, too;
* *end to end*: the engine runs the whole file; its outputs are compared. Differences of one step grow in deep networks.

Rule: alone and together no value is off by 2 steps or more, and at most ``MAX_OFF_BY_ONE`` of a tensor's values, or a
single one, is off by 1; outputs follow rule 3 of :mod:`fxqat.onnx.verify`.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from prettytable import PrettyTable

from fxqat.errors import ExportError
from fxqat.onnx.ort_runs import COMPUTED, run, sums_saturate, with_integers_out, with_reals_out
from fxqat.onnx.output_parity import MAX_ERROR, Difference, compare
from fxqat.onnx.verify import Shares, shares, ties_of
from fxqat.tools.engines.base import Engine, Operator, node_name
from fxqat.tools.engines.cut_file import (
    NO_OPERATORS,
    QuantizedFile,
    computed_name,
    cut,
    given_values,
    read_units,
    runs_together,
)
from fxqat.tools.engines.load import load_engine
from fxqat.utils.files import atomic_path

MAX_OFF_BY_ONE = 0.0005
PLAIN = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
NOTHING = Shares(0.0, 0.0)
WITHOUT_SATURATION = {
    "onnxruntime": 'export it with runtime="onnxruntime_avx2": the same integers, with weights in uint8',
    "openvino": "prepare it for OpenVINO_AVX2, whose weights have 7 bits",
}
"""The remedy for an engine on a processor on which its sums saturate."""


@dataclass(frozen=True)
class TensorOnEngine:
    """One quantized tensor.

    Args:
        name: its name in the file.
        operators: kinds and names of the nodes that compute it from the quantized tensors before it.
        size: number of values compared.
        alone: computed from the right integers of the tensors before it.
        together: the same with the operators that compute these inside; the worst, if there are several runs.
    """

    name: str
    operators: tuple[str, ...]
    size: int
    alone: Shares
    together: Shares

    @property
    def passed(self) -> bool:
        """Whether both comparisons are within the limit."""
        limit = max(1.0, MAX_OFF_BY_ONE * self.size)
        found = (self.alone, self.together)
        return all(s.off_by_2_plus == 0 and round(s.off_by_1 * self.size) <= limit for s in found)


@dataclass(frozen=True)
class OutputOnEngine:
    """One output of the file.

    Args:
        name: its name.
        operators: kinds and names of the nodes that compute it from the quantized tensors before it.
        alone: the difference, computed from the right integers of the tensors before it.
        together: the same with the operators that compute these inside; the worst, if there are several runs.
        end_to_end: the difference if the engine runs the whole file, for information.
    """

    name: str
    operators: tuple[str, ...]
    alone: Difference
    together: Difference
    end_to_end: Difference

    @property
    def passed(self) -> bool:
        """Rule 3 of :mod:`fxqat.onnx.verify`, alone and together."""
        return all(d.mismatches == 0 and d.error <= MAX_ERROR for d in (self.alone, self.together))


@dataclass(frozen=True)
class EngineReport:
    """What an engine makes of a file; prints as a table.

    Args:
        engine: name of the engine.
        version: its version.
        settings: the settings that it was asked for.
        tensors: every quantized tensor, in the order of the file.
        outputs: every output.
        operators: what the engine runs.
        in_integers: nodes of the file that read quantized values only, and that the engine runs on integers.
        in_float: those that it runs in float although the file lets it run them on integers.
    """

    engine: str
    version: str
    settings: dict[str, Any]
    tensors: tuple[TensorOnEngine, ...]
    outputs: tuple[OutputOnEngine, ...]
    operators: tuple[Operator, ...]
    in_integers: tuple[str, ...]
    in_float: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether every tensor and every output is within the limits."""
        return self.first_diverging is None

    @property
    def first_diverging(self) -> str | None:
        """The first tensor or output beyond the limits, with the operators that compute it; None if there is none."""
        entries: tuple[TensorOnEngine | OutputOnEngine, ...] = (*self.tensors, *self.outputs)
        return next((f"{t.name} ({', '.join(t.operators) or 'an input'})" for t in entries if not t.passed), None)

    def as_json(self) -> dict[str, Any]:
        """The report as a dict for JSON."""
        head = {"format": "fxqat.engine", "version": 1, "passed": self.passed, "first_diverging": self.first_diverging}
        return head | {"report": asdict(self)}

    def __str__(self) -> str:
        header = ["tensor", "computed by", "alone: off by 1", "of these ties", "2+"]
        table = PrettyTable([*header, "together: off by 1", "of these ties ", "2+ ", "verdict"], align="l")
        off = [t for t in self.tensors if t.alone.off or t.together.off]
        for t in off:
            both = [share for s in (t.alone, t.together) for share in (s.off_by_1, s.ties, s.off_by_2_plus)]
            texts = [f"{share:.4%}" for share in both]
            table.add_row([t.name, ", ".join(t.operators), *texts, "" if t.passed else "FAILED"])
        verdict = "passed" if self.passed else f"FAILED, first: {self.first_diverging}"
        lines = [
            f"{self.engine} {self.version}: {verdict}",
            f"{len(self.tensors) - len(off)} of {len(self.tensors)} quantized tensors are equal",
        ]
        lines += [str(table)] if off else []
        lines += [
            f"output {o.name}: error {o.alone.error:.3g} alone, {o.together.error:.3g} together, cosine "
            f"{o.end_to_end.cosine:.6f} end to end{'' if o.passed else '  FAILED'}"
            for o in self.outputs
        ]
        lines.append(f"on integers: {_kinds(self.in_integers)}; in float: {', '.join(self.in_float) or 'none'}")
        if not self.passed and self.engine in WITHOUT_SATURATION and sums_saturate():
            lines.append(
                "On this processor, x86 without VNNI, sums of products of uint8 and int8 saturate. To run the file "
                f"here, {WITHOUT_SATURATION[self.engine]}."
            )
        return "\n".join(lines)


def verify(
    file: str | os.PathLike[str],
    inputs: Mapping[str, np.ndarray] | Sequence[np.ndarray] | np.ndarray,
    engine: str | Engine = "openvino",
    **settings: Any,
) -> EngineReport:
    """Run an exported file on an engine, and compare it step by step with what the file says.

    Args:
        file: the ONNX file of ``convert_export``.
        inputs: its inputs: a dict by name, a sequence in the order of the file, or the only one. Use real data.
        engine: ``"onnxruntime"`` (with its optimizations), ``"openvino"``, ``"qnn"``, or an engine.
        settings: what :func:`load_engine` takes, as ``threads``.

    Returns:
        The comparison, and which operators ran on integers.

    Raises:
        ExportError: the file cannot be read or has no quantized tensors, the inputs do not fit, the engine's package is
            not installed, or the engine cannot run the file.
    """
    if engine == "litert":
        raise ExportError(
            "LiteRT reads .tflite files: export one with export_tflite, whose certificate compares it step by step"
        )
    made = engine if isinstance(engine, Engine) else load_engine(engine, **settings)
    content, model = _read(file)
    feeds = _by_name(model, inputs)
    cut_file = read_units(model)
    if not cut_file.quantizers:
        raise ExportError(f"{file} has no QuantizeLinear nodes of activations: there is nothing to compare")
    free = run(with_integers_out(model, list(cut_file.quantizers.values()), cut_file.indices), feeds, PLAIN)
    runs = _Runs(cut_file, made, feeds, free)
    alone = runs.alone()
    together = runs.together(alone)
    off = runs.shares(runs.truth, alone, runs.truth, *runs.cut(runs.truth))
    whole = made.compile(content)
    end_to_end = whole.run(feeds)
    names = {name: _texts(nodes) for name, nodes in cut_file.operators.items()}
    operators = whole.operators()
    on_integers, in_float = _ran(model, operators)
    return EngineReport(
        engine=made.name,
        version=made.version,
        settings=settings,
        tensors=tuple(
            TensorOnEngine(
                name=node.input[0],
                operators=names[name],
                size=runs.truth[name].size,
                alone=off[name],
                together=together.get(name, NOTHING),
            )
            for name, node in cut_file.quantizers.items()
        ),
        outputs=tuple(
            OutputOnEngine(
                name=value.name,
                operators=names[value.name],
                alone=compare(alone[value.name], free[value.name]),
                together=runs.outputs.get(value.name, compare(alone[value.name], free[value.name])),
                end_to_end=compare(end_to_end[value.name], free[value.name]),
            )
            for value in model.graph.output
        ),
        operators=operators,
        in_integers=on_integers,
        in_float=in_float,
    )


def add_to_certificate(report: EngineReport, certificate: str | os.PathLike[str]) -> None:
    """Write a report into the document of a parity certificate, under ``"engines"`` and the engine's name.

    Args:
        report: the report of the certificate's file.
        certificate: the ``<stem>.parity.json`` that ``convert_export`` wrote.

    Raises:
        ExportError: the certificate cannot be read or written, or is none.
    """
    try:
        document = json.loads(Path(certificate).read_text(encoding="utf-8"))
    except (OSError, ValueError) as cause:
        raise ExportError(f"cannot read the certificate {certificate}: {cause}") from cause
    if not isinstance(document, dict) or document.get("format") != "fxqat.parity":
        raise ExportError(f"{certificate} is no parity certificate: its format is not fxqat.parity")
    document["engines"] = document.get("engines", {}) | {report.engine: report.as_json()}
    with atomic_path(certificate, ExportError) as path:
        path.write_text(json.dumps(document, indent=1), encoding="utf-8")


class _Runs:
    """The runs of a cut file on the engine and in ONNX Runtime."""

    def __init__(
        self, file: QuantizedFile, engine: Engine, feeds: dict[str, np.ndarray], free: Mapping[str, np.ndarray]
    ) -> None:
        self.file, self.engine, self.feeds = file, engine, feeds
        self.truth = {name: free[name + COMPUTED] for name in file.quantizers}
        self.selections = {name: free[name + COMPUTED] for name in file.indices}
        self.outputs: dict[str, Difference] = {}

    def cut(self, integers: Mapping[str, np.ndarray]) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
        model, given = cut(self.file, given_values(self.file, integers), self.selections)
        return model, self.feeds | given

    def on_engine(self, integers: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        model, feeds = self.cut(integers)
        return self.engine.compile(model.SerializeToString()).run(feeds)

    def alone(self) -> dict[str, np.ndarray]:
        """What the engine computes with the right integers of every tensor."""
        return self.on_engine(self.truth)

    def shares(
        self,
        names: Iterable[str],
        found: Mapping[str, np.ndarray],
        expected: Mapping[str, np.ndarray],
        model: onnx.ModelProto,
        feeds: Mapping[str, np.ndarray],
    ) -> dict[str, Shares]:
        """What is off in each tensor; with its ties, from a run of the cut model, if it is off at all."""
        nodes = {name: self.file.quantizers[name] for name in names}
        pairs_of = {name: (found[computed_name(name)], expected[name]) for name in nodes}
        off = [nodes[name] for name, pair in pairs_of.items() if shares(*pair).off_by_1]
        reals = dict(feeds)
        computed = [node.input[0] for node in off if node.input[0] not in reals]
        if computed:
            reals |= run(with_reals_out(model, computed), feeds, PLAIN)
        ties = ties_of(self.file.model, off, reals)
        return {name: shares(*pairs_of[name], ties.get(nodes[name].input[0], False)) for name in nodes}

    def expected(
        self, given: Mapping[str, np.ndarray], inside: Iterable[str], alone: Mapping[str, np.ndarray]
    ) -> tuple[onnx.ModelProto, dict[str, np.ndarray], dict[str, np.ndarray]]:
        """A cut model, its inputs, and what the engine should compute with some tensors inside.

        What the engine computes alone may be off. Inside, the same values of each tensor are off by the same steps, and
        what is computed from them changes as the file says.
        """
        off = {name: alone[computed_name(name)].astype(np.int64) - self.truth[name] for name in inside}
        values = {name: self.truth[name] + change for name, change in off.items()}
        while True:
            model, feeds = self.cut({**given, **values})
            result = run(model, feeds, PLAIN)
            changed = {name: _shifted(result[computed_name(name)], change) for name, change in off.items()}
            if all(np.array_equal(changed[name], values[name]) for name in off):
                return model, feeds, result
            values = changed

    def together(self, alone: Mapping[str, np.ndarray]) -> dict[str, Shares]:
        """The worst shares of each tensor with the operators before it inside; fills ``outputs``."""
        worst: dict[str, Shares] = {}
        for inside, readers in runs_together(self.file):
            rest = {name: array for name, array in self.truth.items() if name not in inside}
            found = self.on_engine(rest)
            model, feeds, expected = self.expected(rest, inside, alone)
            integers = {name: expected[computed_name(name)] for name in readers if name in self.file.quantizers}
            for name, off in self.shares(integers, found, integers, model, feeds).items():
                worst[name] = max(worst.get(name, NOTHING), off, key=lambda s: (s.off_by_2_plus, s.off_by_1))
            for name in readers - integers.keys():
                difference = compare(found[name], expected[name])
                old = self.outputs.get(name, difference)
                self.outputs[name] = max(old, difference, key=lambda d: (d.mismatches, d.error))
        return worst


def _shifted(integers: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Integers moved by some steps within the range of their type."""
    limits = np.iinfo(integers.dtype)
    moved: np.ndarray = np.clip(integers.astype(np.int64) + steps, limits.min, limits.max)
    return moved


def _read(file: str | os.PathLike[str]) -> tuple[bytes, onnx.ModelProto]:
    """The content of an ONNX file, with the tensors of its second file if there is one, and the model."""
    try:
        content = Path(file).read_bytes()
    except OSError as cause:
        raise ExportError(f"cannot read {file}: {cause.strerror}") from cause
    try:
        model = onnx.load_model_from_string(content)
        if any(tensor.external_data for tensor in model.graph.initializer):
            onnx.load_external_data_for_model(model, str(Path(file).parent))
            content = model.SerializeToString()
        return content, model
    except Exception as cause:  # protobuf's own error
        raise ExportError(f"{file} is no ONNX file: {cause}") from cause


def _by_name(
    model: onnx.ModelProto, inputs: Mapping[str, np.ndarray] | Sequence[np.ndarray] | np.ndarray
) -> dict[str, np.ndarray]:
    """The inputs by their names in the file."""
    names = [value.name for value in model.graph.input]
    if isinstance(inputs, Mapping):
        found = dict(inputs)
    else:
        given = [inputs] if isinstance(inputs, np.ndarray) else list(inputs)
        found = dict(zip(names, given, strict=False)) if len(given) == len(names) else {}
    if set(found) != set(names):
        raise ExportError(f"the file has the inputs {', '.join(names)}: give an array for each, by name or in order")
    return found


def _texts(nodes: Sequence[onnx.NodeProto]) -> tuple[str, ...]:
    return tuple(f"{node.op_type} {node_name(node)}" for node in nodes)


def _ran(model: onnx.ModelProto, operators: Sequence[Operator]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Nodes that read quantized values only, and that the engine lists: those on integers, and those in float."""
    real = {o for node in model.graph.node if node.op_type == "DequantizeLinear" for o in node.output}
    exact = {tensor.name for tensor in model.graph.initializer}
    exact |= {o for node in model.graph.node if node.op_type == "Constant" for o in node.output}
    listed: dict[str, bool] = {}
    for operator in operators:
        for name in operator.nodes:
            listed[name] = listed.get(name, False) or operator.integers
    found: dict[bool, list[str]] = {True: [], False: []}
    for node in model.graph.node:
        read = {name for name in node.input if name} - exact
        if node.op_type not in NO_OPERATORS and read and read <= real and node_name(node) in listed:
            found[listed[node_name(node)]].append(f"{node.op_type} {node_name(node)}")
    return tuple(found[True]), tuple(found[False])


def _kinds(nodes: Sequence[str]) -> str:
    counts = Counter(text.partition(" ")[0] for text in nodes)
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) or "none"

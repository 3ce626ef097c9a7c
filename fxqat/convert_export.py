"""The way out: a trained model in, a QDQ ONNX file, its parameters and its certificate out."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from torch import Tensor, nn

from fxqat.config.export_arguments import (
    check_names,
    check_paths,
    check_scales,
    check_weights,
    example_tuple,
    interface_names,
)
from fxqat.custom_symbolic_opset import exporter_warnings, run_exporter, user_translations
from fxqat.errors import ExportError, ParityError, tells_of_the_bundle
from fxqat.fake_quantize.state import require_calibrated
from fxqat.onnx.clamps import WriteClamps
from fxqat.onnx.convert_opset import ConvertOpset
from fxqat.onnx.dynamic_lstm import DynamicLSTM
from fxqat.onnx.external_data import in_temporary_files
from fxqat.onnx.gather_integers import GatherIntegers
from fxqat.onnx.half_scales import HalfScales
from fxqat.onnx.integer_products import IntegerProducts
from fxqat.onnx.name_interface import NameInterface, UniqueNames
from fxqat.onnx.name_tensors import NameTensors, empty_tensors, tensors_of
from fxqat.onnx.narrow_types import StoreNarrow
from fxqat.onnx.opset import DEFAULT, check_opset, opset_for, opset_of, opset_with_operators
from fxqat.onnx.quant_params import check_params, params_document
from fxqat.onnx.run_passes import run_passes
from fxqat.onnx.runtimes import RUNTIMES, check_runtime, rewriting_for
from fxqat.onnx.simplify import Simplify
from fxqat.onnx.verify import ParityCertificate, check_model, require_parity
from fxqat.quantization.capture import Captured, capture, has_effect
from fxqat.quantization.deployed_copy import deployed_inputs
from fxqat.quantization.dynamic_sizes import OpenSizes, check_sizes, open_sizes
from fxqat.quantization.end_to_end import end_to_end
from fxqat.quantization.graph_module import QuantGraphModule, finished_model
from fxqat.quantization.lower import lower
from fxqat.quantization.raw_inputs import InputStats, Normalizers, parse_input_stats, raw_inputs, stats_by_name
from fxqat.quantization.report import ANY_BATCH
from fxqat.scheme import QuantizedTensor
from fxqat.utils.batches import described
from fxqat.utils.contexts import without_autocast
from fxqat.utils.files import write_all
from fxqat.utils.flags import check_flags
from fxqat.utils.tensors import flatten_tensors

DRAWS = "the model draws random numbers in eval mode, and the file draws others"


@dataclass(frozen=True)
class ExportReport:
    """What an export wrote.

    Args:
        onnx_path: the QDQ ONNX file.
        json_path: the parameter file, None if none was asked for.
        certificate_path: the parity certificate, None without verification.
        opset_version: opset of the file.
        certificate: the comparison of file and model, None without verification.
        tensors: every quantized tensor of the file.
        warnings: what a user of the file must know: warnings of torch's exporter, hooks and buffers that are not in the
            file, outputs that do not follow the batch size, raw inputs that are normalized in float, an optimizer of
            ONNX Runtime that fails. All are logged.
        buffers_not_updated: names of the buffers that the model updates, as a recurrent state or a counter, and of
            parameters that a module overwrites which was not traced. The file has no state: each run starts from the
            values that they had at the export.
        runtime: the runtime that the file is written for, None if it is for the chips of its backend.
        written_for: what runs the file, in words.
    """

    onnx_path: Path
    json_path: Path | None
    certificate_path: Path | None
    opset_version: int
    certificate: ParityCertificate | None
    tensors: tuple[QuantizedTensor, ...]
    warnings: tuple[str, ...] = ()
    buffers_not_updated: tuple[str, ...] = ()
    runtime: str | None = None
    written_for: str = ""

    def __str__(self) -> str:
        size = self.onnx_path.stat().st_size / 2**20 if self.onnx_path.exists() else 0.0
        head = f"{self.onnx_path} ({size:.2f} MiB, opset {self.opset_version}, {len(self.tensors)} quantized tensors)"
        lines = [head, *([f"written for {self.written_for}"] if self.written_for else [])]
        lines += [*(f"warning: {text}" for text in self.warnings)]
        if self.buffers_not_updated:
            lines.append(f"not updated by the file: {', '.join(self.buffers_not_updated)}")
        return "\n".join(lines if self.certificate is None else [*lines, str(self.certificate)])


@tells_of_the_bundle()
@without_autocast()
def convert_export(
    model: nn.Module,
    example_inputs: tuple[Any, ...] | Mapping[str, Any] | Tensor | None = None,
    file_path: str | os.PathLike[str] | None = None,
    file_path_json: str | os.PathLike[str] | None = None,
    *,
    opset_version: int | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    dynamic_batch: bool = False,
    dynamic_shapes: Mapping[str, Any] | Sequence[Any] | None = None,
    verify: bool = True,
    weights: str = "integer",
    scales: str = "float32",
    input_stats: InputStats | None = None,
    runtime: str | None = None,
    custom_translation_table: Mapping[Any, Callable[..., Any]] | None = None,
) -> ExportReport:
    """Export a prepared model as QDQ ONNX with integer weights, and prove that the file computes what the model does.

    The model is not changed: its mode, device, switches and weights stay as they are. It is exported as it is deployed:
    in eval mode and with every fake-quant on, even if some are switched off. A model in float16 or bfloat16 is exported
    and compared as a float32 model with its weights: fake-quant and the file compute in float32.

    Args:
        model: a calibrated model of ``prepare_by_platform``, on any device, also wrapped by DDP or ``torch.compile``.
        example_inputs: a tuple of inputs, a dict of them by name, or a single tensor. They give the shapes, and the
            file is compared with the model on them. None: those that the model was prepared with.
        file_path: the ONNX file to write.
        file_path_json: the JSON file of scales and zero points to write.
        opset_version: 18 to the newest that onnx knows; 13 to 17 if onnx's version converter can convert the model.
            None is 18, 21 if a tensor has less than 5 or more than 8 bits, or that of a newer operator that the model
            becomes (DeformConv: 19).
        input_names: names of the file's inputs, one for each tensor, also in nested inputs; by default the names of the
            arguments.
        output_names: names of the file's outputs, one for each tensor, also in nested outputs; by default the keys of a
            dict, ``output``, or ``output_0`` and so on, with a number if it is the name of an input.
        dynamic_batch: leave the batch size open: the first dimension of the first input, and of every input that has
            the same first dimension. The model and the file then also run on the batch twice.
        dynamic_shapes: leave any dimensions open, as in ``torch.onnx.export``: for each input, by name or in order, a
            dict by dimension, ``{"x": {0: "batch", 2: "height", 3: Dim("width", max=1024)}}``, or a sequence with an
            entry for each dimension; None fixes a dimension. The model and the file then also run at a second size:
            twice as long, or as the bounds allow.
        verify: compare the file with the model in ONNX Runtime, and write the certificate ``<stem>.parity.json``.
        weights: ``"integer"``, or ``"float"`` for float weights before Q/DQ pairs.
        scales: ``"float32"``, or ``"float16"`` to store the scales of weights in blocks so. They are the same numbers,
            so the model must have scales with at most 11 significant bits, see :mod:`fxqat.onnx.half_scales`.
        input_stats: ``(mean, std)`` of each input, or None for an input that stays as it is. The model was trained on
            ``(x - mean) / std`` of raw values x, integers from 0 to 255. The file takes x as uint8, in the layout of
            the model, and ``example_inputs`` must be raw too. Mean and std are numbers, or lists of one number per
            channel (dimension 1). The file normalizes in integers where they are exact, see
            :mod:`fxqat.quantization.raw_inputs`.
        runtime: the runtime that the file is written for, ``"onnxruntime"``, ``"onnxruntime_avx2"`` (on x86 without
            VNNI, where weights in uint8 keep its sums exact) or ``"openvino"``: the same integers, in the form that it
            runs fast and right. None is the runtime that the backend's table names; where it names none, the file is
            for the chips of the backend.
        custom_translation_table: for operators of your own (``torch.library``) a function of ONNX operators each, as in
            ``torch.onnx.export``. What ONNX Runtime cannot run cannot be verified: it is refused unless ``verify`` is
            False.

    Returns:
        Paths, opset, tensors and certificate.

    Raises:
        CalibrationError: a fake-quant has no usable range.
        ExportError: an argument is wrong, the opset does not have the type of a tensor, the parameters do not fit into
            a file, the model does not run on the inputs, a hook changes its outputs, an output is complex or does not
            follow an open size, the exporter or a pass fails, or a file cannot be written.
        ParityError: the file does not compute what the model computes; nothing is written.

    Source: ONNX QuantizeLinear, DequantizeLinear (opset 13; 21 for 4 and 16 bits and for blocks; 25 for 2 bits).
    """
    check_flags(ExportError, "convert_export", dynamic_batch=dynamic_batch, verify=verify)
    gm = finished_model(model, ExportError)
    inputs = deployed_inputs(gm, example_tuple(gm, example_inputs, gm.provenance.example_inputs))
    if file_path is None:
        raise ExportError("file_path is missing: give the path of the ONNX file to write")
    if opset_version is not None:
        check_opset(opset_version)
    check_weights(weights)
    check_scales(scales, weights)
    check_names(input_names, output_names)
    check_runtime(runtime)
    runtime = runtime or gm.provenance.runtime or None
    check_paths(file_path=file_path, file_path_json=file_path_json)
    normalizers = parse_input_stats(input_stats, inputs)
    inputs = raw_inputs(inputs, normalizers)
    user_translations(custom_translation_table)
    require_calibrated(gm)

    sizes = _open_sizes(gm, inputs, dynamic_shapes, dynamic_batch)

    asked = opset_version
    lowered = lower(gm, weights, asked or DEFAULT, normalizers, inputs if sizes is None else None)
    opset_version = opset_for(lowered.tensors.values(), asked)
    captured = capture(gm, inputs, normalizers, with_float=verify and not gm.provenance.fitted_by)
    warnings = lowered.warnings + not_in_file(captured)
    second = None
    if sizes is not None:
        second, notes = _second_size(gm, sizes, inputs, normalizers, captured)
        warnings += notes

    exported = run_exporter(lowered.module, inputs, sizes, custom_translation_table)
    opset_version = opset_with_operators(exported, opset_version, asked)
    interface = interface_names(
        [str(value.name) for value in exported.graph.inputs], list(captured.outputs), input_names, output_names
    )
    warnings += exporter_warnings(exported)

    rewriting = rewriting_for(runtime, lowered.weights_only)
    empty = empty_tensors(exported, lowered.tensors)
    passes = [
        UniqueNames(),
        Simplify(),
        NameInterface(*interface),
        NameTensors(
            lowered.tensors,
            empty,
            lambda names: has_effect(names, gm, inputs, normalizers, captured),
        ),
        ConvertOpset(opset_version),
        StoreNarrow(),
        *rewriting.types,
        GatherIntegers(),
        IntegerProducts(),
        DynamicLSTM(),
        WriteClamps(),
        *rewriting.operators,
        *([HalfScales()] if scales == "float16" else []),
    ]
    finished = run_passes(exported, passes)
    named = tensors_of(finished)
    without_effect = sorted(t.name for path, t in lowered.tensors.items() if path not in named and path not in empty)
    if without_effect:
        warnings += (f"not in the file, since nothing else depends on it: {', '.join(without_effect)}",)
    constant = [tensor for tensor in named.values() if tensor.kind != "dynamic"]
    activations = {path: t for path, t in lowered.tensors.items() if t.kind in ("activation", "dynamic")}
    del lowered, exported  # the weights are in files from now on

    with in_temporary_files(finished, Path(file_path)) as made:
        check_model(made.proto, opset_version, made.path)
        if weights == "integer":
            check_params(made.proto, constant)
        certificate = None
        if verify:
            certificate = _certify(made.proto, activations, named, inputs, captured)
            if sizes is not None and second is not None:
                at_second = _certify(made.proto, activations, named, sizes.second_inputs(inputs), second)
                certificate = replace(certificate, second_size=at_second)
            warnings += certificate.warnings(made.proto)
            if captured.in_float:
                figures = end_to_end(gm, inputs, normalizers, captured, made.proto)
                certificate = replace(certificate, end_to_end=figures)

        raw = stats_by_name([value.name for value in made.proto.graph.input], inputs, normalizers)
        document = params_document(constant, gm.provenance.backend, opset_version, raw, runtime)
        parity = None if certificate is None else certificate.as_json()
        written = write_files(made.files(Path(file_path)), file_path_json, document, parity)
    report = ExportReport(Path(file_path), *written, opset_of(made.proto), certificate, tuple(named.values()))
    for text in warnings:
        logging.getLogger("fxqat").warning("%s: %s", report.onnx_path.name, text)
    report = replace(report, runtime=runtime, written_for=_written_for(gm, runtime))
    return replace(report, warnings=warnings, buffers_not_updated=captured.updated)


def _written_for(gm: QuantGraphModule, runtime: str | None) -> str:
    if runtime is not None:
        return f"the runtime {runtime}"
    others = " or ".join(map(repr, RUNTIMES))
    return f"the chips of {gm.provenance.backend}; runtime={others} has the same integers in a form for that runtime"


def not_in_file(captured: Captured) -> tuple[str, ...]:
    """What the file does not have of the model."""
    told = []
    if captured.hooks:
        told.append(f"hooks of the prepared model are not in the file: {', '.join(captured.hooks)}")
    if captured.carried:
        told.append(
            f"the model updates {', '.join(captured.carried)}, and its next outputs depend on it. The file has no "
            "state: each run starts from the values at the export. To keep the state, make it an input and an output "
            "of forward()."
        )
    if captured.draws:
        told.append(DRAWS)
    return tuple(told)


def _open_sizes(
    gm: QuantGraphModule, inputs: tuple[Any, ...], dynamic_shapes: Any, dynamic_batch: bool
) -> OpenSizes | None:
    """The sizes to leave open, with what is known of the model's code."""
    names = [str(node.target) for node in gm.graph.nodes if node.op == "placeholder"]
    report, kept = gm.quant_report, gm.provenance.example_inputs
    sizes = open_sizes(inputs, names, dynamic_shapes, dynamic_batch, report.forced, kept)
    if sizes is not None and sizes.only_batch and ANY_BATCH in report.sameness:
        return replace(sizes, forced=())  # compared with the float model at another batch size
    return sizes


def _second_size(
    gm: QuantGraphModule, sizes: OpenSizes, inputs: tuple[Any, ...], normalizers: Normalizers, captured: Captured
) -> tuple[Captured, tuple[str, ...]]:
    """The run of the model on inputs of the second size, and what is to be told of it."""
    others = sizes.second_inputs(inputs)
    try:
        second = capture(gm, others, normalizers)
    except ExportError as cause:
        raise ExportError(
            f"open sizes were asked for, but the prepared model does not run on inputs of another size, "
            f"{described(others)}: {cause.__cause__ or cause}. {sizes.cause}"
        ) from cause
    return second, check_sizes(sizes, captured.outputs, second.outputs)


def certify_file(
    model: nn.Module, inputs: tuple[Any, ...], proto: onnx.ModelProto, input_stats: InputStats | None = None
) -> ParityCertificate:
    """The certificate of a file that was exported before, perhaps on another machine, on other inputs.

    Args:
        model: the prepared model that it was exported from, see :func:`fxqat.load_checkpoint`.
        inputs: inputs of the file.
        proto: the file.
        input_stats: as it was exported with.

    Raises:
        ExportError: the file has none of the model's quantized tensors, the model or the file does not run.
        ParityError: they do not compute the same.
    """
    gm = finished_model(model, ExportError)
    normalizers = parse_input_stats(input_stats, inputs)
    lowered = lower(gm, "float", normalizers=normalizers)
    captured = capture(gm, inputs, normalizers)
    in_graph = [node.name for node in lowered.module.graph.nodes if node.op == "placeholder"]
    pairs = [(in_graph, proto.graph.input), (captured.outputs, proto.graph.output)]
    renamed = {name: value.name for names, values in pairs for name, value in zip(names, values, strict=False)}
    constants = {tensor.name: tensor for tensor in proto.graph.initializer}
    quantizers = {node.input[0]: node for node in proto.graph.node if node.op_type == "QuantizeLinear"}
    named = {}
    for path, tensor in lowered.tensors.items():
        name = renamed.get(tensor.name, tensor.name)
        if name in quantizers and tensor.kind == "activation":
            zero_point = onnx.numpy_helper.to_array(constants[quantizers[name].input[2]]).reshape(-1)
            named[path] = replace(tensor, name=name, zero_point=tuple(map(int, zero_point)))
    if not named:
        raise ExportError("the file has no quantized tensor of the model; it was exported from another one")
    return _certify(proto, {path: lowered.tensors[path] for path in named}, named, inputs, captured)


def _certify(
    proto: onnx.ModelProto,
    activations: Mapping[str, QuantizedTensor],
    named: Mapping[str, QuantizedTensor],
    inputs: tuple[Any, ...],
    captured: Captured,
) -> ParityCertificate:
    """The certificate of the file on inputs on which the model computed what was captured."""
    in_file = {
        named[path].name: np.asarray(captured.integers[t.name] + sum(named[path].zero_point) - sum(t.zero_point))
        for path, t in activations.items()
        if path in named
    }
    arrays = [t.numpy() for t in flatten_tensors(inputs)]
    try:
        return require_parity(proto, arrays, in_file, list(captured.outputs.values()), captured.selections)
    except ParityError as error:
        if not captured.draws:
            raise
        remedy = "Make them an input of forward(), or export with verify=False."
        raise ParityError(f"the file cannot be compared with the model: {DRAWS}. {remedy}\n{error}") from error


def write_files(
    contents: Mapping[Path, bytes | Path],
    json_path: str | os.PathLike[str] | None,
    document: dict[str, Any],
    parity: dict[str, Any] | None,
    ending: str = ".parity.json",
) -> tuple[Path | None, Path | None]:
    """Write a model, its parameters and its certificate: all files or none.

    Args:
        contents: the content of each file of the model by its path, that of the model itself first.
        json_path: the parameter file, None for none.
        document: its content.
        parity: the certificate, None for none.
        ending: ending of the certificate's file name.

    Returns:
        The paths of the parameter file and of the certificate, None for a file that is not written.
    """
    json_path = None if json_path is None else Path(json_path)
    certificate_path = None if parity is None else (json_path or next(iter(contents))).with_suffix(ending)
    documents = {json_path: document, certificate_path: parity}
    texts = {target: json.dumps(entries, indent=1) for target, entries in documents.items() if target is not None}
    write_all({**contents, **texts}, ExportError)
    return json_path, certificate_path

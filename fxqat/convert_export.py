"""The way out: a trained model in, a proven QDQ ONNX file and its parameters out."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import torch
from torch import Tensor, nn

from fxqat.custom_symbolic_opset import NATIVE_OPSET, translation_table
from fxqat.errors import ExportError, ParityError
from fxqat.fake_quantize.state import require_calibrated
from fxqat.onnx import verify as parity
from fxqat.onnx.clamps import write_clamps
from fxqat.onnx.names import name_outputs, name_tensors
from fxqat.onnx.narrow_types import store_narrow
from fxqat.onnx.opset import DEFAULT, check_opset, convert, opset_for, opset_of
from fxqat.onnx.quant_params import check_params, params_document
from fxqat.onnx.simplify import simplify
from fxqat.onnx.verify import ParityCertificate
from fxqat.quantization.capture import capture
from fxqat.quantization.graph_module import QuantGraphModule
from fxqat.quantization.lower import Lowered, default_output_names, lower, normalize_inputs
from fxqat.quantization.raw_inputs import InputStats, Normalizers, normalized_inputs, parse_input_stats, raw_inputs
from fxqat.scheme import QuantizedTensor
from fxqat.utils.files import atomic_path, check_writable
from fxqat.utils.tensors import flatten_tensors, map_tensors
from fxqat.utils.torch_compat import unwrap


@dataclass(frozen=True)
class ExportReport:
    """What an export wrote.

    Args:
        onnx_path: the QDQ ONNX file.
        json_path: the parameter file, None if none was asked for.
        certificate_path: the parity certificate, None without verification.
        opset_version: opset of the file.
        certificate: the comparison with ONNX Runtime, None without verification.
        tensors: every quantized tensor of the file.
    """

    onnx_path: Path
    json_path: Path | None
    certificate_path: Path | None
    opset_version: int
    certificate: ParityCertificate | None
    tensors: tuple[QuantizedTensor, ...]

    def __str__(self) -> str:
        size = self.onnx_path.stat().st_size / 2**20 if self.onnx_path.exists() else 0.0
        head = f"{self.onnx_path} ({size:.2f} MiB, opset {self.opset_version}, {len(self.tensors)} quantized tensors)"
        return head if self.certificate is None else f"{head}\n{self.certificate}"


def convert_export(
    model: nn.Module,
    example_inputs: tuple[Any, ...] | Tensor,
    file_path: str | os.PathLike[str],
    file_path_json: str | os.PathLike[str] | None = None,
    *,
    opset_version: int | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    dynamic_batch: bool = False,
    verify: bool = True,
    weights: str = "integer",
    input_stats: InputStats | None = None,
) -> ExportReport:
    """Export a prepared model as QDQ ONNX with integer weights, and prove that the file computes what the model does.

    The model is not changed: mode, device, switches and weights stay. It is exported as deployed, every fake-quant on,
    whatever the switches say.

    Args:
        model: a calibrated model of ``prepare_by_platform``, also wrapped by DDP or ``torch.compile``, on any device.
        example_inputs: a tuple of inputs (a single tensor is taken as one); they give the shapes, and the values that
            the proof runs on.
        file_path: the ONNX file to write.
        file_path_json: the JSON of scales and zero points to write.
        opset_version: 18 to the newest that onnx knows; 13 to 17 where onnx's version converter manages it. None is 18,
            or 21 where a tensor has less than 5 or more than 8 bits.
        input_names: names of the file's inputs.
        output_names: names of the file's outputs; by default the keys of a dict, ``output``, or ``output_0`` and so on.
        dynamic_batch: leave the first dimension of every input open.
        verify: run the file in ONNX Runtime and compare; writes the certificate ``<stem>.parity.json``.
        weights: ``"integer"``, or ``"float"`` to keep float weights behind Q/DQ pairs.
        input_stats: ``(mean, std)`` of each input, or None for one that is left as it is. The model was trained on
            ``(x - mean) / std`` of raw values x, integers from 0 to 255. The file takes these as uint8, in the layout
            of the model, and so does ``example_inputs``. A number each, or a list of one per channel (dimension 1).

    Returns:
        Paths, opset, tensors and certificate.

    Raises:
        CalibrationError: a quantizer has no usable range.
        ExportError: an argument is wrong, the opset does not have the type of a tensor, the exporter fails, or a path
            cannot be written.
        ParityError: the file does not compute what the model computes. Nothing is written then.

    Source: ONNX QuantizeLinear, DequantizeLinear (opset 13; 21 for 4 and 16 bits; 25 for 2 bits).
    """
    gm = _prepared(model)
    inputs = _inputs(example_inputs)
    if opset_version is not None:
        check_opset(opset_version)
    if weights not in ("integer", "float"):
        raise ExportError(f"weights must be 'integer' or 'float', got {weights!r}")
    _check_names("input_names", input_names)
    _check_names("output_names", output_names)
    if input_names and output_names and set(input_names) & set(output_names):
        raise ExportError(f"input_names and output_names have {set(input_names) & set(output_names)} in common")
    _check_paths(file_path, file_path_json)
    normalizers = parse_input_stats(input_stats, inputs)
    inputs = raw_inputs(inputs, normalizers)
    require_calibrated(gm)
    lowered = lower(gm, weights, opset_version or DEFAULT)
    opset_version = opset_for(lowered.tensors.values(), opset_version)
    deployed = normalize_inputs(lowered, normalizers)
    program = _run_exporter(deployed, inputs, input_names, output_names, dynamic_batch)
    _check_count("input_names", input_names, len(program.graph.inputs))
    _check_count("output_names", output_names, len(program.graph.outputs))
    if output_names is None:
        name_outputs(program, default_output_names(gm))
    names = name_tensors(program, deployed.tensors)
    lost = sorted(deployed.tensors[path].name for path in set(deployed.tensors) - set(names))
    if lost:
        raise ParityError(f"{', '.join(lost)}: quantized in the model, but not in the exported file")
    proto = ir.to_proto(program)
    if opset_version != NATIVE_OPSET:
        proto = convert(proto, opset_version)
    proto = write_clamps(store_narrow(proto, names.values()))
    _check_model(proto, opset_version)
    if weights == "integer":
        check_params(proto, names.values())
    in_file = {lowered.tensors[path].name: tensor.name for path, tensor in names.items()}
    certificate = _certify(gm, proto, inputs, normalizers, in_file) if verify else None
    raw = _raw_by_name(proto, inputs, normalizers)
    document = params_document(names.values(), gm.provenance.backend, opset_version, raw)
    return _write(proto, document, certificate, Path(file_path), file_path_json, tuple(names.values()))


def _prepared(model: nn.Module) -> QuantGraphModule:
    gm = unwrap(model)
    if not isinstance(gm, QuantGraphModule):
        raise ExportError(
            f"expected a model that prepare_by_platform returned (or a DDP / torch.compile wrapper of one), "
            f"got {type(model).__name__}"
        )
    return gm


def _inputs(example_inputs: tuple[Any, ...] | Tensor) -> tuple[Any, ...]:
    if not isinstance(example_inputs, (Tensor, tuple, list)):
        raise ExportError(f"example_inputs must be a tensor or a tuple of inputs, got {type(example_inputs).__name__}")
    inputs = (example_inputs,) if isinstance(example_inputs, Tensor) else tuple(example_inputs)
    tensors = flatten_tensors(inputs)
    if not tensors or any(tensor.numel() == 0 for tensor in tensors):
        raise ExportError("example_inputs must hold at least one tensor, and none of them may be empty")
    return map_tensors(inputs, lambda tensor: tensor.detach().cpu())  # type: ignore[no-any-return]


def _check_paths(*paths: str | os.PathLike[str] | None) -> None:
    """Fail before the work, not after it."""
    given = [Path(path).resolve() for path in paths if path is not None]
    if len(set(given)) != len(given):
        raise ExportError(f"the ONNX file and the parameter file have the same path {given[0]}")
    for path in paths:
        if path is not None:
            check_writable(path, ExportError)


def _check_names(what: str, names: Sequence[str] | None) -> None:
    if names is None:
        return
    if isinstance(names, str) or not all(isinstance(name, str) and name for name in names):
        raise ExportError(f"{what} must be a sequence of non-empty strings, got {names!r}")
    if len(set(names)) != len(names):
        raise ExportError(f"{what} must be different from each other, got {list(names)}")


def _check_count(what: str, names: Sequence[str] | None, count: int) -> None:
    if names is not None and len(names) != count:
        raise ExportError(f"{what}: the model has {count}, got {len(names)} names {list(names)}")


def _run_exporter(
    lowered: Lowered,
    inputs: tuple[Any, ...],
    input_names: Sequence[str] | None,
    output_names: Sequence[str] | None,
    dynamic_batch: bool,
) -> ir.Model:
    if dynamic_batch:  # a batch of 1 would be taken for a constant
        inputs = map_tensors(inputs, lambda t: torch.cat([t, t]) if t.shape[0] == 1 else t)
    batch = torch.export.Dim("batch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            program = torch.onnx.export(
                lowered.module,
                (*inputs, {}) if isinstance(inputs[-1], Mapping) else inputs,  # a last dict is taken for keywords
                dynamo=True,
                optimize=False,
                verbose=False,
                opset_version=NATIVE_OPSET,
                input_names=input_names,
                output_names=output_names,
                dynamic_shapes=map_tensors(inputs, lambda _: {0: batch}) if dynamic_batch else None,
                custom_translation_table=translation_table(),
            )
        except Exception as cause:  # the exporter wraps every kind of failure
            raise ExportError(f"torch.onnx.export failed: {cause}") from cause
    if program is None:
        raise ExportError("torch.onnx.export returned no program")
    _check_batch(program.model, dynamic_batch)
    return simplify(program.model)


def _check_batch(model: ir.Model, dynamic_batch: bool) -> None:
    fixed = [value.name for value in model.graph.inputs if value.shape is not None and isinstance(value.shape[0], int)]
    if dynamic_batch and fixed:
        raise ExportError(
            f"dynamic_batch was asked for, but the model fixes the batch of {', '.join(map(str, fixed))}: its code "
            "needs the number in Python. gm.quant_report.forced names the lines; or export with dynamic_batch=False."
        )


def _check_model(proto: onnx.ModelProto, opset_version: int) -> None:
    if opset_of(proto) != opset_version:
        raise ExportError(f"asked for opset {opset_version}, the exporter reached {opset_of(proto)}")
    try:
        onnx.checker.check_model(proto, full_check=True)
    except Exception as cause:  # checker and shape inference have separate error types
        raise ExportError(f"onnx.checker rejects the exported model: {cause}") from cause


def _certify(
    gm: QuantGraphModule,
    proto: onnx.ModelProto,
    inputs: tuple[Any, ...],
    normalizers: Normalizers,
    names: dict[str, str],
) -> ParityCertificate:
    integers, outputs = capture(gm, normalized_inputs(inputs, normalizers))
    in_file = {names[name]: values for name, values in integers.items() if name in names}
    certificate = parity.verify(proto, [t.numpy() for t in flatten_tensors(inputs)], in_file, outputs)
    if not certificate.passed:
        raise ParityError(
            f"the exported file does not compute what the model computes; nothing was written.\n{certificate}"
        )
    return certificate


def _raw_by_name(
    proto: onnx.ModelProto, inputs: tuple[Any, ...], normalizers: Normalizers
) -> dict[str, tuple[list[float], list[float]]]:
    """Mean and std of each raw input, by its name in the file, where nested inputs are several."""
    owners = [place for place, value in enumerate(inputs) for _ in flatten_tensors(value)]
    pairs = [(value.name, normalizers[place]) for value, place in zip(proto.graph.input, owners, strict=True)]
    return {name: (n.mean.reshape(-1).tolist(), n.std.reshape(-1).tolist()) for name, n in pairs if n is not None}


def _write(
    proto: onnx.ModelProto,
    document: dict[str, Any],
    certificate: ParityCertificate | None,
    onnx_path: Path,
    json_path: str | os.PathLike[str] | None,
    tensors: tuple[QuantizedTensor, ...],
) -> ExportReport:
    """Write all files or none."""
    json_path = None if json_path is None else Path(json_path)
    certificate_path = None if certificate is None else (json_path or onnx_path).with_suffix(".parity.json")
    with ExitStack() as stack:
        stack.enter_context(atomic_path(onnx_path, ExportError)).write_bytes(proto.SerializeToString())
        if json_path is not None:
            stack.enter_context(atomic_path(json_path, ExportError)).write_text(json.dumps(document, indent=1))
        if certificate is not None and certificate_path is not None:
            text = json.dumps(certificate.as_json(), indent=1)
            stack.enter_context(atomic_path(certificate_path, ExportError)).write_text(text)
    return ExportReport(onnx_path, json_path, certificate_path, opset_of(proto), certificate, tensors)

"""The way out: a trained model in, a QDQ ONNX file, its parameters and its certificate out."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
from torch import Tensor, nn

from fxqat.config.export_arguments import check_names, check_paths, check_weights, example_tuple
from fxqat.custom_symbolic_opset import run_exporter
from fxqat.errors import ExportError
from fxqat.fake_quantize.state import require_calibrated
from fxqat.onnx.clamps import WriteClamps
from fxqat.onnx.convert_opset import ConvertOpset
from fxqat.onnx.name_outputs import NameOutputs
from fxqat.onnx.name_tensors import NameTensors, tensors_of
from fxqat.onnx.narrow_types import StoreNarrow
from fxqat.onnx.opset import DEFAULT, check_opset, opset_for, opset_of
from fxqat.onnx.quant_params import check_params, params_document
from fxqat.onnx.run_passes import run_passes
from fxqat.onnx.simplify import Simplify
from fxqat.onnx.verify import ParityCertificate, check_model, require_parity
from fxqat.quantization.capture import capture
from fxqat.quantization.deployed_copy import inputs_in_float32
from fxqat.quantization.graph_module import prepared_model
from fxqat.quantization.lower import lower
from fxqat.quantization.raw_inputs import InputStats, parse_input_stats, raw_inputs, stats_by_name
from fxqat.scheme import QuantizedTensor
from fxqat.utils.files import atomic_path
from fxqat.utils.tensors import flatten_tensors


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
    example_inputs: tuple[Any, ...] | Mapping[str, Any] | Tensor,
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

    The model is not changed: its mode, device, switches and weights stay as they are. It is exported as it is deployed:
    in eval mode and with every fake-quant on, even if some are switched off. A model in float16 or bfloat16 is exported
    and compared as a float32 model with its weights: fake-quant and the file compute in float32.

    Args:
        model: a calibrated model of ``prepare_by_platform``, on any device, also wrapped by DDP or ``torch.compile``.
        example_inputs: a tuple of inputs, a dict of them by name, or a single tensor. They give the shapes, and the
            file is compared with the model on them.
        file_path: the ONNX file to write.
        file_path_json: the JSON file of scales and zero points to write.
        opset_version: 18 to the newest that onnx knows; 13 to 17 if onnx's version converter can convert the model.
            None is 18, or 21 if a tensor has less than 5 or more than 8 bits.
        input_names: names of the file's inputs.
        output_names: names of the file's outputs; by default the keys of a dict, ``output``, or ``output_0`` and so on.
        dynamic_batch: leave the batch size (the first dimension of every input) open.
        verify: compare the file with the model in ONNX Runtime, and write the certificate ``<stem>.parity.json``.
        weights: ``"integer"``, or ``"float"`` for float weights before Q/DQ pairs.
        input_stats: ``(mean, std)`` of each input, or None for an input that stays as it is. The model was trained on
            ``(x - mean) / std`` of raw values x, integers from 0 to 255. The file takes x as uint8, in the layout of
            the model, and ``example_inputs`` must be raw too. Mean and std are numbers, or lists of one number per
            channel (dimension 1).

    Returns:
        Paths, opset, tensors and certificate.

    Raises:
        CalibrationError: a fake-quant has no usable range.
        ExportError: an argument is wrong, the opset does not have the type of a tensor, the model does not run on the
            inputs, the exporter or a pass fails, or a file cannot be written.
        ParityError: the file does not compute what the model computes; nothing is written.

    Source: ONNX QuantizeLinear, DequantizeLinear (opset 13; 21 for 4 and 16 bits; 25 for 2 bits).
    """
    gm = prepared_model(model, ExportError)
    inputs = inputs_in_float32(gm, example_tuple(gm, example_inputs))
    if opset_version is not None:
        check_opset(opset_version)
    check_weights(weights)
    check_names(input_names, output_names)
    check_paths(file_path, file_path_json)
    normalizers = parse_input_stats(input_stats, inputs)
    inputs = raw_inputs(inputs, normalizers)
    require_calibrated(gm)

    lowered = lower(gm, weights, opset_version or DEFAULT, normalizers)
    opset_version = opset_for(lowered.tensors.values(), opset_version)
    expected = capture(gm, inputs, normalizers) if verify else None

    exported = run_exporter(lowered.module, inputs, input_names, output_names, dynamic_batch)

    passes = [
        Simplify(),
        NameOutputs(output_names or lowered.output_names),
        NameTensors(lowered.tensors),
        ConvertOpset(opset_version),
        StoreNarrow(),
        WriteClamps(),
    ]
    finished = run_passes(exported, passes)
    proto, named = ir.to_proto(finished), tensors_of(finished)
    tensors = tuple(named.values())

    check_model(proto, opset_version)
    if weights == "integer":
        check_params(proto, tensors)
    certificate = None
    if expected is not None:
        integers, outputs = expected
        activations = {path: tensor for path, tensor in lowered.tensors.items() if tensor.kind == "activation"}
        in_file = {named[path].name: integers[tensor.name] for path, tensor in activations.items()}
        certificate = require_parity(proto, [t.numpy() for t in flatten_tensors(inputs)], in_file, outputs)

    raw = stats_by_name([value.name for value in proto.graph.input], inputs, normalizers)
    document = params_document(tensors, gm.provenance.backend, opset_version, raw)
    return _write(proto, document, certificate, Path(file_path), file_path_json, tensors)


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

"""The way out to LiteRT: a trained model in, a .tflite file, its parameters and its certificate out."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fxqat.config.export_arguments import check_paths, example_tuple
from fxqat.convert_export import not_in_file, write_files
from fxqat.custom_quantizer.backends.litert import LITERT
from fxqat.errors import ExportError
from fxqat.fake_quantize.state import require_calibrated
from fxqat.litert_conversion import check_schemes, litert_versions, run_converter
from fxqat.onnx.quant_params import params_document
from fxqat.quantization.capture import Captured, capture
from fxqat.quantization.deployed_copy import deployed_inputs
from fxqat.quantization.graph_module import finished_model
from fxqat.quantization.lower import lower
from fxqat.scheme import QuantizedTensor
from fxqat.tflite.flatbuffer import missing, with_float_interface
from fxqat.tflite.verify_tflite import TfliteCertificate, float_operators, require_tflite_parity, verify_tflite
from fxqat.utils.flags import check_flags
from fxqat.utils.tensors import flatten_tensors, map_tensors


@dataclass(frozen=True)
class TfliteReport:
    """What an export to LiteRT wrote.

    Args:
        tflite_path: the .tflite file.
        json_path: the parameter file, None if none was asked for.
        certificate_path: the parity certificate, None without verification.
        certificate: the comparison of file and model, None without verification.
        tensors: every quantized tensor of the model.
        float_operators: the operators of the file that compute in float, with their number.
        warnings: what a user of the file must know. All are logged.
        buffers_not_updated: names of the buffers and parameters that the model updates. The file has no state.
    """

    tflite_path: Path
    json_path: Path | None
    certificate_path: Path | None
    certificate: TfliteCertificate | None
    tensors: tuple[QuantizedTensor, ...]
    float_operators: Mapping[str, int]
    warnings: tuple[str, ...] = ()
    buffers_not_updated: tuple[str, ...] = ()

    def __str__(self) -> str:
        size = self.tflite_path.stat().st_size / 2**20 if self.tflite_path.exists() else 0.0
        lines = [f"{self.tflite_path} ({size:.2f} MiB, {len(self.tensors)} quantized tensors)"]
        lines += [f"warning: {text}" for text in self.warnings]
        if self.buffers_not_updated:
            lines.append(f"not updated by the file: {', '.join(self.buffers_not_updated)}")
        return "\n".join(lines if self.certificate is None else [*lines, str(self.certificate)])


def export_tflite(
    model: nn.Module,
    example_inputs: tuple[Any, ...] | Mapping[str, Any] | Tensor | None,
    file_path: str | os.PathLike[str],
    file_path_json: str | os.PathLike[str] | None = None,
    *,
    channels_last: bool = False,
    integer_io: bool = False,
    verify: bool = True,
) -> TfliteReport:
    """Export a prepared model as a .tflite file of int8 operators, and prove that LiteRT computes what the model does.

    Needs the extra: ``pip install "fxqat[litert]"``. As in :func:`~fxqat.convert_export`, the model is
    not changed, and is exported in eval mode with every fake-quant on. The file has the shapes of the example inputs,
    batch size included.

    Args:
        model: a calibrated model of ``prepare_by_platform``, best for the backend ``LiteRT``: activations must be int8.
        example_inputs: a tuple of inputs, a dict of them by name, or a single tensor, in the layout of the model.
            None: those that the model was prepared with.
        file_path: the .tflite file to write.
        file_path_json: the JSON file of scales and zero points to write.
        channels_last: the file takes inputs of three or more dimensions in the layout ``(N, ..., C)``.
        integer_io: quantized inputs and outputs of the file are int8; by default they are float.
        verify: compare the file with the model in LiteRT, and write the certificate ``<stem>.parity.json``.

    Returns:
        Paths, tensors, operators in float, and certificate.

    Raises:
        CalibrationError: a fake-quant has no usable range.
        ExportError: a package is missing, an argument is wrong, LiteRT lacks the scheme of a tensor, the model does not
            run on the inputs, a hook changes its outputs, the converter fails, or a file cannot be written.
        ParityError: LiteRT does not compute what the model computes; nothing is written.

    Source: LiteRT documentation, "LiteRT 8-bit quantization specification".
    """
    check_flags(ExportError, "export_tflite", channels_last=channels_last, integer_io=integer_io, verify=verify)
    gm = finished_model(model, ExportError)
    inputs = deployed_inputs(gm, example_tuple(gm, example_inputs, gm.provenance.example_inputs))
    check_paths(file_path=file_path, file_path_json=file_path_json)
    versions = litert_versions()
    require_calibrated(gm)

    lowered = lower(gm, "float", inputs=inputs)
    tensors = tuple(lowered.tensors.values())
    check_schemes(tensors)
    captured = capture(gm, inputs, with_reals=verify)
    if channels_last:
        inputs = map_tensors(inputs, lambda t: t.movedim(1, -1) if t.dim() > 2 else t)
    is_last = [channels_last and t.dim() > 2 for t in inputs]
    content = run_converter(lowered, inputs, is_last, LITERT.rules)
    with_floats = with_float_interface(content)

    certificate = None
    if verify:
        certificate = _certify(with_floats, inputs, tensors, captured, versions)
        require_tflite_parity(certificate)

    tflite_path = Path(file_path)
    written = write_files(
        {tflite_path: content if integer_io else with_floats},
        file_path_json,
        params_document(tensors, gm.provenance.backend, None),
        None if certificate is None else certificate.as_json(),
        ".tflite.parity.json",
    )
    warnings = not_in_file(captured)
    for text in warnings:
        logging.getLogger("fxqat").warning("%s: %s", tflite_path.name, text)
    in_float = float_operators(content)
    return TfliteReport(tflite_path, *written, certificate, tensors, in_float, warnings, captured.updated)


def certify_tflite(model: nn.Module, inputs: tuple[Any, ...], content: bytes) -> TfliteCertificate:
    """The certificate of a .tflite file that was exported before, perhaps on another machine, on other inputs.

    Args:
        model: the prepared model that it was exported from, see :func:`fxqat.load_checkpoint`.
        inputs: inputs of the model, of the shapes of the file and in its layout.
        content: the file, with or without integers at its inputs and outputs.

    Raises:
        ExportError: the runtime of LiteRT is not installed, or the model or the file does not run.
        ParityError: they do not compute the same.
    """
    gm = finished_model(model, ExportError)
    require_calibrated(gm)
    try:
        versions = {"ai-edge-litert": version("ai-edge-litert")}
    except PackageNotFoundError as cause:
        raise missing(cause) from cause
    inputs = deployed_inputs(gm, inputs)
    tensors = tuple(lower(gm, "float").tensors.values())
    captured = capture(gm, inputs, with_reals=True)
    certificate = _certify(with_float_interface(content), inputs, tensors, captured, versions)
    require_tflite_parity(certificate)
    return certificate


def _certify(
    content: bytes,
    inputs: tuple[Any, ...],
    tensors: tuple[QuantizedTensor, ...],
    captured: Captured,
    versions: Mapping[str, str],
) -> TfliteCertificate:
    return verify_tflite(
        content,
        [_as_in_file(tensor) for tensor in flatten_tensors(inputs)],
        [tensor for tensor in tensors if tensor.kind == "activation"],
        captured.integers,
        captured.reals,
        captured.outputs,
        versions,
    )


def _as_in_file(tensor: Tensor) -> np.ndarray:
    """An input as the file takes it: the converter makes 32 bits of 64."""
    narrow = {torch.int64: torch.int32, torch.float64: torch.float32}
    array: np.ndarray = tensor.to(narrow.get(tensor.dtype, tensor.dtype)).contiguous().numpy()
    return array

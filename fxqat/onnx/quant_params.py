"""The JSON document of quantization parameters: write it, read it, compare it with the ONNX file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from fxqat.errors import CheckpointError, ParityError
from fxqat.onnx.external_data import values_of
from fxqat.onnx.half_scales import half_scales_of
from fxqat.onnx.integer_products import OF_ALL
from fxqat.scheme import QuantizedTensor

FORMAT = "fxqat.quant_params"
VERSION = 2
READABLE = (1, 2)
"""Version 1 has no list of raw inputs: there were none."""

ENTRY_TYPES: dict[str, type] = {
    "kind": str,
    "module": str,
    "dtype": str,
    "bit_width": int,
    "signed": bool,
    "symmetric": bool,
    "quant_min": int,
    "quant_max": int,
    "scale": list,
    "zero_point": list,
}


def params_document(
    tensors: Iterable[QuantizedTensor],
    backend: str,
    opset: int | None,
    raw_inputs: Mapping[str, tuple[Sequence[float], Sequence[float]]] | None = None,
    runtime: str | None = None,
) -> dict[str, Any]:
    """The document of an exported model; ``schema.json`` beside this file is its schema.

    Scales are written as float64 decimals that give the same float32 bits when they are read.

    Args:
        tensors: the quantized tensors.
        backend: the backend's name.
        opset: opset of the file, None for a .tflite file.
        raw_inputs: mean and std of each input that the file takes as uint8 and normalizes, by its name.
        runtime: the runtime that the file was written for; None is left out.
    """
    raw = (raw_inputs or {}).items()
    return {
        "format": FORMAT,
        "version": VERSION,
        "backend": backend,
        "opset": opset,
        **({} if runtime is None else {"runtime": runtime}),
        "inputs": {name: {"dtype": "uint8", "mean": list(mean), "std": list(std)} for name, (mean, std) in raw},
        "tensors": {tensor.name: tensor.as_json() for tensor in tensors},
    }


def schema() -> dict[str, Any]:
    """The JSON schema of the document."""
    text = Path(__file__).with_name("schema.json").read_text(encoding="utf-8")
    return json.loads(text)  # type: ignore[no-any-return]


def read_params(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a document.

    Raises:
        CheckpointError: the file cannot be read, is not JSON, or has another format or version.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as cause:
        raise CheckpointError(f"cannot read quantization parameters from {path}: {cause.strerror}") from cause
    except ValueError as cause:
        raise CheckpointError(f"{path} is not JSON: {cause}") from cause
    found = (document.get("format"), document.get("version")) if isinstance(document, dict) else (None, None)
    if found[0] != FORMAT or found[1] not in READABLE:
        raise CheckpointError(
            f"{path}: expected format {FORMAT!r} version {' or '.join(map(str, READABLE))}, found {found[0]!r} "
            f"{found[1]!r}"
        )
    tensors = document.get("tensors")
    if not isinstance(tensors, dict):
        raise CheckpointError(f"{path}: 'tensors' must be a mapping, found {type(tensors).__name__}")
    for name, entry in tensors.items():
        _check_form(f"{path}: {name}", entry)
    return document  # type: ignore[no-any-return]


def _check_form(where: str, entry: Any) -> None:
    """Check the types of one entry."""
    if not isinstance(entry, dict):
        raise CheckpointError(f"{where}: expected a mapping, found {type(entry).__name__}")
    for key, kind in ENTRY_TYPES.items():
        if not isinstance(entry.get(key), kind):
            raise CheckpointError(f"{where}: {key!r} must be {kind.__name__}, found {entry.get(key)!r}")
    for key, kinds in (("scale", (int, float)), ("zero_point", (int,))):
        if not entry[key] or not all(isinstance(v, kinds) and not isinstance(v, bool) for v in entry[key]):
            raise CheckpointError(f"{where}: {key!r} must be a list of numbers, found {entry[key][:4]}")


def check_params(model: onnx.ModelProto, tensors: Iterable[QuantizedTensor]) -> None:
    """Check that scales and zero points in the file equal those of the document bit for bit.

    Raises:
        ParityError: a tensor of the document is missing in the file or has other parameters there.
    """
    check_entries(model, {tensor.name: tensor.as_json() for tensor in tensors})


def check_entries(model: onnx.ModelProto, entries: Mapping[str, Mapping[str, Any]]) -> None:
    """As :func:`check_params`, with the entries of a document by name."""
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    halves = half_scales_of(model)

    def values(name: str) -> np.ndarray:
        return halves[name] if name in halves else values_of(constants[name])

    known = constants.keys() | halves.keys()
    weights = {name for name, entry in entries.items() if entry["kind"] == "weight"}
    of_value: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    zero_points: dict[str, np.ndarray] = {}
    products: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for node in model.graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear") and known >= set(node.input[1:3]):
            scale, *rest = (values(name) for name in node.input[1:3])
            zero_point = rest[0] if rest else np.zeros_like(scale)
            key = node.input[0] if node.op_type == "QuantizeLinear" else node.output[0]
            of_value[key] = (scale, zero_point)
        elif node.op_type == "Sub" and node.input[1] in constants:
            zero_points[node.output[0]] = values_of(constants[node.input[1]])
        elif node.op_type == "Mul" and node.input[1] in known:  # see fxqat.onnx.foldable_weights
            scale = values(node.input[1])
            products[node.output[0]] = (scale, zero_points.get(node.input[0], np.zeros_like(scale)))
        elif node.op_type == "Reshape" and node.input[0] in products:
            products[node.output[0]] = products[node.input[0]]
    of_value |= {name: found for name, found in products.items() if name in weights}
    for name, entry in entries.items():
        if name not in of_value and f"{name}_scale" in known:  # GatherIntegers, IntegerProducts
            scale = values(f"{name}_scale")
            held = constants.get(f"{name}_zero_point") or constants.get(f"{name}_zero_point{OF_ALL}")
            zero_point = np.zeros(1, np.int8) if held is None else values_of(held)
            of_value[name] = (scale, np.broadcast_to(zero_point.reshape(-1), scale.size))
        if name not in of_value:
            raise ParityError(f"{name}: in the parameter file but not quantized in the ONNX file")
        scale, zero_point = of_value[name]
        same = np.array_equal(scale.reshape(-1), np.asarray(entry["scale"], np.float32))
        if not same or not np.array_equal(zero_point.reshape(-1).astype(np.int64), entry["zero_point"]):
            raise ParityError(f"{name}: the ONNX file holds other parameters than the parameter file")

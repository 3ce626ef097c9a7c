"""Checkpoints, which load into the float model and resume QAT; and loading the JSON of scales and zero points.

The file is a dict that ``torch.load(weights_only=True)`` reads:

* ``state_dict``: the weights under the names of the float model, without fake-quant;
* ``qat_state_dict``: the complete state of the prepared model, with the switches;
* ``schemes``: the scheme of every fake-quant, as text;
* ``format``, ``backend``, ``bias_corrected`` (see ``Provenance``), ``extra``.
"""

from __future__ import annotations

import io
import json
import os
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fxqat.convert_export import convert_export
from fxqat.errors import CheckpointError
from fxqat.fake_quantize.base import WEIGHT, FakeQuantizeBase
from fxqat.fake_quantize.state import named_fake_quants, require_calibrated
from fxqat.numerics import SCALE_MAX, SCALE_MIN, valid_scale
from fxqat.onnx.opset import opset_for
from fxqat.onnx.quant_params import params_document, read_params
from fxqat.quantization.graph_module import prepared_model
from fxqat.quantization.lower import lower
from fxqat.utils.files import atomic_path

FORMAT = "fxqat.checkpoint.1"


def save_checkpoint(
    model: nn.Module,
    file_path: str | os.PathLike[str],
    file_path_json: str | os.PathLike[str] | None = None,
    *,
    file_path_onnx: str | os.PathLike[str] | None = None,
    example_inputs: tuple[Any, ...] | Tensor | None = None,
    extra: dict[str, Any] | None = None,
) -> None:
    """Save a prepared model, and on request its JSON and its ONNX file.

    ``["state_dict"]`` of the file loads into the float model with ``strict=True``. From the same file,
    :func:`load_checkpoint` resumes QAT so that the next step is bit-identical. Every file is written atomically: a
    crash leaves the old one.

    Args:
        model: a model of ``prepare_by_platform``, also wrapped by DDP or ``torch.compile``.
        file_path: the ``.pth`` file.
        file_path_json: the JSON of scales and zero points, None for none; the model must be calibrated.
        file_path_onnx: the QDQ ONNX file, None for none; needs ``example_inputs``.
        example_inputs: the inputs for the ONNX export.
        extra: further state of the training (epoch, optimizer state); tensors and plain values only.

    Raises:
        CheckpointError: the model is not a prepared one, a path cannot be written, ``example_inputs`` is missing, or
            ``extra`` holds something that ``torch.load(weights_only=True)`` would refuse.
        CalibrationError: JSON or ONNX is requested of a model that is not calibrated; the ``.pth`` is written already.
        ExportError: JSON or ONNX is requested of a model that cannot be exported; the ``.pth`` is written already.
    """
    gm = prepared_model(model, CheckpointError)
    if file_path_onnx is not None and example_inputs is None:
        raise CheckpointError("file_path_onnx needs example_inputs: pass a tuple of the model's inputs")
    content = {
        "format": FORMAT,
        "backend": gm.provenance.backend,
        "state_dict": float_state_dict(gm),
        "schemes": _schemes(gm),
        "bias_corrected": gm.provenance.bias_corrected,
        "qat_state_dict": gm.state_dict(),
        "extra": extra if extra is not None else {},
    }
    _check_extra(content["extra"])
    with atomic_path(file_path, CheckpointError) as temporary:
        torch.save(content, temporary)
    if file_path_onnx is not None:
        assert example_inputs is not None
        convert_export(model, example_inputs, file_path_onnx, file_path_json)
    elif file_path_json is not None:
        require_calibrated(gm)
        tensors = lower(gm).tensors.values()
        document = params_document(tensors, gm.provenance.backend, opset_for(tensors, None))
        with atomic_path(file_path_json, CheckpointError) as temporary:
            temporary.write_text(json.dumps(document, indent=1))


def _check_extra(extra: Any) -> None:
    """Check that ``torch.load(weights_only=True)`` can read it back."""
    buffer = io.BytesIO()
    torch.save(extra, buffer)
    buffer.seek(0)
    try:
        torch.load(buffer, weights_only=True)
    except Exception as cause:  # the unpickler names the type it refuses
        raise CheckpointError(f"extra may hold tensors and plain Python values only: {cause}") from cause


def float_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The weights of a prepared model as the state dict of its float model."""
    gm = prepared_model(model, CheckpointError)
    state = gm.state_dict()
    trained = {name: state[inside].detach() for name, inside in gm.provenance.tensor_names.items()}
    for name, found in gm.provenance.split_tensors.items():
        trained[name] = torch.cat([state[part].detach() for part in found.names], found.dim)
    return trained | {name: tensor.detach() for name, tensor in gm.provenance.unread.items()}


def load_checkpoint(model: nn.Module, file_path: str | os.PathLike[str]) -> dict[str, Any]:
    """Restore a prepared model from a file of :func:`save_checkpoint`.

    Args:
        model: a model prepared with the same backend and configuration, calibrated or not.
        file_path: the ``.pth`` file.

    Returns:
        The ``extra`` that was saved.

    Raises:
        CheckpointError: the file cannot be read, is no checkpoint of fxqat, or does not fit the model. The model is
            then unchanged.
    """
    gm = prepared_model(model, CheckpointError)
    try:
        content = torch.load(file_path, map_location="cpu", weights_only=True)
    except Exception as cause:  # torch.load raises many kinds
        raise CheckpointError(f"cannot read a checkpoint from {file_path}: {cause}") from cause
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{file_path} is not a checkpoint of fxqat.save_checkpoint ({FORMAT})")
    entries = {"backend": str, "schemes": dict, "state_dict": dict, "qat_state_dict": dict, "extra": dict}
    broken = [key for key, kind in entries.items() if not isinstance(content.get(key), kind)]
    if broken:
        raise CheckpointError(f"{file_path} is damaged: {', '.join(broken)} missing or of a wrong type. Save it again.")
    if content["backend"] != gm.provenance.backend:
        raise CheckpointError(
            f"{file_path} is for backend {content['backend']}, but the model was prepared for {gm.provenance.backend}. "
            f"Prepare it for {content['backend']}."
        )
    _check_fits(gm.state_dict(), content["qat_state_dict"], str(file_path))
    if content["schemes"] != _schemes(gm):
        names = [name for name, scheme in _schemes(gm).items() if content["schemes"].get(name) != scheme]
        raise CheckpointError(
            f"{file_path} was saved with other schemes, of {names[:4]}. "
            "Prepare the model with the configuration it was saved with."
        )
    gm.load_state_dict(content["qat_state_dict"], strict=True)
    gm.provenance.bias_corrected = content.get("bias_corrected", False)
    gm.provenance.noise = None
    return content["extra"]  # type: ignore[no-any-return]


def load_quant_params(model: nn.Module, file_path_json: str | os.PathLike[str]) -> None:
    """Load scales and zero points from the JSON of an export; the prepared model is then calibrated.

    Args:
        model: a model prepared with the same backend and configuration as the exported one.
        file_path_json: the JSON file.

    Raises:
        CheckpointError: the file cannot be read, does not have exactly one entry for each fake-quant of the model, or
            has an entry that does not fit the scheme.
    """
    gm = prepared_model(model, CheckpointError)
    tensors = read_params(file_path_json)["tensors"]
    entries: dict[tuple[str, str], dict[str, Any]] = {}
    for entry in tensors.values():
        if entry["kind"] != "bias":
            key = (entry["kind"], entry["module"])
            known = entries.get(key)
            # a shared layer is stored once for each raised scale; the original scales are the smallest
            scales = zip(entry["scale"], known["scale"], strict=False) if known else ()
            entries[key] = entry if known is None else known | {"scale": [min(pair) for pair in scales]}
    quants = dict(named_fake_quants(gm))
    wanted = {_key(name, quant): quant for name, quant in quants.items()}
    missing, surplus = sorted(set(wanted) - set(entries)), sorted(set(entries) - set(wanted))
    if missing or surplus:
        raise CheckpointError(
            f"{file_path_json} does not fit the model: {len(missing)} fake-quants without an entry {missing[:4]}, "
            f"{len(surplus)} entries without a fake-quant {surplus[:4]}. "
            "Prepare the model with the backend and configuration of the exported model."
        )
    for key, quant in wanted.items():
        _check_entry(key, quant, entries[key], str(file_path_json))
    for key, quant in wanted.items():
        entry = entries[key]
        scale = torch.from_numpy(np.asarray(entry["scale"], np.float32)).reshape(quant.scale.shape)
        quant.set_qparams(scale, torch.tensor(entry["zero_point"], dtype=torch.float32).reshape(quant.scale.shape))
    gm.provenance.noise = None


def _schemes(gm: nn.Module) -> dict[str, str]:
    """The complete scheme of every fake-quant, as text."""
    return {name: repr(quant.scheme) for name, quant in named_fake_quants(gm)}


def _key(name: str, quant: FakeQuantizeBase) -> tuple[str, str]:
    return ("weight", name.removesuffix(".weight_fake_quant")) if quant.kind == WEIGHT else ("activation", name)


def _check_entry(key: tuple[str, str], quant: FakeQuantizeBase, entry: dict[str, Any], path: str) -> None:
    scheme = quant.scheme
    wanted = (scheme.bit_width, scheme.signed, quant.scale.numel(), quant.scale.numel())
    found = (entry["bit_width"], entry["signed"], len(entry["scale"]), len(entry["zero_point"]))
    where = f"{path}: {key[1]} ({key[0]})"
    if wanted != found:
        raise CheckpointError(f"{where}: expected (bits, signed, scales, zero points) {wanted}, found {found}")
    if not all(SCALE_MIN <= scale <= SCALE_MAX for scale in entry["scale"]):
        raise CheckpointError(
            f"{where}: scales must be within [{SCALE_MIN:g}, {SCALE_MAX:g}], found {entry['scale'][:4]}"
        )
    if not all(valid_scale(torch.tensor(scale), scheme.scale_bits) == scale for scale in entry["scale"]):
        raise CheckpointError(
            f"{where}: scales of {scheme} must have at most {scheme.scale_bits} significant bits, found "
            f"{entry['scale'][:4]}. Prepare the model with scale_bits=24 to load any scale."
        )
    if not all(scheme.quant_min <= zero_point <= scheme.quant_max for zero_point in entry["zero_point"]):
        limits = f"[{scheme.quant_min}, {scheme.quant_max}]"
        raise CheckpointError(f"{where}: zero points must be within {limits}, found {entry['zero_point'][:4]}")


def _check_fits(wanted: dict[str, Any], found: dict[str, Any], path: str) -> None:
    missing, surplus = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    shapes = [
        f"{name}: {_shape_of(found[name])} instead of {tuple(wanted[name].shape)}"
        for name in set(wanted) & set(found)
        if isinstance(wanted[name], Tensor) and tuple(wanted[name].shape) != getattr(found[name], "shape", None)
    ]
    if missing or surplus or shapes:
        raise CheckpointError(
            f"{path} does not fit the model: missing {missing[:4]}, unexpected {surplus[:4]}, "
            f"shapes {sorted(shapes)[:4]}. "
            "Prepare the model with the backend and configuration it was saved with."
        )


def _shape_of(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__

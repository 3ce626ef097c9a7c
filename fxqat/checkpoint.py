"""Checkpoints, which load into the float model and resume QAT; and loading the JSON of scales and zero points.

The file is a dict that ``torch.load(weights_only=True)`` reads:

* ``state_dict``: the weights under the names of the float model, without fake-quant;
* ``qat_state_dict``: the complete state of the prepared model, with the switches;
* ``schemes``: the fields of the scheme of every fake-quant (at first: their text);
* ``methods``: the class and the arguments of every fake-quant and of its observer;
* ``format``, ``backend``, ``fitted_by`` (see ``Provenance``), ``extra``.

The digest of the whole file is its zip comment. A file without it is read as well: one that is older, or that was
written with ``torch.save``.
"""

from __future__ import annotations

import ast
import copy
import inspect
import io
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fxqat.convert_export import convert_export
from fxqat.errors import CheckpointError, ConfigError
from fxqat.fake_quantize.base import WEIGHT, FakeQuantizeBase, read_switches
from fxqat.fake_quantize.state import named_fake_quants, require_calibrated
from fxqat.numerics import SCALE_MAX, SCALE_MIN, valid_scale
from fxqat.onnx.opset import opset_for
from fxqat.onnx.quant_params import params_document, read_params
from fxqat.onnx.runtimes import check_runtime
from fxqat.quantization.graph_module import QuantGraphModule, finished_model, float_tensors, prepared_model
from fxqat.quantization.lower import lower
from fxqat.scheme import QuantizeScheme
from fxqat.utils.files import atomic_path, check_distinct, check_path
from fxqat.utils.meta_tensors import require_values
from fxqat.utils.sharded import on_one_rank, sharded_as, whole
from fxqat.utils.torch_compat import is_flattened, is_sharded
from fxqat.utils.zip_digest import append_digest, is_intact

FORMAT = "fxqat.checkpoint.1"


def save_checkpoint(
    model: nn.Module,
    file_path: str | os.PathLike[str],
    file_path_json: str | os.PathLike[str] | None = None,
    *,
    file_path_onnx: str | os.PathLike[str] | bool | None = None,
    example_inputs: tuple[Any, ...] | Mapping[str, Any] | Tensor | None = None,
    extra: dict[str, Any] | None = None,
    runtime: str | None = None,
) -> None:
    """Save a prepared model, and on request its JSON and its ONNX file.

    ``["state_dict"]`` of the file loads into the float model with ``strict=True``. From the same file,
    :func:`load_checkpoint` resumes QAT so that the next step is bit-identical. Every file is written atomically: a
    crash leaves the old one.

    Of a model that :func:`fxqat.tools.training.sharding.shard` has sharded, every rank must call it: the tensors are
    gathered, and rank 0 writes the file.

    With a JSON path, the QDQ ONNX file and its certificate are written beside the JSON if example inputs are known:
    ``save_checkpoint(gm, "model.pth", "model.json")`` writes ``model.onnx``, too. An export traces, converts and
    compares the model, which takes seconds to minutes. So give the JSON path when training has finished, and in each
    epoch only ``file_path``: it has the scales as well.

    Args:
        model: a model of ``prepare_by_platform``, also wrapped by DDP or ``torch.compile``.
        file_path: the ``.pth`` file.
        file_path_json: the JSON of scales and zero points, None for none; the model must be calibrated.
        file_path_onnx: the QDQ ONNX file. None: the JSON's path with the ending ``.onnx`` if there is a JSON path and
            example inputs are known, else no ONNX file. False: no ONNX file.
        example_inputs: the inputs for the ONNX export; None: those that the model was prepared with.
        extra: further state of the training (epoch, optimizer state); tensors and plain values only.
        runtime: the runtime that the ONNX file is written for, see :func:`~fxqat.convert_export`.

    Raises:
        CheckpointError: the model is not a prepared one or is on the meta device, JSON or ONNX is requested of a
            sharded model, the model is sharded by the old FullyShardedDataParallel, two paths are the same file, a path
            cannot be written, ``example_inputs`` is missing, ``runtime`` or ``example_inputs`` is given and no ONNX
            file is written, or ``extra`` holds something that ``torch.load(weights_only=True)`` would refuse.
        CalibrationError: JSON or ONNX is requested of a model that is not calibrated; nothing is written.
        ExportError: ``runtime`` is unknown; or JSON or ONNX is requested of a model that cannot be exported, then the
            ``.pth`` is written already.
    """
    gm = finished_model(model, CheckpointError)
    knows_inputs = example_inputs is not None or gm.provenance.example_inputs is not None
    onnx_path = _onnx_path(file_path_onnx, file_path_json, knows_inputs)
    if onnx_path is None and not (runtime is None and example_inputs is None):
        option = "example_inputs" if runtime is None else f"runtime={runtime!r}"
        raise CheckpointError(f"{option} needs file_path_onnx or file_path_json: it is for the ONNX file")
    check_runtime(runtime)
    paths = {"file_path": file_path, "file_path_json": file_path_json, "file_path_onnx": onnx_path}
    check_distinct(paths, CheckpointError)
    require_values(gm, CheckpointError)
    sharded = _is_sharded(gm)
    if sharded and (file_path_json is not None or onnx_path is not None):
        raise CheckpointError(
            "the model is sharded: save the checkpoint alone, load it into a model that is prepared in the same way "
            "and not sharded, and write JSON and ONNX from that one"
        )
    if file_path_json is not None or onnx_path is not None:
        require_calibrated(gm)
    state, qat_state = _whole_states(gm)
    content = {
        "format": FORMAT,
        "backend": gm.provenance.backend,
        "state_dict": state,
        "schemes": {name: asdict(quant.scheme) for name, quant in named_fake_quants(gm)},
        "methods": _methods(gm),
        "fitted_by": gm.provenance.fitted_by,
        "qat_state_dict": qat_state,
        "extra": extra if extra is not None else {},
    }
    _check_extra(content["extra"])
    with on_one_rank(sharded) as writes:
        if writes:
            with atomic_path(file_path, CheckpointError) as temporary:
                torch.save(content, temporary)
                append_digest(temporary)
    if onnx_path is not None:
        convert_export(model, example_inputs, onnx_path, file_path_json, runtime=runtime)
    elif file_path_json is not None:
        tensors = lower(gm).tensors.values()
        document = params_document(tensors, gm.provenance.backend, opset_for(tensors, None))
        with atomic_path(file_path_json, CheckpointError) as temporary:
            temporary.write_text(json.dumps(document, indent=1))


def _onnx_path(
    given: str | os.PathLike[str] | bool | None, json_path: str | os.PathLike[str] | None, knows_inputs: bool
) -> str | os.PathLike[str] | None:
    """The ONNX file that :func:`save_checkpoint` writes, None for none."""
    if given is True:
        raise CheckpointError("file_path_onnx must be a path, None or False, got True")
    if given is None:
        return Path(json_path).with_suffix(".onnx") if json_path is not None and knows_inputs else None
    if given is not False and not knows_inputs:
        raise CheckpointError("file_path_onnx needs example_inputs: pass a tuple of the model's inputs")
    return None if given is False else given


def _check_extra(extra: Any) -> None:
    """Check that ``torch.load(weights_only=True)`` can read it back."""
    buffer = io.BytesIO()
    try:
        torch.save(extra, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as cause:  # pickle and the unpickler name the type they refuse
        raise CheckpointError(f"extra may hold tensors and plain Python values only: {cause}") from cause


def float_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The weights of a prepared model as the state dict of its float model; of a sharded one, on every rank."""
    return _whole_states(prepared_model(model, CheckpointError))[0]


def _whole_states(gm: QuantGraphModule) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state dicts of the float model and of the prepared model, which share their tensors."""
    state = gm.state_dict(keep_vars=True)
    split = (name for found in gm.provenance.split_tensors.values() for name in found.names)
    gone = [name for name in (*gm.provenance.tensor_names.values(), *split) if name not in state]
    if gone:
        raise CheckpointError(
            f"the prepared model no longer has {', '.join(gone)}: something that was applied to it after "
            "prepare_by_platform computes them from other tensors (torch.nn.utils.prune, parametrize, weight_norm), "
            "which are not in a checkpoint. Make them permanent first, as with prune.remove(module, 'weight')."
        )
    gathered = {id(value): whole(value) for value in state.values() if isinstance(value, Tensor)}
    float_state = float_tensors(gm, lambda tensor: gathered.get(id(tensor), tensor.detach()))
    for name, value in state.items():
        state[name] = gathered.get(id(value), value)
    return float_state, state


def load_checkpoint(model: nn.Module, file_path: str | os.PathLike[str]) -> dict[str, Any]:
    """Restore a prepared model from a file of :func:`save_checkpoint`, also one sharded in another way or not at all.

    Args:
        model: a model prepared with the same backend and configuration, calibrated or not.
        file_path: the ``.pth`` file.

    Returns:
        The ``extra`` that was saved.

    Raises:
        CheckpointError: the file cannot be read, was changed after it was written, is no checkpoint of fxqat, holds
            scales or ranges that are not valid, or does not fit the model; or the model is sharded by the old
            FullyShardedDataParallel. The model is then unchanged.
    """
    gm = prepared_model(model, CheckpointError)
    check_path("file_path", file_path, CheckpointError)
    require_values(gm, CheckpointError)
    _is_sharded(gm)
    try:
        content = torch.load(file_path, map_location="cpu", weights_only=True)
    except Exception as cause:  # torch.load raises many kinds
        raise CheckpointError(f"cannot read a checkpoint from {file_path}: {cause}") from cause
    intact = is_intact(file_path)
    if intact is False:
        raise CheckpointError(f"{file_path} is damaged: it differs from what was written. Use another copy of it.")
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{file_path} is not a checkpoint of fxqat.save_checkpoint ({FORMAT})")
    entries = {"backend": str, "schemes": dict, "state_dict": dict, "qat_state_dict": dict, "extra": dict}
    broken = [key for key, kind in entries.items() if not isinstance(content.get(key), kind)]
    if broken:
        raise CheckpointError(f"{file_path} is damaged: {', '.join(broken)} missing or of a wrong type. Save it again.")
    _check_backend(gm, content["backend"], str(file_path))
    for name, quant in _fake_quant_paths(gm):
        quant.take_names(content["qat_state_dict"], f"{name}.")
    _check_fits(gm, content["qat_state_dict"], str(file_path))
    _check_schemes(gm, content["schemes"], str(file_path))
    _check_methods(gm, content.get("methods", {}), str(file_path))
    # files without "methods" are older than the digest
    rewritten = intact is None and "methods" in content
    _check_values(gm, content["qat_state_dict"], str(file_path), negative_scales=not rewritten)
    _load_state(gm, content["qat_state_dict"], str(file_path))
    before = "correct_bias" if content.get("bias_corrected") else ""  # as older files say it
    gm.provenance.fitted_by = content.get("fitted_by", before)
    gm.provenance.noise = None
    return content["extra"]  # type: ignore[no-any-return]


def load_quant_params(model: nn.Module, file_path_json: str | os.PathLike[str]) -> None:
    """Load scales and zero points from the JSON of an export; the prepared model is then calibrated.

    Args:
        model: a model prepared with the same backend and configuration as the exported one.
        file_path_json: the JSON file.

    Raises:
        CheckpointError: the file cannot be read, is for another backend, does not have exactly one entry for each
            fake-quant of the model, or has an entry that does not fit the scheme.
    """
    gm = prepared_model(model, CheckpointError)
    check_path("file_path_json", file_path_json, CheckpointError)
    require_values(gm, CheckpointError)
    document = read_params(file_path_json)
    _check_backend(gm, document.get("backend"), str(file_path_json))
    tensors = document["tensors"]
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
    if "runtime" in document:
        entries = {key: _with_signs_of(wanted[key].scheme, entry) for key, entry in entries.items()}
    for key, quant in wanted.items():
        _check_entry(key, quant, entries[key], str(file_path_json))
    for key, quant in wanted.items():
        entry = entries[key]
        scale = torch.from_numpy(np.asarray(entry["scale"], np.float32)).reshape(quant.scale.shape)
        quant.set_qparams(scale, torch.tensor(entry["zero_point"], dtype=torch.float32).reshape(quant.scale.shape))
    gm.provenance.noise = None


def _check_backend(gm: QuantGraphModule, found: Any, path: str) -> None:
    wanted = gm.provenance.backend
    if found != wanted:
        raise CheckpointError(
            f"{path} is for backend {found}, but the model was prepared for {wanted}. Prepare it for {found}."
        )


def _check_schemes(gm: nn.Module, saved: dict[str, Any], path: str) -> None:
    """Check that every fake-quant was saved with the scheme it has."""
    quants = dict(named_fake_quants(gm))
    names = [name for name, quant in quants.items() if _saved_scheme(saved.get(name), path) != quant.scheme]
    if names or len(saved) != len(quants):
        raise CheckpointError(
            f"{path} was saved with other schemes, of {names[:4] or sorted(set(saved) - set(quants))[:4]}. "
            "Prepare the model with the configuration it was saved with."
        )


def _saved_scheme(saved: Any, path: str) -> QuantizeScheme | None:
    """A scheme of its fields, or of its text, as it was saved at first; fields that were not saved have defaults."""
    if saved is None:
        return None
    try:
        if isinstance(saved, str):
            call: Any = ast.parse(saved, mode="eval").body
            saved = {field.arg: ast.literal_eval(field.value) for field in call.keywords}
        known = {field.name for field in fields(QuantizeScheme)}
        return QuantizeScheme(**{name: value for name, value in saved.items() if name in known})
    except (AttributeError, ConfigError, SyntaxError, TypeError, ValueError) as cause:
        raise CheckpointError(f"{path} is damaged: a scheme is {saved!r:.80}. Save it again.") from cause


def _methods(gm: nn.Module) -> dict[str, dict[str, dict[str, Any]]]:
    """For every fake-quant, its class and arguments and those of its observer."""
    return {
        name: {"fake_quantize": _class_and_arguments(quant), "observer": _class_and_arguments(quant.observer)}
        for name, quant in named_fake_quants(gm)
    }


def _class_and_arguments(made: object) -> dict[str, Any]:
    """The name of a class, and the plain values with which an object of it was made, as far as it keeps them."""
    names = {name for kind in type(made).__mro__[:-1] for name in inspect.signature(kind).parameters}
    kept = {name: vars(made)[name] for name in sorted(names & vars(made).keys())}
    plain = {name: value for name, value in kept.items() if value is None or isinstance(value, (bool, int, float, str))}
    return {"class": type(made).__name__} | plain


def _check_methods(gm: nn.Module, saved: Any, path: str) -> None:
    """Check that fake-quants and observers are those of the file; a file of before has none."""
    different = []
    for name, wanted in _methods(gm).items():
        for what, values in wanted.items():
            try:
                found = saved.get(name, wanted)[what]
                pairs = [(key, found[key], value) for key, value in values.items() if key in found]
            except (AttributeError, KeyError, TypeError) as cause:
                raise CheckpointError(f"{path} is damaged: {name} has no {what}. Save it again.") from cause
            different += [f"{name}, {what}: {key} {old!r} instead of {new!r}" for key, old, new in pairs if old != new]
    if different:
        raise CheckpointError(
            f"{path} was saved with other fake-quants or observers: {different[:4]}. "
            "Prepare the model with the configuration it was saved with."
        )


def _check_values(gm: nn.Module, state: dict[str, Any], path: str, negative_scales: bool) -> None:
    """Check the scales, zero points and ranges in a state dict.

    Args:
        gm: the model for which the state dict is.
        state: the state dict.
        path: the file, for the message.
        negative_scales: whether a learned scale may be 0 or negative. Training can make it so; it counts by its
            magnitude.
    """
    wrong = []
    for name, quant in named_fake_quants(gm):
        learned = {key for key, _ in quant.named_parameters(recurse=False)}
        fixed = {"scale", "zero_point", "unit_scale", "calibrated_zero_point"}
        for key in sorted({*fixed, *learned} & quant.state_dict().keys()):
            value = state[f"{name}.{key}"]
            if not bool(value.isfinite().all()):
                wrong.append(f"{name}.{key} (NaN or infinite)")
            elif key.endswith("scale") and not (negative_scales and key in learned) and not bool((value > 0).all()):
                wrong.append(f"{name}.{key} (zero or negative)")
        ranges = [f"{name}.observer.{key}" for key in ("min_val", "max_val")]
        wrong += [f"{key} (NaN)" for key in ranges if key in state and bool(state[key].isnan().any())]
    if wrong:
        raise CheckpointError(
            f"{path} holds values that are not valid: {', '.join(wrong[:8])}. Use another checkpoint."
        )


def _is_sharded(gm: nn.Module) -> bool:
    """Whether the model is sharded, so that every rank takes part.

    Raises:
        CheckpointError: it is sharded by FullyShardedDataParallel, which does not tell the parts of a tensor.
    """
    tensors = [*gm.named_parameters(), *gm.named_buffers()]
    flattened = [name for name, tensor in tensors if is_flattened(tensor)]
    if flattened:
        raise CheckpointError(
            f"FullyShardedDataParallel has flattened {flattened[:4]}: this process does not hold the whole of them. "
            "Shard the model by fxqat.tools.training.sharding.shard (FSDP2), whose checkpoints work. Or gather the "
            "full state dict, load it into a model that is prepared in the same way and not sharded, and save that."
        )
    return any(is_sharded(tensor) for _, tensor in tensors)


def _key(name: str, quant: FakeQuantizeBase) -> tuple[str, str]:
    return ("weight", name.removesuffix(".weight_fake_quant")) if quant.kind == WEIGHT else ("activation", name)


def _with_signs_of(scheme: QuantizeScheme, entry: dict[str, Any]) -> dict[str, Any]:
    """An entry of a file for a runtime, which may store signed activations as unsigned, with the signs of a scheme."""
    is_moved = scheme.signed and entry["dtype"] == "uint8" and entry["bit_width"] == scheme.bit_width
    middle = 1 << (scheme.bit_width - 1)
    moved = {key: entry[key] - middle for key in ("quant_min", "quant_max")}
    moved |= {"signed": True, "zero_point": [zero_point - middle for zero_point in entry["zero_point"]]}
    return entry | moved if is_moved else entry


def _check_entry(key: tuple[str, str], quant: FakeQuantizeBase, entry: dict[str, Any], path: str) -> None:
    scheme = quant.scheme
    integers = ("bit_width", "signed", "quant_min", "quant_max")
    wanted = (*(getattr(scheme, name) for name in integers), quant.scale.numel(), quant.scale.numel())
    found = (*(entry[name] for name in integers), len(entry["scale"]), len(entry["zero_point"]))
    where = f"{path}: {key[1]} ({key[0]})"
    if wanted != found:
        what = "(bits, signed, smallest and largest integer, scales, zero points)"
        raise CheckpointError(f"{where}: expected {what} {wanted}, found {found}")
    if not all(SCALE_MIN <= scale <= SCALE_MAX for scale in entry["scale"]):
        raise CheckpointError(
            f"{where}: scales must be within [{SCALE_MIN:g}, {SCALE_MAX:g}], found {entry['scale'][:4]}"
        )
    scales = torch.tensor(entry["scale"], dtype=torch.float32)
    if not torch.equal(valid_scale(scales, scheme.scale_bits), scales):
        raise CheckpointError(
            f"{where}: scales of {scheme} must have at most {scheme.scale_bits} significant bits, found "
            f"{entry['scale'][:4]}. Prepare the model with scale_bits=24 to load any scale."
        )
    fixed, step = scheme.fixed_zero_point, scheme.zero_point_step
    if fixed is not None and any(zero_point != fixed for zero_point in entry["zero_point"]):
        raise CheckpointError(f"{where}: zero points of {scheme} must be {fixed}, found {entry['zero_point'][:4]}")
    if any(zero_point % step for zero_point in entry["zero_point"]):
        raise CheckpointError(
            f"{where}: zero points of {scheme} must be even, found {entry['zero_point'][:4]}. The file was written "
            "for a backend, or by a version of fxqat, without this rule: calibrate the model again."
        )
    if not all(scheme.quant_min <= zero_point <= scheme.quant_max for zero_point in entry["zero_point"]):
        limits = f"[{scheme.quant_min}, {scheme.quant_max}]"
        raise CheckpointError(f"{where}: zero points must be within {limits}, found {entry['zero_point'][:4]}")


def _check_fits(gm: nn.Module, found: dict[str, Any], path: str) -> None:
    wanted = gm.state_dict()
    switches = [f"{name}._extra_state" for name, _ in _fake_quant_paths(gm)]
    missing, surplus = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    shapes = [
        f"{name}: {_shape_of(found[name])} instead of {tuple(wanted[name].shape)}"
        for name in (set(wanted) & set(found)).difference(switches)
        if isinstance(wanted[name], Tensor) and tuple(wanted[name].shape) != getattr(found[name], "shape", None)
    ]
    if missing or surplus or shapes:
        raise CheckpointError(
            f"{path} does not fit the model: missing {missing[:4]}, unexpected {surplus[:4]}, "
            f"shapes {sorted(shapes)[:4]}. "
            "Prepare the model with the backend and configuration it was saved with."
        )
    for name in switches:
        try:
            read_switches(found[name])
        except CheckpointError as cause:
            raise CheckpointError(f"{path}: {name}: {cause}") from cause


def _load_state(gm: nn.Module, state: dict[str, Any], path: str) -> None:
    """Load a state dict that fits. A module of the user's may refuse its own extra state; then nothing has changed."""
    quants = {f"{name}._extra_state" for name, _ in _fake_quant_paths(gm)}
    of_user = any(name.endswith("_extra_state") and name not in quants for name in state)
    before = copy.deepcopy(gm.state_dict()) if of_user else {}
    sharded = {name: sharded_as(state[name], value) for name, value in gm.state_dict().items()}
    try:
        gm.load_state_dict(sharded, strict=True)
    except Exception as cause:
        if before:
            gm.load_state_dict(before, strict=True)
        raise CheckpointError(f"cannot load {path}: {type(cause).__name__}: {cause}") from cause


def _fake_quant_paths(gm: nn.Module) -> list[tuple[str, FakeQuantizeBase]]:
    """Every fake-quant under every path, as a state dict has them."""
    modules = gm.named_modules(remove_duplicate=False)
    return [(name, module) for name, module in modules if isinstance(module, FakeQuantizeBase)]


def _shape_of(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__

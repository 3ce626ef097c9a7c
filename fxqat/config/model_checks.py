"""Models that cannot be prepared, refused before any work is done, each with what to do instead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from fxqat.errors import ConfigError
from fxqat.quantization.graph_module import QuantGraphModule
from fxqat.utils.own_forward import has_own_forward
from fxqat.utils.tensors import flatten_tensors
from fxqat.utils.torch_compat import BatchNorm, is_compiled, is_fake

CHECKED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Types whose values are checked; torch cannot compare those of 8 bits."""

INSTEAD_OF_EXPORTED = (
    "prepare the Python model that was exported, or save the exported program (torch.export.save) and use the command "
    "fxqat quantize FILE.pt2"
)

SHOWN = 4
"""How many names of tensors an error lists."""


def check_model(model: Any, example_inputs: Any = None) -> None:
    """Check that a model can be prepared.

    Args:
        model: what the user gave.
        example_inputs: what the user gave; a model on the meta device is accepted with inputs on the meta device.

    Raises:
        ConfigError: it is no Python model (a script, a compiled or already prepared model, a parallel wrapper); its
            tensors hold no values, or not finite ones, or can never be trained; float32 is not the type of its
            tensors or of new ones; or new tensors are on the meta device and its own are not.
    """
    if isinstance(model, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
        raise ConfigError(f"{_type(model)} is a TorchScript: prepare the Python model that it was made from")
    if isinstance(model, torch.export.ExportedProgram):
        raise ConfigError(f"model is an ExportedProgram of torch.export: {INSTEAD_OF_EXPORTED}")
    if not isinstance(model, nn.Module):
        hint = ": where train() returns nothing, call model.eval() on a line of its own" if model is None else ""
        raise ConfigError(f"model must be a torch.nn.Module, got {_type(model)}{hint}")
    if isinstance(model, fx.GraphModule) and _is_exported(model.graph):
        raise ConfigError(f"the model was made by torch.export: {INSTEAD_OF_EXPORTED}")
    for path, module in model.named_modules():
        _check_module(path, module)
    if torch.is_inference_mode_enabled():
        raise ConfigError(
            "prepare_by_platform was called inside torch.inference_mode(), where the copy of the model could never be "
            "trained: call it outside"
        )
    default = torch.get_default_dtype()
    if default != torch.float32:
        raise ConfigError(
            f"torch.get_default_dtype() is {_name(default)}, but scales and ranges are float32: call "
            "torch.set_default_dtype(torch.float32) before prepare_by_platform"
        )
    if torch.get_default_device().type == "meta" and not all(
        t.is_meta for t in (*model.parameters(), *model.buffers())
    ):
        raise ConfigError(
            "the default device is meta, so that new tensors have no values, but the model has values: call "
            "prepare_by_platform outside of torch.device('meta') or torch.set_default_device('meta')"
        )
    _check_tensors(model, example_inputs)


def _check_module(path: str, module: nn.Module) -> None:
    """Check the type of the model, or of a module inside."""
    where = f"the module {path!r} of the model" if path else "the model"
    if isinstance(module, QuantGraphModule):
        raise ConfigError(
            f"{where} is already prepared: use the prepared model itself, or prepare the float model again "
            "(fxqat.tools.to_float gives a float model with the trained weights)"
        )
    if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise ConfigError(f"{where} is a {_type(module)}: prepare the model inside (.module), and wrap the result")
    if is_compiled(module):
        raise ConfigError(
            f"{where} was compiled by torch.compile: prepare the model that is not compiled (a compiled wrapper holds "
            "it as ._orig_mod), and compile the result"
        )
    if has_own_forward(module) and "_original_forward" in vars(module):
        raise ConfigError(
            f"{where} computes in mixed precision by accelerate: prepare accelerator.unwrap_model(model, "
            "keep_fp32_wrapper=False), and give the result to accelerator.prepare"
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise ConfigError(f"{where} is a TorchScript: prepare a model with the Python module that it was made from")


def _is_exported(graph: fx.Graph) -> bool:
    """Whether a graph calls operators of ``torch.ops.aten`` only."""
    called = [node.target for node in graph.nodes if node.op in ("call_function", "call_module", "call_method")]
    called = [target for target in called if target != "_guards_fn"]  # the module that checks the inputs
    return bool(called) and all(getattr(target, "namespace", "") == "aten" for target in called)


def _check_tensors(model: nn.Module, example_inputs: Any) -> None:
    """Check the parameters and buffers."""
    parameters = {key: parameter for key, parameter in model.named_parameters() if not is_lazy(parameter)}
    tensors = parameters | {key: buffer for key, buffer in model.named_buffers() if not is_lazy(buffer)}
    name = type(model).__name__
    _refuse(
        (key for key, tensor in tensors.items() if is_fake(tensor)),
        f"of {name} are fake tensors without values: make the model outside of FakeTensorMode",
    )
    on_meta = any(tensor.is_meta for tensor in flatten_tensors(example_inputs))
    if on_meta and any(tensor.is_meta for tensor in tensors.values()):
        _refuse(
            (key for key, parameter in parameters.items() if not parameter.is_meta),
            f"of {name} have values, but other parameters and example_inputs are on the meta device: give a model that "
            "is on the meta device as a whole (model.to('meta')) for a report without values, or load all weights",
        )
    elif not on_meta:
        _refuse(
            (key for key, tensor in tensors.items() if tensor.is_meta),
            f"of {name} are on the meta device, without values: load the weights (model.to_empty(device='cpu') makes "
            "room for them) before prepare_by_platform",
        )
    _refuse(
        (key for key, tensor in tensors.items() if tensor.is_inference()),
        f"of {name} were made inside torch.inference_mode() and can never be trained: make or load the model outside",
    )
    if {tensor.dtype for tensor in parameters.values() if tensor.is_floating_point()} == {torch.float64}:
        raise ConfigError(
            f"{name} is float64, but quantization computes in float32: call model.float() before prepare_by_platform"
        )
    statistics = {
        f"{path}.{key}" if path else key: buffer
        for path, module in model.named_modules()
        if isinstance(module, BatchNorm)
        for key, buffer in module.named_buffers(recurse=False)
        if not is_lazy(buffer)
    }
    _refuse(
        (key for key, tensor in (parameters | statistics).items() if not _is_finite(tensor)),
        f"of {name} hold NaN or infinity: they were trained too fast, or never initialized; give a model with finite "
        "weights",
    )


def _is_finite(tensor: Tensor) -> bool:
    """Whether a tensor holds neither NaN nor infinity; its minimum and maximum would be such a value."""
    if tensor.is_meta or tensor.dtype not in CHECKED or not tensor.numel():
        return True
    return all(bool(extreme.isfinite()) for extreme in torch.aminmax(tensor.detach()))


def _refuse(names: Iterator[str], words: str) -> None:
    """Raise an error that names the first tensors, if there are any."""
    found = list(names)
    if found:
        more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        raise ConfigError(f"the tensors {', '.join(found[:SHOWN])}{more} {words}")


def _type(value: Any) -> str:
    return type(value).__name__


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

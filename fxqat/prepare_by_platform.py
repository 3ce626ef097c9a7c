"""The front door: a float model in, a model with a backend's fake-quant out."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxqat.custom_quantizer.config import parse_config
from fxqat.custom_quantizer.quantizer import BackendQuantizer
from fxqat.custom_quantizer.spec import BackendSpec
from fxqat.custom_quantizer.table import BackendType, backend_spec
from fxqat.errors import ConfigError, TraceError
from fxqat.fuser_method_mappings import fusions_without
from fxqat.quantization.fuse import fuse
from fxqat.quantization.graph_module import Provenance, QuantGraphModule, make_quant_graph_module
from fxqat.quantization.insert import insert
from fxqat.quantization.report import build_report
from fxqat.quantization.standardize import standardize
from fxqat.quantization.trace import trace
from fxqat.utils.modes import eval_mode
from fxqat.utils.tensors import flatten_tensors

__all__ = ["BackendType", "prepare_by_platform"]


def prepare_by_platform(
    model: nn.Module,
    backend: BackendType | BackendSpec | str = BackendType.TSQAT,
    prepare_custom_config_dict: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    custom_tracer: fx.Tracer | None = None,
    *,
    example_inputs: tuple[Any, ...] | Tensor | None = None,
    is_qat: bool = True,
) -> QuantGraphModule:
    """Insert fake-quant into a model by the rules of a deployment backend.

    The model itself is not touched: the result works on a copy in which shared modules and tied weights stay shared.
    Observers and fake-quant are off in the result, which computes what the model computes.

    Args:
        model: a float model.
        backend: a :class:`BackendType`, its name, or a :class:`~fxqat.custom_quantizer.spec.BackendSpec`.
        prepare_custom_config_dict: changes to the backend's choices; a dict or the path of a YAML file.
        custom_tracer: a ``torch.fx.Tracer`` to trace with.
        example_inputs: a tuple of the model's inputs; when given, the result is run on them once and compared with the
            model, in eval mode.
        is_qat: False prepares for calibration only: no scale is a trainable parameter.

    Returns:
        The prepared model in the mode of the given one; its ``quant_report`` says what was decided and why.

    Raises:
        ConfigError: an argument or configuration entry is wrong, or the model has nothing to quantize.
        TraceError: the model cannot be traced, or the traced model computes something else.

    Example:
        >>> gm = prepare_by_platform(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), "TSQAT")
        >>> [row.status for row in gm.quant_report]
        ['quantized', 'quantized']
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    spec = backend_spec(backend)
    config = parse_config(prepare_custom_config_dict)
    inputs = _as_tuple(example_inputs)
    root, gm = trace(model, custom_tracer, leaf_modules=config.leaf_module, concrete_args=config.concrete_args)
    names = _named_tensors(root)
    gm = fuse(standardize(gm, tuple(config.concrete_args or ())), fusions_without(config.unfused))
    quantizer = BackendQuantizer(spec if is_qat else _without_training(spec), config)
    quantizer.annotate(gm)
    report = build_report(gm, spec.name)
    if report.num_quantized == 0:
        raise ConfigError(
            f"{type(model).__name__}: nothing to quantize for {spec.name}. Every node is left float:\n{report}"
        )
    gm = insert(gm, config.bn_mode)
    result = make_quant_graph_module(gm)
    where = {id(tensor): name for name, tensor in reversed(_named_tensors(result))}
    unread = {name: tensor for name, tensor in names if id(tensor) not in where}
    result.provenance = Provenance(
        backend=spec.name,
        report=replace(report, unread=tuple(unread)),
        tensor_names={name: where[id(tensor)] for name, tensor in names if id(tensor) in where},
        unread=unread,
        preserved=config.preserve_attr,
    )
    _preserve(model, result, config.preserve_attr)
    if inputs is not None:
        _check_same_function(root, result, inputs, dict(config.concrete_args or {}))
    return result


def _as_tuple(example_inputs: tuple[Any, ...] | Tensor | None) -> tuple[Any, ...] | None:
    if example_inputs is None:
        return None
    if isinstance(example_inputs, Tensor):
        return (example_inputs,)
    if not isinstance(example_inputs, (tuple, list)) or not example_inputs:
        raise ConfigError(f"example_inputs must be a tensor or a non-empty tuple of inputs, got {example_inputs!r}")
    return tuple(example_inputs)


def _named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Every parameter and persistent buffer under every name it has in the state dict."""
    names = set(model.state_dict(keep_vars=True))
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return [(name, tensor) for name, tensor in tensors if name in names]


def _without_training(spec: BackendSpec) -> BackendSpec:
    parts: dict[str, Any] = {"fake_quantize": "Fixed", "fake_quantize_args": {}}
    return replace(spec, weight=replace(spec.weight, **parts), activation=replace(spec.activation, **parts))


def _preserve(model: nn.Module, result: nn.Module, names: tuple[str, ...]) -> None:
    for name in names:
        if not hasattr(model, name):
            raise ConfigError(f"preserve_attr: {type(model).__name__} has no attribute {name!r}")
        if inspect.ismethod(getattr(model, name)):
            raise ConfigError(f"preserve_attr: {name!r} is a method; it would go on working on the float model")
        if hasattr(result, name):
            raise ConfigError(f"preserve_attr: {name!r} is part of the prepared model already")
        setattr(result, name, copy.deepcopy(getattr(model, name)))


def _check_same_function(
    root: nn.Module, result: QuantGraphModule, inputs: tuple[Any, ...], concrete_args: dict[str, Any]
) -> None:
    """Run both once in eval mode and compare."""
    with torch.no_grad(), eval_mode(root), eval_mode(result):
        try:
            expected = flatten_tensors(root(*inputs, **concrete_args))
            actual = flatten_tensors(result(*inputs))
        except TypeError as cause:
            raise ConfigError(
                f"example_inputs do not fit the arguments of forward (less those in concrete_args): {cause}"
            ) from cause
    close = len(expected) == len(actual) and all(
        a.shape == b.shape and torch.allclose(a.float(), b.float(), rtol=1e-3, atol=1e-3 * _largest(a))
        for a, b in zip(expected, actual, strict=True)
    )
    if not close:
        raise TraceError(
            f"the traced {type(root).__name__} computes something else than the model on example_inputs: its forward "
            "takes another way for these inputs than it took while tracing. Fix the deciding argument with "
            "'concrete_args' or keep the module that decides whole with 'leaf_module'."
        )


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0

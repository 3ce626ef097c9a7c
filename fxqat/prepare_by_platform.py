"""The front door: a float model in, a model with a backend's fake-quant out."""

from __future__ import annotations

import copy
import inspect
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxqat.config.config import PrepareConfig, parse_config
from fxqat.config.part_checks import check_calibration_only
from fxqat.custom_quantizer.backend_type import BackendType, backend_spec
from fxqat.custom_quantizer.quantizer import BackendQuantizer
from fxqat.custom_quantizer.spec import BackendSpec
from fxqat.errors import ConfigError, TraceError
from fxqat.fake_quantize.fake_quantizes import not_learned
from fxqat.fuser_method_mappings import fusions_without
from fxqat.quantization.drop_unread import drop_unread
from fxqat.quantization.fuse import fuse
from fxqat.quantization.graph_module import Provenance, QuantGraphModule, SplitTensor, make_quant_graph_module
from fxqat.quantization.insert import insert
from fxqat.quantization.report import build_report
from fxqat.quantization.split_parameters import split_parameters
from fxqat.quantization.standardize import standardize
from fxqat.tracing.trace import trace
from fxqat.utils.contexts import buffers_kept, collector_paused, eval_mode, without_fast_path
from fxqat.utils.tensors import flatten_tensors, map_tensors

__all__ = ["BackendType", "prepare_by_platform"]


@collector_paused()
@without_fast_path()
def prepare_by_platform(
    model: nn.Module,
    backend: BackendType | BackendSpec | str = BackendType.TSQAT,
    prepare_custom_config_dict: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    custom_tracer: fx.Tracer | None = None,
    *,
    example_inputs: tuple[Any, ...] | Tensor | None = None,
    is_qat: bool = True,
    untraceable: str = "leaf",
) -> QuantGraphModule:
    """Insert fake-quant into a model by the rules of a deployment backend.

    The model itself is not touched: the result works on a copy in which shared modules and tied weights stay shared.
    Observers and fake-quant are off in the result, which computes what the model computes.

    Args:
        model: a float model.
        backend: a :class:`BackendType`, its name, or a :class:`~fxqat.custom_quantizer.spec.BackendSpec`.
        prepare_custom_config_dict: changes to the backend's choices; a dict or the path of a YAML file.
        custom_tracer: a ``torch.fx.Tracer`` to trace with.
        example_inputs: a tuple of the model's inputs (None for an optional one that is left out). When given, the
            model is traced with them, so that its Python code may look at sizes, lengths and types, and the result is
            compared with the model on them, in eval mode. Arguments of forward that they do not reach are fixed to
            their defaults.
        untraceable: ``"leaf"``: a module that cannot be traced stays whole and float, and is reported; ``"error"``: it
            is a :class:`~fxqat.errors.TraceError`.
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
    if untraceable not in ("leaf", "error"):
        raise ConfigError(f"untraceable must be 'leaf' or 'error', got {untraceable!r}")
    spec = backend_spec(backend)
    config = parse_config(prepare_custom_config_dict)
    inputs = _as_tuple(example_inputs)
    traced = trace(
        model,
        custom_tracer,
        leaf_modules=config.leaf_module,
        concrete_args=config.concrete_args,
        example_inputs=inputs,
        untraceable=untraceable,
    )
    expected = None if inputs is None else _float_outputs(traced.root, inputs, config)
    names = _named_tensors(traced.root)
    drop_unread(traced.gm.graph)
    parted = split_parameters(traced.gm)
    gm = fuse(standardize(traced.gm, traced.fixed), fusions_without(config.unfused))
    quantizer = BackendQuantizer(spec if is_qat else _without_training(spec), config)
    quantizer.annotate(gm)
    if not is_qat:
        check_calibration_only(gm)
    report = build_report(gm, spec.name)
    if report.num_quantized == 0:
        raise ConfigError(
            f"{type(model).__name__}: nothing to quantize for {spec.name}. Every node is left float:\n{report}"
        )
    gm = insert(gm, config.bn_mode)
    result = make_quant_graph_module(gm, gm.graph, type(gm).__name__)
    where = {id(tensor): name for name, tensor in reversed(_named_tensors(result))}
    whole = {key for key, it in parted.items() if all(id(part) in where for part in it.parts)}
    joined = {name: parted[id(tensor)] for name, tensor in names if id(tensor) in whole}
    unread = {name: tensor for name, tensor in names if id(tensor) not in where and name not in joined}
    result.provenance = Provenance(
        backend=spec.name,
        report=replace(
            report, unread=tuple(unread), forced=traced.forced, leaves=traced.leaves, eval_only=traced.eval_only
        ),
        tensor_names={name: where[id(tensor)] for name, tensor in names if id(tensor) in where},
        split_tensors={
            name: SplitTensor(tuple(where[id(part)] for part in it.parts), it.dim) for name, it in joined.items()
        },
        unread=unread,
        preserved=config.preserve_attr,
        config=quantizer.in_force,
    )
    _preserve(model, result, config.preserve_attr)
    if (
        inputs is not None
        and expected is not None
        and not _same_function(traced.root, result, inputs, expected, config)
    ):
        raise TraceError(
            f"the traced {type(model).__name__} computes something else than the model on example_inputs: its forward "
            "takes another way for these inputs than it took while tracing, or overwrites part of a tensor through a "
            "view. Fix the deciding argument with 'concrete_args' or keep the module that does it whole with "
            "'leaf_module'."
        )
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
    return spec.with_configs(not_learned, not_learned)


def _preserve(model: nn.Module, result: nn.Module, names: tuple[str, ...]) -> None:
    for name in names:
        if not hasattr(model, name):
            raise ConfigError(f"preserve_attr: {type(model).__name__} has no attribute {name!r}")
        if inspect.ismethod(getattr(model, name)):
            raise ConfigError(f"preserve_attr: {name!r} is a method; it would go on working on the float model")
        if hasattr(result, name):
            raise ConfigError(f"preserve_attr: {name!r} is part of the prepared model already")
        setattr(result, name, copy.deepcopy(getattr(model, name)))


def _float_outputs(root: nn.Module, inputs: tuple[Any, ...], config: PrepareConfig) -> list[Tensor]:
    """The float model's outputs in eval mode, before anything is changed."""
    with _undisturbed(root):
        return flatten_tensors(root(*copy.deepcopy(inputs), **dict(config.concrete_args or {})))


def _outputs(result: nn.Module, inputs: tuple[Any, ...]) -> list[Tensor]:
    """The prepared model's outputs in eval mode."""
    with _undisturbed(result):
        return flatten_tensors(result(*(value for value in copy.deepcopy(inputs) if value is not None)))


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Run a model in eval mode with the same random numbers each time; nothing of it changes."""
    with torch.no_grad(), buffers_kept(model), eval_mode(model), _same_noise():
        yield


def _same_function(
    root: nn.Module, result: nn.Module, inputs: tuple[Any, ...], expected: list[Tensor], config: PrepareConfig
) -> bool:
    """Whether the prepared model computes what the float model does.

    A deep model with random weights may magnify the rounding of a float32 sum without bound; then float64 decides.
    Where a model magnifies even the last digits of float64 inputs and weights, nothing can be compared.
    """
    if _are_close(expected, _outputs(result, inputs)):
        return True
    double = map_tensors(inputs, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
    try:
        model = copy.deepcopy(root).double()
        expected = _float_outputs(copy.deepcopy(model), double, config)
        if _are_close(expected, _outputs(copy.deepcopy(result).double(), double)):
            return True
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.copy_(_nudged(tensor))
        chaotic = not _are_close(expected, _float_outputs(model, map_tensors(double, _nudged), config))
    except Exception:  # noqa: BLE001  not every model runs in float64
        return False
    if chaotic:
        logging.getLogger("fxqat").warning(
            "%s: the traced model could not be compared with the model on example_inputs: the model's own outputs "
            "change with the last digit of its inputs and weights, in float64, too (random weights?)",
            type(root).__name__,
        )
    return chaotic


def _nudged(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    with _same_noise():
        return tensor * (1 + 2.0**-50 * torch.randn_like(tensor))


@contextmanager
def _same_noise() -> Iterator[None]:
    """Random numbers that are the same each time, and that nobody outside misses."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def _are_close(expected: list[Tensor], actual: list[Tensor]) -> bool:
    return len(expected) == len(actual) and all(_is_close(a, b) for a, b in zip(expected, actual, strict=True))


def _is_close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.is_meta or not a.numel():
        return a.shape == b.shape
    finite = torch.nan_to_num(a.float(), nan=0.0, posinf=0.0, neginf=0.0)
    return torch.allclose(a.float(), b.float(), rtol=1e-3, atol=1e-3 * float(finite.abs().max()), equal_nan=True)

"""Prepares a float model for training: traces it and inserts the fake-quant that a backend asks for."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, fx, nn

from fxqat.config.calibration_only import check_calibration_only
from fxqat.config.config import SIZE, PrepareConfig, parse_config
from fxqat.config.effective import describe_config
from fxqat.config.example_inputs import inputs_in_order, inputs_to_keep
from fxqat.config.model_checks import check_model
from fxqat.custom_quantizer.backend_type import BackendType, backend_spec
from fxqat.custom_quantizer.bare_recurrent import check_bare_recurrent
from fxqat.custom_quantizer.override_rules import is_split, recurrent_form
from fxqat.custom_quantizer.quantizer import BackendQuantizer
from fxqat.custom_quantizer.spec import BackendSpec
from fxqat.errors import ConfigError, FxqatError, tells_of_the_bundle
from fxqat.fake_quantize.fake_quantizes import not_learned
from fxqat.fuser_method_mappings import fusions_without
from fxqat.nn.qat import BN_FREEZE
from fxqat.quantization.drop_unread import drop_unread
from fxqat.quantization.fuse import check_left_out, fuse
from fxqat.quantization.graph_module import (
    QuantGraphModule,
    make_provenance,
    make_quant_graph_module,
    named_tensors,
)
from fxqat.quantization.insert import insert
from fxqat.quantization.left_out import LeftOut, take_left_out
from fxqat.quantization.report import QuantReport, build_report
from fxqat.quantization.sameness import SamenessError, check_now_or_at_first_call
from fxqat.quantization.split_ops import split_ops
from fxqat.quantization.split_parameters import split_parameters
from fxqat.quantization.split_recurrent import split_recurrent
from fxqat.quantization.standardize import standardize
from fxqat.quantization.train_method import modes_by_forward, modes_by_train, modes_in, modes_lost
from fxqat.tracing.trace import Traced, share_tensors, trace
from fxqat.utils.batches import in_their_places, to_device_of
from fxqat.utils.contexts import collector_paused, without_autocast, without_fast_path
from fxqat.utils.flags import check_flags
from fxqat.utils.fx_graph import has_attribute, set_attribute
from fxqat.utils.node_meta import FloatLeaf
from fxqat.utils.source import line_of_forward

__all__ = ["BackendType", "prepare_by_platform"]


@tells_of_the_bundle()
@collector_paused()
@without_fast_path()
@without_autocast()
def prepare_by_platform(
    model: nn.Module,
    backend: BackendType | BackendSpec | str = BackendType.TSQAT,
    prepare_custom_config_dict: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    custom_tracer: fx.Tracer | None = None,
    *,
    example_inputs: tuple[Any, ...] | Mapping[str, Any] | Tensor | None = None,
    is_qat: bool = True,
    untraceable: str = "leaf",
    check: str = "full",
) -> QuantGraphModule:
    """Insert fake-quant into a copy of a model, by the rules of a deployment backend.

    The model itself is not changed; modules and weights that it shares stay shared in the copy. Observers and
    fake-quant are off in the result: it computes what the model computes.

    Args:
        model: a float model.
        backend: a :class:`BackendType`, its name, or a :class:`~fxqat.custom_quantizer.spec.BackendSpec`.
        prepare_custom_config_dict: changes to the backend's choices; a dict or the path of a YAML file.
        custom_tracer: a ``torch.fx.Tracer`` to trace with.
        example_inputs: a tuple of the model's inputs (None for an optional one that is left out), or a dict of them by
            name. With them the Python code of the model may look at sizes, lengths and types while it is traced.
            Arguments of forward that they leave out are fixed to their defaults. They are moved to the model's device.
            The prepared model keeps a copy on the CPU: exports take it if none are given.
        is_qat: False prepares for calibration only: no scale is a trainable parameter.
        untraceable: ``"leaf"``: a module that cannot be traced is kept whole, stays float and is reported;
            ``"error"``: it raises :class:`~fxqat.errors.TraceError`.
        check: how the result is compared with the model (``fxqat.quantization.sameness``). ``"full"``: on the example
            inputs, on other values, on another size, and in training with the gradients of all parameters;
            ``"quick"``: on the example inputs in eval mode; ``"off"``: not at all. Without example inputs, it is
            compared on the first inputs that it gets, such as the first batch of calibration.

    Returns:
        The prepared model, in the mode (train or eval) of the given one; its ``quant_report`` says what was decided and
        why.

    Raises:
        ConfigError: an argument or configuration entry is wrong, or the model has nothing to quantize.
        TraceError: the model cannot be traced, or the traced model computes something else.

    Example:
        >>> gm = prepare_by_platform(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), "TSQAT")
        >>> [row.status for row in gm.quant_report]
        ['quantized', 'quantized']
    """
    check_flags(ConfigError, "prepare_by_platform", is_qat=is_qat)
    check_model(model, example_inputs)
    _check_choices(untraceable, check)
    spec = backend_spec(backend) if is_qat else backend_spec(backend).with_configs(not_learned, not_learned)
    check_bare_recurrent(model, spec)
    config = parse_config(prepare_custom_config_dict)
    inputs, left_out = inputs_in_order(model, example_inputs, config.concrete_args)
    inputs = None if inputs is None else to_device_of(model, inputs)

    def prepare(leaves: Mapping[str, FloatLeaf]) -> QuantGraphModule:
        traced = trace(
            model,
            custom_tracer,
            leaf_modules=(*config.leaf_module, *leaves),
            concrete_args={**(config.concrete_args or {}), **left_out},
            example_inputs=inputs,
            untraceable=untraceable,
        )
        return _prepare(model, traced, tuple(leaves.values()), spec, config, inputs, is_qat, check)

    try:
        return prepare({})
    except SamenessError as failure:
        if untraceable == "error" or custom_tracer is not None:
            raise
        return _prepare_with_leaves(model, prepare, failure)


def _prepare(
    model: nn.Module,
    traced: Traced,
    leaves: tuple[FloatLeaf, ...],
    spec: BackendSpec,
    config: PrepareConfig,
    inputs: tuple[Any, ...] | None,
    is_qat: bool,
    check: str,
) -> QuantGraphModule:
    """Insert fake-quant into a traced model, and compare the result with the model."""
    arguments = None if inputs is None else in_their_places(traced.root, inputs, traced.concrete_args)
    by_train, by_forward = modes_by_train(traced.root), modes_by_forward(traced.root, arguments)
    modes = {mode: (*by_train.get(mode, ()), *by_forward.get(mode, ())) for mode in {*by_train, *by_forward}}
    remarks = traced.remarks | {
        "leaves": (*traced.leaves, *leaves),
        "state_changes": (*traced.state_changes, *modes_lost(traced.gm, traced.root, modes)),
    }
    float_model = None if check == "off" else share_tensors(traced.root)
    float_tensors = named_tensors(traced.root)
    drop_unread(traced.gm.graph)
    split = split_parameters(traced.gm)
    gm = split_ops(standardize(traced.gm, traced.fixed), partial(is_split, spec, config))
    steps = split_recurrent(gm, partial(recurrent_form, spec, config))
    remarks["forced"] = (*remarks.get("forced", ()), *steps)
    check_left_out(gm, config.unfused)
    gm = fuse(gm, fusions_without(config.unfused))
    applied = BackendQuantizer(spec, config).annotate(gm)
    report = build_report(gm, spec.name, for_size=config.optimize_for == SIZE, **remarks)
    effective = describe_config(gm, applied)
    _check_decisions(gm, report, type(model).__name__, is_qat)
    gm = insert(gm, config.bn_mode)
    prepared = make_quant_graph_module(gm, gm.graph, type(gm).__name__)
    prepared.provenance = make_provenance(
        prepared, report, effective, float_tensors, split, config.preserve_attr, spec.runtime
    )
    prepared.provenance.modes = modes_in(prepared, traced.root, modes)
    prepared.provenance.example_inputs = inputs_to_keep(inputs)
    prepared.provenance.left_out = LeftOut.of(model, traced.values)
    if prepared.provenance.left_out.values:
        prepared.register_forward_pre_hook(take_left_out, with_kwargs=True)
    _preserve(model, prepared, config.preserve_attr)
    if float_model is not None:
        trains = is_qat and config.bn_mode not in (BN_FREEZE, 0) and not traced.eval_only
        modes_inside = modes_in(prepared, traced.root, by_forward)
        check_now_or_at_first_call(prepared, float_model, inputs, traced.concrete_args, check, trains, modes_inside)
    return prepared


def _prepare_with_leaves(
    model: nn.Module, prepare: Callable[[Mapping[str, FloatLeaf]], QuantGraphModule], failure: SamenessError
) -> QuantGraphModule:
    """Prepare again, with the module kept whole in which the prepared model differs, or else the one around it.

    Args:
        model: the user's model.
        prepare: prepares it with given leaves.
        failure: how the prepared model without them differs; raised if no leaf helps.
    """
    leaves: dict[str, FloatLeaf] = {}
    error = failure
    while True:
        path = error.path or ""
        while path and (path in leaves or _is_of_torch(model.get_submodule(path))):
            path = path.rpartition(".")[0]
        if not path:
            raise failure
        leaves = {name: leaf for name, leaf in leaves.items() if not name.startswith(f"{path}.")}
        reason = f"in the graph it computes something else than the model {error.where}"
        leaves[path] = FloatLeaf(path, reason, line_of_forward(model.get_submodule(path)))
        try:
            return prepare(leaves)
        except SamenessError as another:
            error = another
        except FxqatError:
            raise failure from None


def _is_of_torch(module: nn.Module) -> bool:
    """Whether a module and all in it are torch's."""
    return all(type(part).__module__.partition(".")[0] == "torch" for part in module.modules())


def _check_choices(untraceable: str, check: str) -> None:
    if untraceable not in ("leaf", "error"):
        raise ConfigError(f"untraceable must be 'leaf' or 'error', got {untraceable!r}")
    if check not in ("full", "quick", "off"):
        raise ConfigError(f"check must be 'full', 'quick' or 'off', got {check!r}")


def _check_decisions(gm: fx.GraphModule, report: QuantReport, name: str, is_qat: bool) -> None:
    """Check that something is quantized, and for calibration only that nothing is learned."""
    if not is_qat:
        check_calibration_only(gm)
    if report.num_quantized == 0:
        raise ConfigError(f"{name}: nothing to quantize for {report.backend}. Every node is left float:\n{report}")


def _preserve(model: nn.Module, prepared: nn.Module, paths: tuple[str, ...]) -> None:
    """Copy attributes of the model and of modules in it."""
    for path in paths:
        owner, _, name = path.rpartition(".")
        try:
            module = model.get_submodule(owner)
        except AttributeError:
            raise ConfigError(f"preserve_attr: the model has no module {owner!r}") from None
        if not hasattr(module, name):
            raise ConfigError(f"preserve_attr: {owner or type(model).__name__} has no attribute {name!r}")
        value = getattr(module, name)
        if inspect.ismethod(value):
            raise ConfigError(f"preserve_attr: {path!r} is a method; it would still work on the float model")
        if has_attribute(prepared, path):
            raise ConfigError(f"preserve_attr: {path!r} is already part of the prepared model")
        set_attribute(prepared, path, copy.deepcopy(value))

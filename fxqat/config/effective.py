"""The effective configuration of a prepared model: every decision as an override that can be edited and read back."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator
from typing import Any

from torch import fx, nn

from fxqat.config.config import LATENCY, STATIC, PrepareConfig
from fxqat.config.overrides import Match, Override
from fxqat.config.tensor_entry import write_change, write_config
from fxqat.config.yaml_file import write_yaml
from fxqat.errors import ConfigError
from fxqat.nn.qat import BN_TRAIN
from fxqat.quantization.annotation import annotation_of
from fxqat.quantization.graph_module import QuantGraphModule
from fxqat.utils.torch_compat import operator_name

HEADER = """Effective configuration of a model prepared for {backend}: read back, it prepares the model the same way.
Edit an override to change one tensor. 'weight' is the weight of a layer, 'value' the value that a node produces,
for all nodes that read it quantized and all values that share its scale (see the groups of quant_report)."""


def effective_config(gm: nn.Module, path: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """How every tensor of a prepared model is quantized, as a ``prepare_custom_config_dict``.

    Preparing the float model with it, for the same backend, gives the same model. Its ``overrides`` are those of the
    user that decide what is quantized at all, then one for each quantized weight, by module path, and one for each
    quantizer of values, by the first node of its group.

    Args:
        gm: a model as ``prepare_by_platform`` returns it.
        path: a YAML file to write it to as well.

    Returns:
        A copy, which may be changed.

    Raises:
        ConfigError: gm is not a prepared model, or it holds something that YAML cannot express, such as a class.

    Example:
        >>> from fxqat import prepare_by_platform
        >>> gm = prepare_by_platform(nn.Sequential(nn.Linear(4, 2)), "ONNXRuntime")
        >>> [rule["match"] for rule in effective_config(gm)["overrides"]]
        [{'node': 'input_1'}, {'module': '0'}]
    """
    if not isinstance(gm, QuantGraphModule):
        raise ConfigError(f"effective_config needs a model of prepare_by_platform, got {type(gm).__name__}")
    config: dict[str, Any] = copy.deepcopy(gm.provenance.config)
    if path is not None:
        write_yaml(config, path, HEADER.format(backend=gm.provenance.backend))
    return config


def describe_config(gm: fx.GraphModule, applied: PrepareConfig) -> dict[str, Any]:
    """The dict of :func:`effective_config` for an annotated graph.

    Args:
        gm: annotated.
        applied: the configuration as it was applied, see
            :meth:`~fxqat.custom_quantizer.quantizer.BackendQuantizer.annotate`.
    """
    quantizer: dict[str, Any] = {} if applied.least_work is None else {"least_work": applied.least_work}
    for match in (*applied.additional, *applied.exclude):
        quantizer.setdefault(match.where, []).extend(_match_entry(match).values())
    fuse = {"exclude_fusion_pattern": [list(pattern) for pattern in sorted(applied.unfused)]} if applied.unfused else {}
    entries = {
        "extra_quantizer_dict": quantizer,
        "extra_fuse_dict": fuse,
        "preserve_attr": list(applied.preserve_attr),
        "concrete_args": dict(applied.concrete_args or {}),
        "leaf_module": list(applied.leaf_module),
    }
    found: dict[str, Any] = {key: value for key, value in entries.items() if value}
    if applied.bn_mode != BN_TRAIN:
        found["bn_mode"] = applied.bn_mode
    if applied.optimize_for != LATENCY:
        found["optimize_for"] = applied.optimize_for
    if applied.activations != STATIC:
        found["activation"] = applied.activations
    found["overrides"] = [*_placement(applied.overrides), *_tensors(gm)]
    return found


def _placement(overrides: Iterable[Override]) -> Iterator[dict[str, Any]]:
    """The overrides that decide what is quantized; those for each tensor say how."""
    for override in overrides:
        changes = {
            tensor: None if change is None else write_change(change)
            for tensor, change in override.changes.items()
            if change is None or tensor in ("activation", "output")
        }
        form: dict[str, Any] = {} if override.recurrent is None else {"recurrent": override.recurrent}
        if override.split:
            form["split"] = True
        if changes or form:
            yield {"match": _match_entry(override.match), **form, **changes}


def _tensors(gm: fx.GraphModule) -> Iterator[dict[str, Any]]:
    weights: set[str] = set()
    groups: set[int] = set()
    for node in gm.graph.nodes:
        found = annotation_of(node)
        if found is not None and found.weight is not None and str(node.target) not in weights:
            weights.add(str(node.target))
            yield {"match": {"module": str(node.target)}, "weight": write_config(found.weight)}
        value = found.value if found is not None else None
        if value is not None and value.group not in groups and not value.on_grid:
            groups.add(value.group)
            yield {"match": {"node": node.name}, "value": write_config(value.config)}


def _match_entry(match: Match) -> dict[str, Any]:
    """A match as YAML can express it."""
    given = {key: getattr(match, key) for key in ("module", "type", "function", "node")}
    given = {key: value for key, value in given.items() if value is not None}
    return {key: operator_name(value) or getattr(value, "__name__", value) for key, value in given.items()}

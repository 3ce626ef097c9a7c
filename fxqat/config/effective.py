"""The effective configuration of a prepared model: every decision as a rule that can be edited and read back."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator
from typing import Any

from torch import fx, nn

from fxqat.config.config import PrepareConfig
from fxqat.config.overrides import Match, OverrideRule
from fxqat.config.tensor_entry import change_entry, config_entry
from fxqat.config.yaml_file import write_yaml
from fxqat.errors import ConfigError
from fxqat.nn.qat import BN_TRAIN
from fxqat.quantization.annotation import annotation_of
from fxqat.quantization.graph_module import QuantGraphModule

HEADER = """Effective configuration of a model prepared for {backend}: read back, it prepares the model the same way.
Edit a rule to change one tensor. 'weight' is the weight of a layer, 'value' the value that a node produces,
for all that read it quantized and all that have one scale with it (see the groups of quant_report)."""


def effective_config(gm: nn.Module, path: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """How every tensor of a prepared model is quantized, as a ``prepare_custom_config_dict``.

    Preparing the float model with it, for the same backend, gives the same model. Its ``overrides`` are the user's
    own rules as far as they decide what is quantized at all, then one rule for each quantized weight, by module path,
    and one for each quantizer of values, by the node that comes first in it.

    Args:
        gm: a model as ``prepare_by_platform`` returns it.
        path: a YAML file to write it to as well.

    Returns:
        A dict of its own, which may be changed.

    Raises:
        ConfigError: gm is not a prepared model, or YAML has no word for something in it (a class, say).

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


def config_in_force(gm: fx.GraphModule, config: PrepareConfig, rules: Iterable[OverrideRule]) -> dict[str, Any]:
    """The dict of :func:`effective_config` for an annotated graph.

    Args:
        gm: annotated.
        config: what the user gave.
        rules: the user's rules as they were applied.
    """
    quantizer: dict[str, Any] = {} if config.least_work is None else {"least_work": config.least_work}
    for match in (*config.additional, *config.exclude):
        quantizer.setdefault(match.where, []).extend(_match_entry(match).values())
    entries = {
        "extra_quantizer_dict": quantizer,
        "extra_fuse_dict": {"exclude_fusion_pattern": [list(pattern) for pattern in sorted(config.unfused)]},
        "preserve_attr": list(config.preserve_attr),
        "concrete_args": dict(config.concrete_args or {}),
        "leaf_module": list(config.leaf_module),
    }
    if not config.unfused:
        del entries["extra_fuse_dict"]
    found: dict[str, Any] = {key: value for key, value in entries.items() if value}
    if config.bn_mode != BN_TRAIN:
        found["bn_mode"] = config.bn_mode
    found["overrides"] = [*_placing(rules), *_tensors(gm)]
    return found


def _placing(rules: Iterable[OverrideRule]) -> Iterator[dict[str, Any]]:
    """The rules that decide what is quantized; how a weight or value is, the rules for each tensor say."""
    for rule in rules:
        changes = {
            part: None if change is None else change_entry(change)
            for part, change in rule.changes.items()
            if change is None or part in ("activation", "output")
        }
        if changes:
            yield {"match": _match_entry(rule.match), **changes}


def _tensors(gm: fx.GraphModule) -> Iterator[dict[str, Any]]:
    weights: set[str] = set()
    groups: set[int] = set()
    for node in gm.graph.nodes:
        found = annotation_of(node)
        if found is not None and found.weight is not None and str(node.target) not in weights:
            weights.add(str(node.target))
            yield {"match": {"module": str(node.target)}, "weight": config_entry(found.weight)}
        value = found.value if found is not None else None
        if value is not None and value.group not in groups and not value.on_grid:
            groups.add(value.group)
            yield {"match": {"node": node.name}, "value": config_entry(value.config)}


def _match_entry(match: Match) -> dict[str, Any]:
    """A match in words that YAML has, too."""
    given = {key: getattr(match, key) for key in ("module", "type", "function", "node")}
    return {key: getattr(value, "__name__", value) for key, value in given.items() if value is not None}

"""Reads ``prepare_custom_config_dict``: checks it once and turns it into plain frozen values."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import fx

from fxqat.config.checks import mapping, sequence
from fxqat.config.overrides import LIST_NAMES, LISTS, TENSORS, Match, Override, TensorChange
from fxqat.config.tensor_entry import DYNAMIC, SCHEME_SPELLINGS, read_change
from fxqat.config.yaml_file import read_yaml
from fxqat.errors import ConfigError
from fxqat.fuser_method_mappings import FUSIONS
from fxqat.nn.qat import BN_FREEZE, BN_TRAIN
from fxqat.nn.recurrent import UNROLLED
from fxqat.scheme import QConfig
from fxqat.utils.nearest_name import nearest

TOP_KEYS = (
    "extra_qconfig_dict",
    "extra_quantizer_dict",
    "extra_fuse_dict",
    "preserve_attr",
    "concrete_args",
    "leaf_module",
    "bn_mode",
    "optimize_for",
    "activation",
    "first_last",
    "first",
    "last",
    "overrides",
)
QCONFIG_SUFFIXES = ("observer", "fakequantize", "fakeq_params", "observer_extra_args", "qscheme")
QCONFIG_KEYS = tuple(f"{letter}_{suffix}" for letter in "wa" for suffix in QCONFIG_SUFFIXES)
QUANTIZER_KEYS = (*LISTS, "least_work")
MATCH_KINDS: dict[str, tuple[tuple[Any, ...], str]] = {
    "module": ((str,), "a module path or pattern"),
    "type": ((type, str), "a module type or its class name"),
    "function": ((Callable, str), "a function or its name"),
    "node": ((str,), "a node name or pattern"),
}
LATENCY, SIZE = "latency", "size"
"""What ``optimize_for`` can be."""
RECURRENT = "recurrent"
"""The key of an override that chooses the form of a recurrent layer; only ``UNROLLED`` can be chosen."""
SPLIT = "split"
"""The key of an override that has an op computed by several; only true can be chosen."""
STATIC, FLOAT = "static", "float"
"""What ``activation`` of the whole model can be, beside ``"dynamic"``."""
FIRST_LAST = ("first_last", "first", "last")
"""Shorthands for the layers next to the inputs and outputs of the model, in the order in which they are applied."""


@dataclass(frozen=True)
class PrepareConfig:
    """The user's configuration, checked.

    Args:
        weight: change to the backend's weight configuration.
        activation: change to the backend's activation configuration.
        additional: nodes to quantize although the backend's table leaves them float.
        exclude: nodes to leave float although the table quantizes them.
        least_work: instead of the backend's, see :class:`~fxqat.custom_quantizer.spec.BackendSpec`; None keeps it.
        first_last: per key of ``FIRST_LAST`` the changes to the first and last weighted layers.
        overrides: changes to single layers or nodes, later wins; applied after ``first_last``.
        unfused: patterns of the fusion table that are not applied.
        preserve_attr: dotted paths of the attributes of the model to carry over to the result.
        concrete_args: arguments of forward fixed while tracing.
        leaf_module: module types or paths that are not traced into.
        bn_mode: see :class:`~fxqat.nn.qat.QATLayer`.
        optimize_for: ``"size"``: layers that the backend computes in float store their weights as integers all the
            same; ``"latency"``: they stay float.
        activations: ``"static"``: activations have scales in the file; ``"dynamic"``: layers quantize what they read
            at run time; ``"float"``: only weights are integers.
    """

    weight: TensorChange = field(default_factory=TensorChange)
    activation: TensorChange = field(default_factory=TensorChange)
    additional: tuple[Match, ...] = ()
    exclude: tuple[Match, ...] = ()
    least_work: int | None = None
    first_last: Mapping[str, Mapping[str, TensorChange | None]] = field(default_factory=dict)
    overrides: tuple[Override, ...] = ()
    unfused: frozenset[tuple[str, ...]] = frozenset()
    preserve_attr: tuple[str, ...] = ()
    concrete_args: Mapping[str, Any] | None = None
    leaf_module: tuple[Any, ...] = ()
    bn_mode: str | int = BN_TRAIN
    optimize_for: str = LATENCY
    activations: str = STATIC

    def asks_dynamic(self, node: fx.Node) -> bool:
        """Whether the layer of a node is to quantize what it reads at run time."""
        asking = [override.match for override in self.overrides if override.is_dynamic]
        return self.activations == DYNAMIC or any(match(node) for match in asking)


def parse_config(config: Mapping[str, Any] | str | os.PathLike[str] | None) -> PrepareConfig:
    """Check a configuration.

    Args:
        config: a dict or EasyDict, the path of a YAML file, or None.

    Raises:
        ConfigError: the file cannot be read, a key is unknown (the nearest valid one is named), or a value has the
            wrong form.
    """
    if config is None:
        return PrepareConfig()
    where = "prepare_custom_config_dict"
    if isinstance(config, (str, os.PathLike)):
        where = str(config)
        config = read_yaml(Path(config))
    config = mapping(config, where, TOP_KEYS)
    qconfig = mapping(config.get("extra_qconfig_dict"), "extra_qconfig_dict", QCONFIG_KEYS)
    quantizer = mapping(config.get("extra_quantizer_dict"), "extra_quantizer_dict", QUANTIZER_KEYS)
    overrides = sequence(config.get("overrides"), "overrides")
    return PrepareConfig(
        weight=_qconfig_change(qconfig, "w"),
        activation=_qconfig_change(qconfig, "a"),
        additional=_matches(quantizer, "additional"),
        exclude=_matches(quantizer, "exclude"),
        least_work=_least_work(quantizer.get("least_work")),
        first_last={key: _changes(config[key], key) for key in FIRST_LAST if config.get(key) is not None},
        overrides=tuple(_override(f"overrides[{index}]", entry) for index, entry in enumerate(overrides)),
        unfused=_unfused(config.get("extra_fuse_dict")),
        preserve_attr=_preserve_attr(config.get("preserve_attr")),
        concrete_args=mapping(config.get("concrete_args"), "concrete_args") or None,
        leaf_module=tuple(sequence(config.get("leaf_module"), "leaf_module")),
        bn_mode=_bn_mode(config.get("bn_mode", BN_TRAIN)),
        optimize_for=_optimize_for(config.get("optimize_for")),
        activations=_activations(config.get("activation")),
    )


def _qconfig_change(qconfig: Mapping[str, Any], letter: str) -> TensorChange:
    entry: dict[str, Any] = dict(mapping(qconfig.get(f"{letter}_qscheme"), f"{letter}_qscheme", SCHEME_SPELLINGS))
    for suffix in ("observer", "fakequantize", "fakeq_params", "observer_extra_args"):
        if qconfig.get(f"{letter}_{suffix}") is not None:
            entry[suffix] = qconfig[f"{letter}_{suffix}"]
    where = f"extra_qconfig_dict ({letter}_*)"
    return read_change(entry, where, {"w": "weight", "a": "activation"}[letter])


def _matches(quantizer: Mapping[str, Any], prefix: str) -> tuple[Match, ...]:
    found = []
    for kind in ("function", "type", "node", "module"):
        key = f"{prefix}_{LIST_NAMES[kind]}"
        if key in LISTS:
            values = sequence(quantizer.get(key), key, *MATCH_KINDS[kind][0], words=MATCH_KINDS[kind][1])
            found += [Match(**{kind: value}, where=key) for value in values]
    return tuple(found)


def _least_work(value: Any) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    raise ConfigError(
        f"extra_quantizer_dict: least_work must be a number of multiply-accumulates for each converted value, an "
        f"integer >= 0 (0 quantizes every layer that the backend can), got {value!r}"
    )


def _override(where: str, entry: Any) -> Override:
    if callable(entry):
        return Override(Match(where=where), function=_checked(entry, where))
    if not isinstance(entry, Mapping):
        raise ConfigError(
            f"{where}: expected a mapping, or (not in YAML) a function of a path and a QConfig; got {entry!r}"
        )
    mapping(entry, where, ("match", RECURRENT, SPLIT, *TENSORS))
    match = mapping(entry.get("match"), f"{where}.match", MATCH_KINDS)
    if not match:
        raise ConfigError(f"{where}: needs a 'match' with at least one of {', '.join(MATCH_KINDS)}")
    for key, value in match.items():
        kinds, words = MATCH_KINDS[key]
        if not isinstance(value, kinds):
            raise ConfigError(f"{where}.match: {key} must be {words}, got {value!r}")
    form = entry.get(RECURRENT)
    if RECURRENT in entry and form != UNROLLED:
        raise ConfigError(f"{where}.{RECURRENT} must be {UNROLLED!r}, got {form!r}")
    split = entry.get(SPLIT, False)
    if SPLIT in entry and split is not True:
        raise ConfigError(f"{where}.{SPLIT} must be true, got {split!r}")
    given = {tensor: entry[tensor] for tensor in entry if tensor in TENSORS}
    changes = {} if (form or split) and not given else _changes(given, where)
    return Override(Match(**match, where=where), changes, recurrent=form, split=split)


def _changes(entry: Any, where: str) -> dict[str, TensorChange | None]:
    """The changes to one layer: at least one, and none of them empty."""
    mapping(entry, where, TENSORS)
    if not entry:
        raise ConfigError(f"{where}: says nothing; give at least one of {', '.join(TENSORS)}")
    changes: dict[str, TensorChange | None] = {}
    for tensor, change in entry.items():
        if change is None and tensor == "value":
            raise ConfigError(f"{where}.value: None would leave it float; write output: None for that")
        changes[tensor] = None if change is None else read_change(change, f"{where}.{tensor}", tensor)
        if change is not None and not change:
            raise ConfigError(f"{where}.{tensor}: says nothing; give at least one change, or null to leave it float")
    return changes


def _checked(function: Callable[[str, QConfig], Any], where: str) -> Callable[[str, QConfig], dict[str, Any]]:
    """The user's function, with its answers checked like any other entry."""

    def changes(path: str, current: QConfig) -> dict[str, TensorChange | None]:
        answer = function(path, current)
        return {} if answer is None else _changes(answer, f"{where}({path!r})")

    return changes


def _unfused(value: Any) -> frozenset[tuple[str, ...]]:
    value = mapping(value, "extra_fuse_dict", ("exclude_fusion_pattern",))
    words = "a list of op names"
    given = sequence(value.get("exclude_fusion_pattern"), "exclude_fusion_pattern", list, tuple, words=words)
    patterns = frozenset(tuple(map(str, pattern)) for pattern in given)
    known = {row.pattern for row in FUSIONS}
    for pattern in sorted(patterns - known):
        choices = sorted(" ".join(row) for row in known)
        raise ConfigError(f"exclude_fusion_pattern: no fusion {list(pattern)}; {nearest(' '.join(pattern), choices)}")
    return patterns


def _preserve_attr(value: Any) -> tuple[str, ...]:
    """The attributes by their dotted paths."""
    by_module = value if isinstance(value, Mapping) else {"": value}
    found: list[str] = []
    for path, names in by_module.items():
        names = sequence(names, "preserve_attr", str, words="names of attributes")
        found += [f"{path}.{name}" if path else name for name in names]
    return tuple(found)


def _bn_mode(value: Any) -> str | int:
    if value in (BN_TRAIN, BN_FREEZE) or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value  # type: ignore[no-any-return]
    raise ConfigError(f"bn_mode must be {BN_TRAIN!r}, {BN_FREEZE!r} or a number of steps >= 0, got {value!r}")


def _optimize_for(value: Any) -> str:
    if value is None or value in (LATENCY, SIZE):
        return value or LATENCY
    raise ConfigError(f"optimize_for must be {LATENCY!r} or {SIZE!r}, got {value!r}")


def _activations(value: Any) -> str:
    if value is None or value in (STATIC, DYNAMIC, FLOAT):
        return value or STATIC
    raise ConfigError(
        f"activation must be {STATIC!r} (scales in the file), {DYNAMIC!r} (quantized at run time) or {FLOAT!r} (only "
        f"weights are integers), got {value!r}. How activations are quantized is extra_qconfig_dict's a_* entries."
    )

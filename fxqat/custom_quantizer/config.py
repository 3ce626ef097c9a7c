"""``prepare_custom_config_dict``: checked at the door, then plain frozen values."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from fxqat.custom_quantizer.overrides import Match, OverrideRule, TensorChange
from fxqat.custom_quantizer.spec import BackendSpec
from fxqat.errors import ConfigError
from fxqat.fake_quantize.table import ALIASES as FAKE_QUANTIZE_ALIASES
from fxqat.fuser_method_mappings import FUSIONS
from fxqat.nn.qat import BN_FREEZE, BN_TRAIN
from fxqat.observer.table import ALIASES as OBSERVER_ALIASES
from fxqat.scheme import FLOAT32_BITS

TOP_KEYS = (
    "extra_qconfig_dict",
    "extra_quantizer_dict",
    "extra_fuse_dict",
    "preserve_attr",
    "concrete_args",
    "leaf_module",
    "bn_mode",
    "overrides",
)
QCONFIG_PARTS = ("observer", "fakequantize", "fakeq_params", "observer_extra_args", "qscheme")
QCONFIG_KEYS = tuple(f"{letter}_{part}" for letter in "wa" for part in QCONFIG_PARTS)
QUANTIZER_KEYS = (
    "additional_function_type",
    "additional_module_type",
    "additional_node_name",
    "exclude_module_name",
    "exclude_function_type",
    "exclude_node_name",
)
SCHEME_SPELLINGS = {
    "bit": "bit_width",
    "bit_width": "bit_width",
    "symmetry": "symmetric",
    "symmetric": "symmetric",
    "signed": "signed",
    "per_channel": "per_channel",
    "narrow_range": "narrow_range",
    "scale_bits": "scale_bits",
    "pot_scale": "scale_bits",
}
PART_SPELLINGS = {
    "observer": "observer",
    "observer_args": "observer_args",
    "observer_extra_args": "observer_args",
    "fake_quantize": "fake_quantize",
    "fakequantize": "fake_quantize",
    "fake_quantize_args": "fake_quantize_args",
    "fakeq_params": "fake_quantize_args",
}

ALIASES = {"observer": OBSERVER_ALIASES, "fake_quantize": FAKE_QUANTIZE_ALIASES}
"""What other libraries call our parts."""


@dataclass(frozen=True)
class PrepareConfig:
    """The user's configuration, checked.

    Args:
        weight: change to the backend's weight configuration.
        activation: change to the backend's activation configuration.
        additional: matches of what is quantized although the backend's table leaves it float.
        exclude: matches of what stays float although the table quantizes it.
        overrides: per-layer rules, later wins.
        unfused: patterns of the fusion table that are not applied.
        preserve_attr: attributes of the model to carry over to the result.
        concrete_args: arguments of forward fixed while tracing.
        leaf_module: module types or paths that are not traced into.
        bn_mode: see :class:`~fxqat.nn.qat.QATLayer`.
    """

    weight: TensorChange = field(default_factory=TensorChange)
    activation: TensorChange = field(default_factory=TensorChange)
    additional: tuple[Match, ...] = ()
    exclude: tuple[Match, ...] = ()
    overrides: tuple[OverrideRule, ...] = ()
    unfused: frozenset[tuple[str, ...]] = frozenset()
    preserve_attr: tuple[str, ...] = ()
    concrete_args: Mapping[str, Any] | None = None
    leaf_module: tuple[Any, ...] = ()
    bn_mode: str | int = BN_TRAIN

    def applied_to(self, spec: BackendSpec) -> BackendSpec:
        """The backend with the user's weight and activation configuration."""
        return spec.with_configs(self.weight.applied_to, self.activation.applied_to)


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
        config = _read_yaml(Path(config))
    config = _mapping(config, where, TOP_KEYS)
    qconfig = _mapping(config.get("extra_qconfig_dict"), "extra_qconfig_dict", QCONFIG_KEYS)
    quantizer = _mapping(config.get("extra_quantizer_dict"), "extra_quantizer_dict", QUANTIZER_KEYS)
    additional, exclude = _matches(quantizer, "additional"), _matches(quantizer, "exclude")
    return PrepareConfig(
        weight=_qconfig_change(qconfig, "w"),
        activation=_qconfig_change(qconfig, "a"),
        additional=additional,
        exclude=exclude,
        overrides=tuple(_override(i, rule) for i, rule in enumerate(_sequence(config.get("overrides"), "overrides"))),
        unfused=_unfused(config.get("extra_fuse_dict")),
        preserve_attr=_preserve_attr(config.get("preserve_attr")),
        concrete_args=_mapping(config.get("concrete_args"), "concrete_args") or None,
        leaf_module=tuple(_sequence(config.get("leaf_module"), "leaf_module")),
        bn_mode=_bn_mode(config.get("bn_mode", BN_TRAIN)),
    )


def _read_yaml(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as cause:
        raise ConfigError(f"prepare_custom_config_dict: cannot read {path}: {cause.strerror}") from cause
    except yaml.YAMLError as cause:
        raise ConfigError(f"prepare_custom_config_dict: {path} is not YAML: {cause}") from cause


def _mapping(value: Any, where: str, keys: Iterable[str] | None = None) -> Mapping[str, Any]:
    """A mapping whose keys are all known."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: expected a mapping, got {type(value).__name__}")
    if keys is not None:
        known = tuple(keys)
        for key in value:
            if key not in known:
                close = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)
                raise ConfigError(f"{where}: unknown key {key!r}; did you mean {close[0]!r}? Known: {', '.join(known)}")
    return value


def _sequence(value: Any, where: str) -> Sequence[Any]:
    if value is None:
        return ()
    if isinstance(value, (str, Mapping)) or not isinstance(value, (Sequence, set, frozenset)):
        raise ConfigError(f"{where}: expected a list, got {value!r}")
    return list(value)


def _qconfig_change(qconfig: Mapping[str, Any], letter: str) -> TensorChange:
    entry: dict[str, Any] = dict(_mapping(qconfig.get(f"{letter}_qscheme"), f"{letter}_qscheme", SCHEME_SPELLINGS))
    for part in ("observer", "fakequantize", "fakeq_params", "observer_extra_args"):
        if qconfig.get(f"{letter}_{part}") is not None:
            entry[part] = qconfig[f"{letter}_{part}"]
    return _tensor_change(entry, f"extra_qconfig_dict ({letter}_*)")


def _tensor_change(entry: Mapping[str, Any], where: str) -> TensorChange:
    """The one place where the older spellings are translated."""
    _mapping(entry, where, (*SCHEME_SPELLINGS, *PART_SPELLINGS))
    scheme: dict[str, Any] = {}
    parts: dict[str, Any] = {}
    for key, value in entry.items():
        if key in SCHEME_SPELLINGS:
            scheme[SCHEME_SPELLINGS[key]] = _scheme_value(key, value, where)
        elif isinstance(value, str):
            name = value.removesuffix("Observer").removesuffix("FakeQuantize")
            part = PART_SPELLINGS[key]
            parts[part] = ALIASES[part].get(name, name)
        else:
            parts[PART_SPELLINGS[key]] = value
    if scheme.get("per_channel") and not where.endswith(("weight", "(w_*)")):
        raise ConfigError(f"{where}: activations have one scale per tensor; per_channel is for weights")
    for name in ("observer_args", "fake_quantize_args"):
        if name in parts:
            _mapping(parts[name], f"{where}: {name}")
    return TensorChange(scheme, parts)


def _scheme_value(key: str, value: Any, where: str) -> int | bool:
    wanted = int if key in ("bit", "bit_width", "scale_bits") else bool
    if type(value) is not wanted:
        raise ConfigError(f"{where}: {key} must be {wanted.__name__}, got {value!r}")
    if key == "pot_scale":
        return 1 if value else FLOAT32_BITS
    return value


def _matches(quantizer: Mapping[str, Any], prefix: str) -> tuple[Match, ...]:
    kinds = {"function_type": "function", "module_type": "type", "node_name": "node", "module_name": "module"}
    found = []
    for suffix, kind in kinds.items():
        key = f"{prefix}_{suffix}"
        if key in QUANTIZER_KEYS:
            found += [Match(**{kind: value}, where=key) for value in _sequence(quantizer.get(key), key)]
    return tuple(found)


def _override(index: int, rule: Any) -> OverrideRule:
    where = f"overrides[{index}]"
    rule = _mapping(rule, where, ("match", "weight", "activation", "output"))
    match = _mapping(rule.get("match"), f"{where}.match", ("module", "type", "function", "node"))
    if not match:
        raise ConfigError(f"{where}: needs a 'match' with at least one of module, type, function, node")
    changes: dict[str, TensorChange | None] = {}
    for part in ("weight", "activation", "output"):
        if part in rule:
            changes[part] = None if rule[part] is None else _tensor_change(rule[part], f"{where}.{part}")
            if rule[part] is not None and not rule[part]:
                raise ConfigError(f"{where}.{part}: says nothing; give at least one change, or null to leave it float")
    if not changes:
        raise ConfigError(f"{where}: says nothing; give at least one of weight, activation, output")
    return OverrideRule(Match(**match, where=where), changes)


def _unfused(value: Any) -> frozenset[tuple[str, ...]]:
    value = _mapping(value, "extra_fuse_dict", ("exclude_fusion_pattern",))
    patterns = frozenset(tuple(p) for p in _sequence(value.get("exclude_fusion_pattern"), "exclude_fusion_pattern"))
    known = {row.pattern for row in FUSIONS}
    for pattern in patterns - known:
        raise ConfigError(f"extra_fuse_dict: no fusion {pattern}; known: {sorted(known)}")
    return patterns


def _preserve_attr(value: Any) -> tuple[str, ...]:
    if isinstance(value, Mapping):
        if set(value) - {""}:
            raise ConfigError(
                f"preserve_attr: attributes can be kept on the model itself (key ''), got {sorted(set(value) - {''})}"
            )
        value = value.get("")
    return tuple(str(name) for name in _sequence(value, "preserve_attr"))


def _bn_mode(value: Any) -> str | int:
    if value in (BN_TRAIN, BN_FREEZE) or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value  # type: ignore[no-any-return]
    raise ConfigError(f"bn_mode must be {BN_TRAIN!r}, {BN_FREEZE!r} or a number of steps >= 0, got {value!r}")

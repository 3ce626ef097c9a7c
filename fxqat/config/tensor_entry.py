"""Reads and writes the configuration entry of one tensor; the only place that translates the older spellings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fxqat.config.checks import mapping
from fxqat.config.overrides import TENSORS, TensorChange
from fxqat.errors import ConfigError
from fxqat.fake_quantize.fake_quantizes import ALIASES as FAKE_QUANTIZE_ALIASES
from fxqat.fake_quantize.fake_quantizes import FAKE_QUANTIZES
from fxqat.fake_quantize.fake_quantizes import HINTS as FAKE_QUANTIZE_HINTS
from fxqat.observer.observers import ALIASES as OBSERVER_ALIASES
from fxqat.observer.observers import HINTS as OBSERVER_HINTS
from fxqat.observer.observers import OBSERVERS
from fxqat.scheme import FLOAT32_BITS, QuantizeScheme, TensorQConfig
from fxqat.utils.nearest_name import nearest

SCHEME_SPELLINGS = {
    "bit": "bit_width",
    "bit_width": "bit_width",
    "symmetry": "symmetric",
    "symmetric": "symmetric",
    "signed": "signed",
    "per_channel": "per_channel",
    "block_size": "block_size",
    "group_size": "block_size",
    "narrow_range": "narrow_range",
    "scale_bits": "scale_bits",
    "pot_scale": "scale_bits",
    "fixed_range": "fixed_range",
    "even_zero_point": "even_zero_point",
}
MODULE_SPELLINGS = {
    "observer": "observer",
    "observer_args": "observer_args",
    "observer_extra_args": "observer_args",
    "fake_quantize": "fake_quantize",
    "fakequantize": "fake_quantize",
    "fake_quantize_args": "fake_quantize_args",
    "fakeq_params": "fake_quantize_args",
}
INTEGERS = ("bit", "bit_width", "scale_bits", "block_size", "group_size")
"""Those of them whose values are integers."""
DYNAMIC = "dynamic"
"""The entry of an activation that is quantized at run time."""

TABLES: dict[str, Mapping[str, Any]] = {"observer": OBSERVERS, "fake_quantize": FAKE_QUANTIZES}
ALIASES = {"observer": OBSERVER_ALIASES, "fake_quantize": FAKE_QUANTIZE_ALIASES}
"""The names that other libraries give these observers and fake-quants."""
HINTS = {"observer": OBSERVER_HINTS, "fake_quantize": FAKE_QUANTIZE_HINTS}
"""How to spell here what other libraries have under other names."""


def read_change(entry: Mapping[str, Any] | str, where: str, tensor: str) -> TensorChange:
    """The change that an entry asks for.

    Args:
        entry: keys of the scheme, the observer and the fake-quant, in any spelling; for an activation also
            ``"dynamic"``.
        where: the entry in the configuration, for messages.
        tensor: ``"weight"``, ``"activation"``, ``"output"`` or ``"value"``.

    Raises:
        ConfigError: a key, a name or a value is unknown or impossible, or two keys mean the same.
    """
    if entry == DYNAMIC and tensor == "activation":
        return TensorChange(dynamic=True)
    entry = mapping(entry, where, (*SCHEME_SPELLINGS, *MODULE_SPELLINGS))
    spelled: dict[str, str] = {}
    scheme: dict[str, Any] = {}
    modules: dict[str, Any] = {}
    for key, value in entry.items():
        name = SCHEME_SPELLINGS.get(key) or MODULE_SPELLINGS[key]
        if name in spelled:
            raise ConfigError(
                f"{where}: {spelled[name]!r}: {entry[spelled[name]]!r} and {key!r}: {value!r} mean the same; "
                f"give one of them"
            )
        spelled[name] = key
        if key in SCHEME_SPELLINGS:
            scheme[name] = _scheme_value(key, value, where)
        elif name in TABLES:
            modules[name] = _named(name, value, f"{where}: {key}")
        else:
            modules[name] = dict(mapping(value, f"{where}: {name}"))
    if scheme.get("block_size") is not None:
        scheme.setdefault("per_channel", True)
    if scheme.get("symmetric") is False:  # the integer that a symmetric range leaves out
        scheme.setdefault("narrow_range", False)
    _check_possible(scheme, modules, where, tensor)
    return TensorChange(scheme, modules)


def write_change(change: TensorChange) -> dict[str, Any] | str:
    """The entry that asks for a change; :func:`read_change` reads it back.

    An observer or fake-quant that has a name is written by name, a class of the user as the class.
    """
    if change.dynamic:
        return DYNAMIC
    entry = {key: list(value) if isinstance(value, tuple) else value for key, value in change.scheme.items()}
    for key, value in change.modules.items():
        if key in TABLES:
            names = [name for name, row in TABLES[key].items() if row is value]
            entry[key] = names[0] if names else value
        else:
            entry[key] = dict(value)
    return entry


def write_config(config: TensorQConfig) -> dict[str, Any] | str:
    """The entry that says everything about how a tensor is quantized; empty arguments, and no blocks, are left out.

    A fixed range is neither observed nor trained, so that the entry names no observer.
    """
    scheme = {key: getattr(config.scheme, key) for key in dict.fromkeys(SCHEME_SPELLINGS.values())}
    if scheme["block_size"] is None:
        del scheme["block_size"]
    if scheme["fixed_range"] is not None:
        return write_change(TensorChange(scheme, {"fake_quantize": "Fixed"}))
    del scheme["fixed_range"]
    names = dict.fromkeys(MODULE_SPELLINGS.values())
    found = {name: getattr(config, name) for name in names}
    return write_change(TensorChange(scheme, {name: value for name, value in found.items() if value}))


def _named(name: str, value: Any, where: str) -> Any:
    """An observer or fake-quant by any of its names, or a class."""
    if not isinstance(value, str):
        if not callable(value):
            raise ConfigError(f"{where} must be a name or a class, got {value!r}; names: {', '.join(TABLES[name])}")
        return value
    known = {_plain(row): row for row in TABLES[name]} | {_plain(alias): row for alias, row in ALIASES[name].items()}
    found = known.get(_plain(value))
    if found is None:
        hints = {_plain(other): hint for other, hint in HINTS[name].items()}
        hint = hints.get(_plain(value)) or nearest(value, TABLES[name])
        raise ConfigError(f"{where}: unknown {name} {value!r}; {hint}")
    return found


def _plain(name: str) -> str:
    """A name as libraries agree on it: without case, underscores, and the kind at its end."""
    plain = name.lower().replace("_", "")
    for kind in ("observer", "fakequantize", "quantizer", "quanter"):
        plain = plain.removesuffix(kind) or plain
    return plain


def _scheme_value(key: str, value: Any, where: str) -> Any:
    if key == "fixed_range":
        return _range(value, where)
    if SCHEME_SPELLINGS[key] == "block_size" and value is None:
        return None
    wanted = int if key in INTEGERS else bool
    if type(value) is not wanted:
        raise ConfigError(f"{where}: {key} must be {wanted.__name__}, got {value!r}")
    if key == "pot_scale":
        return 1 if value else FLOAT32_BITS
    return value


def _range(value: Any, where: str) -> tuple[float, float] | None:
    if value is None:
        return None
    numbers = isinstance(value, (list, tuple)) and len(value) == 2
    if not numbers or not all(isinstance(limit, (int, float)) and not isinstance(limit, bool) for limit in value):
        raise ConfigError(f"{where}: fixed_range must be [low, high] or null, got {value!r}")
    low, high = (float(limit) for limit in value)
    if not (-float("inf") < low <= 0 <= high < float("inf") and low < high):
        raise ConfigError(
            f"{where}: fixed_range must be finite and hold 0, low <= 0 <= high with low < high, got {value!r}"
        )
    return low, high


def _check_possible(scheme: Mapping[str, Any], modules: Mapping[str, Any], where: str, tensor: str) -> None:
    """Check what is impossible on every backend."""
    try:
        QuantizeScheme(**scheme)
    except ConfigError as cause:
        raise ConfigError(f"{where}: {cause}") from cause
    if tensor != "weight" and scheme.get("per_channel"):
        raise ConfigError(
            f"{where}: per_channel: True{' (or block_size)' if scheme.get('block_size') else ''} is for weights; "
            "activations have one scale per tensor: leave it out"
        )
    chosen = modules.get("fake_quantize")
    row = FAKE_QUANTIZES.get(chosen) if isinstance(chosen, str) else chosen
    if tensor != "weight" and getattr(row, "weights_only", False):
        names = [name for name, kind in FAKE_QUANTIZES.items() if not kind.weights_only]
        raise ConfigError(
            f"{where}: fake_quantize {chosen!r} is for weights, whose integers it changes; "
            f"for activations take one of {', '.join(names)}"
        )
    if scheme.get("fixed_range") is None:
        return
    if tensor not in TENSORS[2:]:
        raise ConfigError(f"{where}: fixed_range is for 'output' and 'value'; the range of a {tensor} is observed")
    useless = [name for name in ("observer", "observer_args", "fake_quantize_args") if name in modules]
    if chosen not in (None, "Fixed"):
        useless.append("fake_quantize")
    if useless:
        raise ConfigError(
            f"{where}: a fixed_range is neither observed nor trained, so it excludes {useless[0]} "
            f"{modules[useless[0]]!r}; drop one of the two"
        )

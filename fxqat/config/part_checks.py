"""Whether the observers and fake-quants that were decided on fit: checked before they are built."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import fx

from fxqat.config.checks import nearest
from fxqat.errors import ConfigError
from fxqat.fake_quantize.fake_quantizes import FAKE_QUANTIZES
from fxqat.observer.observers import OBSERVERS
from fxqat.quantization.annotation import annotation_of
from fxqat.scheme import TensorQConfig

GIVEN = frozenset({"scheme", "axis", "num_channels", "observer", "kind"})
"""Arguments that every observer or fake-quant gets from fxqat."""


def check_arguments(gm: fx.GraphModule) -> None:
    """Check that the observers and fake-quants of an annotated graph have the arguments they are given.

    Raises:
        ConfigError: one has not; the nearest that it has is named.
    """
    for config, letter, where in _configs(gm):
        observer, quant = _kind(config.observer, OBSERVERS), _kind(config.fake_quantize, FAKE_QUANTIZES)
        _check(observer, config.observer_args, f"{where}: observer_args ({letter}_observer_extra_args)")
        _check(quant, config.fake_quantize_args, f"{where}: fake_quantize_args ({letter}_fakeq_params)")


def check_calibration_only(gm: fx.GraphModule) -> None:
    """Check that training moves no scale of an annotated graph.

    Raises:
        ConfigError: the configuration names a fake-quant that is learned.
    """
    for config, letter, where in _configs(gm):
        kind = _kind(config.fake_quantize, FAKE_QUANTIZES)
        if getattr(kind, "learned", False) and config.scheme.fixed_range is None:
            raise ConfigError(
                f"{where}: fake_quantize {config.fake_quantize!r} ({letter}_fakequantize) is trained, but is_qat=False "
                "prepares for calibration only. Take 'Fixed', leave it out, or prepare with is_qat=True."
            )


def _configs(gm: fx.GraphModule) -> Iterator[tuple[TensorQConfig, str, str]]:
    """Every configuration of the graph, the letter of its keys, and what it is of."""
    for node in gm.graph.nodes:
        found = annotation_of(node)
        if found is not None and found.weight is not None:
            yield found.weight, "w", f"weight of {node.name!r} ({found.reason})"
        if found is not None and found.value is not None:
            yield found.value.config, "a", f"value of {node.name!r} ({found.reason})"


def _kind(part: Any, table: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    kind: Callable[..., Any] = table[part] if isinstance(part, str) and part in table else part
    return kind


def _check(kind: Callable[..., Any], arguments: Mapping[str, Any], where: str) -> None:
    if not arguments or not callable(kind):
        return
    parameters = inspect.signature(kind).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    known = [name for name in parameters if name not in GIVEN]
    for name, value in arguments.items():
        if name not in known:
            words = f"{getattr(kind, '__name__', kind)} has no argument {name!r} (given: {value!r})"
            raise ConfigError(f"{where}: {words}; {nearest(name, known)}")

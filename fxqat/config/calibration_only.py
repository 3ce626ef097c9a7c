"""Checks that a model prepared for calibration only has nothing that training would learn."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from fxqat.errors import ConfigError
from fxqat.fake_quantize.fake_quantizes import FAKE_QUANTIZES
from fxqat.quantization.annotation import annotation_of
from fxqat.scheme import TensorQConfig


def check_calibration_only(gm: fx.GraphModule) -> None:
    """Check that training moves no scale of an annotated graph.

    Raises:
        ConfigError: the configuration names a fake-quant that is learned.
    """
    for config, letter, where in _configs(gm):
        kind = config.fake_quantize
        row = FAKE_QUANTIZES.get(kind) if isinstance(kind, str) else kind
        if getattr(row, "learned", False) and config.scheme.fixed_range is None:
            raise ConfigError(
                f"{where}: fake_quantize {kind!r} ({letter}_fakequantize) is trained, but is_qat=False "
                "prepares for calibration only. Take 'Fixed', leave it out, or prepare with is_qat=True."
            )


def _configs(gm: fx.GraphModule) -> Iterator[tuple[TensorQConfig, str, str]]:
    """Every configuration of the graph, the letter of its keys, and its tensor."""
    for node in gm.graph.nodes:
        found = annotation_of(node)
        if found is not None and found.weight is not None:
            yield found.weight, "w", f"weight of {node.name!r} ({found.reason})"
        if found is not None and found.value is not None:
            yield found.value.config, "a", f"value of {node.name!r} ({found.reason})"

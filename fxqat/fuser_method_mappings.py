"""The table of fusions: pattern of ops -> fused float layer -> QAT layer -> deployed layer.

The fuse pass reads the patterns. Every row is fused into a :class:`~fxqat.nn.fused.FusedLayer`, trained as a
:class:`~fxqat.nn.qat.QATLayer`, and deployed as the plain layer with folded weights, followed by its activation.
To add a fusion, add a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from fxqat.nn.fused import FusedLayer

LAYERS_AND_NORMS: tuple[tuple[str, str], ...] = (
    ("conv1d", "batch_norm1d"),
    ("conv2d", "batch_norm2d"),
    ("conv3d", "batch_norm3d"),
    ("conv_transpose1d", "batch_norm1d"),
    ("conv_transpose2d", "batch_norm2d"),
    ("conv_transpose3d", "batch_norm3d"),
    ("linear", "batch_norm1d"),
)
FUSIBLE_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": lambda: nn.ReLU(inplace=True),
    "relu6": lambda: nn.ReLU6(inplace=True),
}


@dataclass(frozen=True)
class Fusion:
    """One row: a chain of ops, each the only reader of the one before.

    Args:
        pattern: op names (see ``fxqat.ops.table``): a weighted layer, then optionally a norm and an activation.
        fused: builds the fused float layer from ``(layer, bn, activation)``.
    """

    pattern: tuple[str, ...]
    fused: Callable[..., nn.Module] = FusedLayer

    @property
    def norm(self) -> str | None:
        """The norm in the pattern, if any."""
        return next((name for name in self.pattern if name.startswith("batch_norm")), None)

    @property
    def activation(self) -> str | None:
        """The activation at the end of the pattern, if any."""
        return self.pattern[-1] if self.pattern[-1] in FUSIBLE_ACTIVATIONS else None


def _rows() -> tuple[Fusion, ...]:
    rows: list[Fusion] = []
    for layer, norm in LAYERS_AND_NORMS:
        rows += [Fusion((layer, norm, activation)) for activation in FUSIBLE_ACTIVATIONS]
        rows += [Fusion((layer, activation)) for activation in FUSIBLE_ACTIVATIONS]
        rows.append(Fusion((layer, norm)))
    return tuple(rows)


FUSIONS: tuple[Fusion, ...] = _rows()
"""All rows; for each layer, longer patterns come before shorter ones."""


def fusions_without(patterns: frozenset[tuple[str, ...]]) -> tuple[Fusion, ...]:
    """The table without the patterns that the user excluded."""
    return tuple(row for row in FUSIONS if row.pattern not in patterns)

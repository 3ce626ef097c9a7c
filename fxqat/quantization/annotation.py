"""What a quantizer decides about a graph: plain values in ``node.meta``, read by the insert pass and the report."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from fxqat.scheme import TensorQConfig
from fxqat.utils.node_meta import ANNOTATION

QUANTIZED = "quantized"
SHARES = "shares"
FLOAT = "float"

TOO_COSTLY = "conversions would cost too much"
"""Begins the reason of a node that stays float by ``least_work``."""


@dataclass(frozen=True)
class ValueQuant:
    """How the value a node produces is quantized.

    Args:
        config: scheme, observer and fake-quant.
        group: values with the same number share one fake-quant.
        readers: names of the nodes that read the quantized value; None if all do.
        on_grid: the value selects from values that are already quantized; it is not rounded again.
        transparent: no fake-quant node follows: a tuple of quantized values, or an op that vanishes when deployed.
    """

    config: TensorQConfig
    group: int
    readers: frozenset[str] | None = None
    on_grid: bool = False
    transparent: bool = False

    def is_read_by(self, node: fx.Node) -> bool:
        """Whether a node that reads the value reads its quantized form."""
        return self.readers is None or node.name in self.readers


@dataclass(frozen=True)
class Annotation:
    """What was decided about one node.

    Args:
        op: name of the op.
        status: ``"quantized"``, ``"shares"`` or ``"float"``, for the value the node produces and its weight.
        reason: why.
        value: how its value is quantized, None if it is not.
        weight: how its weight is quantized, None if it has none or it stays float.
        overridable: ``"activation"`` and ``"output"``, where an override can leave these float.
        weights_only: a layer that computes in float, with a weight that is stored as integers; its bias stays float.
        dynamic: a layer that quantizes what it reads at run time; its bias stays float.
    """

    op: str
    status: str
    reason: str
    value: ValueQuant | None = None
    weight: TensorQConfig | None = None
    overridable: tuple[str, ...] = ()
    weights_only: bool = False
    dynamic: bool = False


def annotation_of(node: fx.Node) -> Annotation | None:
    """The annotation of a node, None before annotating."""
    found = node.meta.get(ANNOTATION)
    assert found is None or isinstance(found, Annotation)
    return found

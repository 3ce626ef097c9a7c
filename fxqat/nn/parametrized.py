"""Layers whose weight is computed from other parameters, by ``torch.nn.utils.parametrize``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fxqat.nn.qat import QATLayer
from fxqat.nn.weighted import WEIGHTED_TYPES, WeightedLayer, weighted_layer, weighted_op
from fxqat.utils.contexts import eval_mode
from fxqat.utils.own_forward import type_of
from fxqat.utils.torch_compat import has_hooks

WEIGHT = "weight"


class ComputedWeight:
    """A module whose weight is computed each time that it is read."""

    parametrizations: nn.ModuleDict

    @property
    def weight(self) -> Tensor:
        """The computed weight."""
        weight: Tensor = self.parametrizations[WEIGHT]()
        return weight


PARAMETRIZED: dict[Any, Any] = {
    kind: type(f"Parametrized{kind.__name__}", (kind, ComputedWeight), {"__module__": __name__})
    for kind in WEIGHTED_TYPES
}
"""For each layer the class with a computed weight; the classes that torch makes cannot be pickled."""
globals().update({kind.__name__: kind for kind in PARAMETRIZED.values()})


class ParametrizedQATLayer(QATLayer, ComputedWeight):
    """A QAT layer that computes its weight in each call, then rounds it: as weight norm or an orthogonal layer does.

    The parametrization is trained, and keeps the names of its tensors (``parametrizations.weight.original``). The file
    has the integers of the weight that it computes. See :class:`~fxqat.nn.qat.QATLayer` for the arguments.
    """

    def _take_weight(self, layer: WeightedLayer) -> None:
        self.parametrizations = layer.parametrizations  # type: ignore[assignment]

    def _dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def _weight_sources(self) -> Sequence[Tensor]:
        return ()  # a parametrization may depend on anything

    def float_layer(self) -> WeightedLayer:
        """The layer as torch makes it, with the same parametrization."""
        weight = nn.Parameter(self.weight.detach())
        layer: Any = weighted_layer(self.op.layer, self.op.options, weight, self.bias)
        parametrize.register_parametrization(layer, WEIGHT, nn.Identity(), unsafe=True)
        layer.parametrizations[WEIGHT] = self.parametrizations[WEIGHT]
        return layer.train(self.training)  # type: ignore[no-any-return]


def has_computed_weight(layer: nn.Module) -> bool:
    """Whether a parametrization computes the weight of a layer, and no other tensor of it."""
    return parametrize.is_parametrized(layer) and list(layer.parametrizations) == [WEIGHT]  # type: ignore[arg-type]


def parametrized(layer: WeightedLayer) -> WeightedLayer:
    """A layer that can be pickled, with the tensors of a layer whose weight torch computes.

    It is the layer itself if that can be pickled, or if it has hooks.
    """
    if has_hooks(layer) or type(layer) in PARAMETRIZED.values():
        return layer
    op = weighted_op(layer)
    with eval_mode(layer):  # spectral norm iterates when it is read in training
        weight = nn.Parameter(layer.weight.detach())
    found: Any = weighted_layer(op.layer, op.options, weight, layer.bias)  # type: ignore[arg-type]
    del found.weight
    found.__class__ = PARAMETRIZED[op.layer]
    found.parametrizations = layer.parametrizations
    return found.train(layer.training)  # type: ignore[no-any-return]


def make_permanent_(layer: nn.Module) -> None:
    """Replace the computed weight of a layer that is no QAT layer by a parameter."""
    kind: Any = type_of(layer)
    weight = nn.Parameter(layer.weight.detach())  # type: ignore[operator]
    del layer.parametrizations
    layer.__class__ = kind
    layer.weight = weight

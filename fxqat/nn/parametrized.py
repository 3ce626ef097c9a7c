"""Layers whose weight or bias is computed from other parameters, by ``torch.nn.utils.parametrize``."""

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
BIAS = "bias"


class ParametrizedQATLayer(QATLayer):
    """A QAT layer that computes its weight, bias or both in each call, then rounds them: as weight norm does.

    The parametrization is trained, and keeps the names of its tensors (``parametrizations.weight.original``). The file
    has the integers of what it computes. See :class:`~fxqat.nn.qat.QATLayer` for the arguments.
    :func:`qat_layer_type` gives the class for a layer.
    """

    parametrizations: nn.ModuleDict

    def _take_tensors(self, layer: WeightedLayer) -> None:
        self.parametrizations = layer.parametrizations  # type: ignore[assignment]
        for name in {WEIGHT, BIAS} - set(computed_tensors(layer)):
            setattr(self, name, getattr(layer, name))

    def _dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def _weight_sources(self) -> Sequence[Tensor]:
        return ()  # a parametrization may depend on anything

    def float_layer(self) -> WeightedLayer:
        """The layer as torch makes it, with the same parametrization."""
        names = computed_tensors(self)
        layer: Any = weighted_layer(self.op.layer, self.op.options, *_stored(self, names))
        for name in names:
            parametrize.register_parametrization(layer, name, nn.Identity(), unsafe=True)
            layer.parametrizations[name] = self.parametrizations[name]
        return layer.train(self.training)  # type: ignore[no-any-return]


def _computes(name: str) -> type:
    """A base of layers that compute a tensor each time that it is read; torch cannot remove it from their own class."""
    return type(f"Computed{name.title()}", (), {name: property(lambda layer: layer.parametrizations[name]())})


COMPUTED = {name: _computes(name) for name in (WEIGHT, BIAS)}
PARAMETRIZED: dict[tuple[type, tuple[str, ...]], Any] = {
    (kind, names): type(
        f"{kind.__name__}Of{'And'.join(map(str.title, names))}", (kind, *(COMPUTED[n] for n in names)), {}
    )
    for kind in (*WEIGHTED_TYPES, ParametrizedQATLayer)
    for names in ((WEIGHT,), (BIAS,), (WEIGHT, BIAS))
}
"""For each layer, and the tensors that are computed, the class; the classes that torch makes cannot be pickled."""
for _kind in PARAMETRIZED.values():
    _kind.__module__ = __name__
    globals()[_kind.__name__] = _kind


def computed_tensors(layer: nn.Module) -> tuple[str, ...]:
    """Which of weight and bias parametrizations compute; nothing if they compute any other tensor of a layer."""
    names = set(layer.parametrizations) if parametrize.is_parametrized(layer) else set()  # type: ignore[arg-type]
    return tuple(name for name in (WEIGHT, BIAS) if name in names) if names <= {WEIGHT, BIAS} else ()


def has_computed_weight(layer: nn.Module) -> bool:
    """Whether a parametrization computes the weight of a layer."""
    return WEIGHT in computed_tensors(layer)


def has_computed_bias(layer: nn.Module) -> bool:
    """Whether a parametrization computes the bias of a layer."""
    return BIAS in computed_tensors(layer)


def qat_layer_type(layer: nn.Module) -> type[QATLayer]:
    """The class of the QAT layer of a float layer."""
    names = computed_tensors(layer)
    return PARAMETRIZED[ParametrizedQATLayer, names] if names else QATLayer


def parametrized(layer: WeightedLayer) -> WeightedLayer:
    """A layer that can be pickled, with the tensors of a layer whose weight or bias torch computes.

    It is the layer itself if that can be pickled, or if it has hooks.
    """
    if has_hooks(layer) or type(layer) in PARAMETRIZED.values():
        return layer
    op, names = weighted_op(layer), computed_tensors(layer)
    with eval_mode(layer):  # spectral norm iterates when it is read in training
        stored = _stored(layer, names)
    found: Any = weighted_layer(op.layer, op.options, *stored)
    for name in names:
        delattr(found, name)
    found.__class__ = PARAMETRIZED[op.layer, names]
    found.parametrizations = layer.parametrizations
    return found.train(layer.training)  # type: ignore[no-any-return]


def make_permanent_(layer: nn.Module) -> None:
    """Replace the computed tensors of a layer that is no QAT layer by parameters."""
    kind: Any = type_of(layer)
    names = computed_tensors(layer)
    values = [nn.Parameter(getattr(layer, name).detach()) for name in names]
    del layer.parametrizations
    layer.__class__ = kind
    for name, value in zip(names, values, strict=True):
        setattr(layer, name, value)


def _stored(layer: Any, names: Sequence[str]) -> list[Any]:
    """Weight and bias of a layer; those of the given names are new parameters."""
    return [nn.Parameter(getattr(layer, n).detach()) if n in names else getattr(layer, n) for n in (WEIGHT, BIAS)]

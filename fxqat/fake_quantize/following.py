"""How much the largest absolute value of a weight has grown since the training step before."""

from __future__ import annotations

import torch
from torch import Tensor

from fxqat.fake_quantize import kernels
from fxqat.numerics import min_max_of


@torch.no_grad()
def growth(weight: Tensor, factor: Tensor | None, magnitude: Tensor, axis: int | None, smallest: float) -> Tensor:
    """Replace a magnitude by that of a weight as it is now; the ratio of the two.

    Args:
        weight: any shape with elements.
        factor: ``(channels,)`` or None: the weight is ``weight * factor`` along ``axis``.
        magnitude: ``()`` or ``(channels,)``, the largest absolute value a step ago, or 0 if there was none. It is
            overwritten, but stays where the new one is not finite: of a bad batch nothing may remain.
        axis: of the channels; None if there is one magnitude.
        smallest: a magnitude is not smaller than this.

    Returns:
        Of the shape of ``magnitude``; 1 where that was 0.
    """
    ratio = kernels.growth(weight, factor, magnitude, axis, smallest)
    if ratio is not None:
        return ratio
    low, high = min_max_of(weight, axis)
    largest = torch.maximum(-low, high).float()
    if factor is not None:
        largest = largest * factor.abs()
    if magnitude.dim() == 0:
        largest = largest.amax()
    largest = largest.clamp(min=smallest)
    largest = torch.where(largest.isfinite(), largest, magnitude)
    ratio = torch.where(magnitude > 0, largest / magnitude, 1.0)
    magnitude.copy_(largest)
    return ratio

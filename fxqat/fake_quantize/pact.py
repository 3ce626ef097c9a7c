"""PACT: learns the clipping values.

Choi et al. 2018, "PACT: Parameterized Clipping Activation for Quantized Neural Networks" (arXiv:1805.06085), equations
1 to 3.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fxqat.fake_quantize.base import Observer
from fxqat.fake_quantize.soft_gradients import finite_gradient, magnitude, straight_through
from fxqat.fake_quantize.surrogate import SurrogateFakeQuantize
from fxqat.numerics import per_axis
from fxqat.scheme import QuantizeScheme

SCALE_BITS = 21
"""Significant bits of a scale that survive its conversion into clipping values and back."""


class PACTFakeQuantize(SurrogateFakeQuantize):
    """Fake-quant with learned clipping values; scale and zero point follow from them.

    ``y = clip(x, 0, alpha)`` (equation 1), rounded to ``n`` steps of ``alpha / n`` (equation 2). The gradient of alpha
    is 1 where ``x >= alpha`` and 0 elsewhere (equation 3); that of x is 1 where x is not clipped. The paper quantizes
    the results of a ReLU. Other values:

    * symmetric schemes: ``clip(x, -alpha, alpha)``; both sides contribute to alpha's gradient;
    * asymmetric schemes: ``clip(x, -beta, alpha)``, both learned. After a ReLU beta is calibrated to 0 and gets no
      gradient: this is the paper's quantizer. A scheme for values that are never negative has no beta.

    Values are clipped at the largest integer times the scale, which differs slightly from alpha when the scale has few
    significant bits (21 at most). alpha and beta learn only from clipped values. The paper therefore adds an L2 penalty
    on alpha to the loss (section 3). Here, use weight decay for the parameters whose names end in ``alpha`` and
    ``beta``.

    Args: as :class:`~fxqat.fake_quantize.base.FakeQuantizeBase`; for weights and activations.

    Attributes:
        alpha: ``()`` or ``(channels,)``, real units; its sign is ignored.
        beta: of the same shape, None where the scheme fixes the zero point.
    """

    learned = True

    def __init__(self, scheme: QuantizeScheme, observer: Observer, kind: str, axis: int | None = None) -> None:
        super().__init__(scheme, observer, kind, axis)
        self.scale_bits = min(scheme.scale_bits, SCALE_BITS)
        scale, zero_point = self.initial_qparams()
        self.alpha = nn.Parameter(torch.empty_like(scale))
        self.beta = None if scheme.fixed_zero_point is not None else nn.Parameter(torch.empty_like(scale))
        self.store(scale, zero_point)

    @property
    def scale(self) -> Tensor:  # type: ignore[override]
        """``alpha / n``, or ``(alpha + beta) / n``, before it is rounded to its significant bits."""
        scheme, alpha = self.scheme, self.alpha.detach().abs()
        if self.beta is None:
            return alpha / (scheme.quant_max - self._fixed_zero_point)
        return (alpha + self.beta.detach().abs()) / (scheme.quant_max - scheme.quant_min)

    @property
    def zero_point(self) -> Tensor:  # type: ignore[override]
        """The integer that represents 0."""
        if self.beta is None:
            return torch.full_like(self.alpha.detach(), self._fixed_zero_point)
        return self.scheme.quant_min + torch.round(self.beta.detach().abs() / self.used_scale())

    @property
    def _fixed_zero_point(self) -> int:
        """The zero point where no beta is learned."""
        fixed = self.scheme.fixed_zero_point
        assert fixed is not None
        return fixed

    @torch.no_grad()
    def store(self, scale: Tensor, zero_point: Tensor) -> None:
        """Set alpha and beta to the ends of the range that scale and zero point cover."""
        self.alpha.copy_((self.scheme.quant_max - zero_point) * scale)
        if self.beta is not None:
            self.beta.copy_((zero_point - self.scheme.quant_min) * scale)

    def rescale(self, ratio: Tensor) -> None:
        """Multiply both ends of the range by a ratio."""
        for end in self.parameters(recurse=False):
            end.data.mul_(ratio)  # their derivatives do not depend on their size: a pass that is under way stays valid

    def surrogate(self, x: Tensor, used_scale: Tensor) -> Tensor:
        """Equation 1, clipping at the ends of the integer range."""
        zero_point = self.qparams()[1]
        upper = magnitude(finite_gradient(self.alpha))
        lower = upper if self.beta is None else magnitude(finite_gradient(self.beta))
        high = straight_through(upper, (self.scheme.quant_max - zero_point) * used_scale)
        low = straight_through(-lower, (self.scheme.quant_min - zero_point) * used_scale)
        high, low = per_axis(high, x.dim(), self.axis), per_axis(low, x.dim(), self.axis)
        return torch.where(x >= high, high, torch.where(x < low, low, x))

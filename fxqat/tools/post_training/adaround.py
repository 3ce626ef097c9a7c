"""AdaRound: whether each weight is rounded up or down is learned.

Source: Nagel et al. 2020 (arXiv:2004.10568), equations 21 to 24::

    W_hat = s * clip(floor(W / s) + h(V), n, p)
    h(V)  = clip(sigmoid(V) * (zeta - gamma) + gamma, 0, 1),   zeta = 1.1, gamma = -0.1
    f(V)  = sum 1 - |2 h(V) - 1| ** beta
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.numerics import per_axis

ZETA, GAMMA = 1.1, -0.1


class AdaRoundFakeQuantize(FakeQuantizeBase):
    """Takes the place of a weight's fake-quant while its rounding is learned; scale and zero point stand still.

    It starts where it rounds nothing: ``h(V)`` is the part of each weight that is less than a step.

    Args:
        quant: the calibrated fake-quant.
        weight: the (folded) weight that is rounded.

    Attributes:
        rounding: ``V``, of the weight's shape.
    """

    def __init__(self, quant: FakeQuantizeBase, weight: Tensor) -> None:
        super().__init__(quant.scheme, quant.observer, quant.kind, quant.axis)
        self.fake_quant_enabled = True
        scale, zero_point = quant.qparams()
        self.register_buffer("scale", scale)
        self.register_buffer("zero_point", zero_point)
        steps = weight.detach() / per_axis(self.scale, weight.dim(), self.axis)
        self.register_buffer("floor", steps.floor())
        part = (steps - steps.floor()).sub(GAMMA).div(ZETA - GAMMA)
        self.rounding = nn.Parameter(torch.logit(part))

    floor: Tensor

    def fraction(self) -> Tensor:
        """``h(V)``: how far up each weight is rounded, 0 to 1."""
        return torch.clamp(torch.sigmoid(self.rounding) * (ZETA - GAMMA) + GAMMA, 0.0, 1.0)

    def regularization(self, beta: float) -> Tensor:
        """``f(V)``, which draws every fraction to 0 or 1; the harder, the smaller ``beta``."""
        return (1.0 - (2.0 * self.fraction() - 1.0).abs().pow(beta)).sum()

    def quantize(
        self, x: Tensor, factor: Tensor | None = None, used_scale: Tensor | None = None, input_kept: bool = True
    ) -> Tensor:
        """The weight as it is rounded so far. ``x`` is the constructor's."""
        return self._dequantized(self.fraction())

    @torch.no_grad()
    def rounded(self) -> Tensor:
        """The weight with every rounding decided."""
        return self._dequantized((self.fraction() >= 0.5).float())

    def _dequantized(self, fraction: Tensor) -> Tensor:
        scale, zero_point = (per_axis(t, self.floor.dim(), self.axis) for t in (self.scale, self.zero_point))
        q = torch.clamp(self.floor + fraction + zero_point, self.scheme.quant_min, self.scheme.quant_max)
        return (q - zero_point) * scale

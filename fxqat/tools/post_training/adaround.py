"""AdaRound: learn whether each weight is rounded up or down.

Source: Nagel et al. 2020 (arXiv:2004.10568), equations 21 to 24::

    W_hat = s * clip(floor(W / s) + h(V), n, p)
    h(V)  = clip(sigmoid(V) * (zeta - gamma) + gamma, 0, 1),   zeta = 1.1, gamma = -0.1
    f(V)  = sum 1 - |2 h(V) - 1| ** beta
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fxqat.errors import ConfigError
from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.numerics import per_axis, valid_scale

ZETA, GAMMA = 1.1, -0.1

DECIDED = 6.0
"""A rounding variable whose fraction is 1, and with the opposite sign 0."""


class AdaRoundFakeQuantize(FakeQuantizeBase):
    """Replaces a weight's fake-quant while its rounding is learned; the zero point is fixed.

    At the start it returns the weight itself: ``h(V)`` is the fractional part of ``W / s``. A scale that is learned as
    well moves the values of the integers, not the integers.

    Args:
        quant: the calibrated fake-quant.
        weight: the (folded) weight to round.

    Attributes:
        rounding: ``V``, of the weight's shape (in blocks).
        log_factor: logarithm of the scale relative to that of ``quant``, of the scale's shape; requires no gradient.
    """

    def __init__(self, quant: FakeQuantizeBase, weight: Tensor) -> None:
        super().__init__(quant.scheme, quant.observer, quant.kind, quant.channel_axis)
        self.fake_quant_enabled = True
        scale, zero_point = quant.qparams()
        self.register_buffer("start_scale", scale)
        self.register_buffer("zero_point", zero_point)
        self.log_factor = nn.Parameter(torch.zeros_like(scale), requires_grad=False)
        rows = self.in_blocks(weight.detach())
        steps = rows / per_axis(self.scale, rows.dim(), self.axis)
        self.register_buffer("floor", steps.floor())
        fraction = (steps - steps.floor()).sub(GAMMA).div(ZETA - GAMMA)
        self.rounding = nn.Parameter(torch.logit(fraction))

    temporary = True
    start_scale: Tensor
    floor: Tensor

    @property
    def scale(self) -> Tensor:  # type: ignore[override]
        """The scale in use; the gradient passes straight through its rounding to ``scale_bits``."""
        scale = self.start_scale * self.log_factor.exp()
        return scale + (valid_scale(scale.detach(), self.scale_bits) - scale.detach())

    def store(self, scale: Tensor, zero_point: Tensor) -> None:
        """Refuse a new range: the integers belong to the one at the start."""
        raise ConfigError("the rounding of this weight is being learned: calibrate before or after it")

    def fraction(self) -> Tensor:
        """``h(V)``: how far each weight is rounded up, 0 to 1."""
        return torch.clamp(torch.sigmoid(self.rounding) * (ZETA - GAMMA) + GAMMA, 0.0, 1.0)

    def regularization(self, beta: float) -> Tensor:
        """``f(V)``: pulls every fraction to 0 or 1, the smaller ``beta`` the stronger."""
        return (1.0 - (2.0 * self.fraction() - 1.0).abs().pow(beta)).sum()

    def rounded(self, x: Tensor, factor: Tensor | None, used_scale: Tensor | None, input_kept: bool) -> Tensor:
        """The softly rounded weight. ``x`` must be the constructor's weight."""
        return self._dequantized(self.fraction())

    @torch.no_grad()
    def decide_(self, undecided: int = 0) -> None:
        """Round every fraction to 0 or 1.

        Args:
            undecided: so many fractions stay, those nearest to one half.
        """
        fraction = self.fraction()
        decided = torch.where(fraction >= 0.5, DECIDED, -DECIDED)
        if undecided > 0:
            distance = (fraction - 0.5).abs()
            limit = distance.flatten().kthvalue(undecided).values
            decided = torch.where(distance > limit, decided, self.rounding)
        self.rounding.copy_(decided)

    @torch.no_grad()
    def decided(self, shape: torch.Size) -> Tensor:
        """The weight, of this shape, with every fraction rounded to 0 or 1."""
        return self.from_blocks(self._dequantized((self.fraction() >= 0.5).float()), shape)

    def _dequantized(self, fraction: Tensor) -> Tensor:
        scale, zero_point = (per_axis(t, self.floor.dim(), self.axis) for t in (self.scale, self.zero_point))
        q = torch.clamp(self.floor + fraction + zero_point, self.scheme.quant_min, self.scheme.quant_max)
        return (q - zero_point) * scale

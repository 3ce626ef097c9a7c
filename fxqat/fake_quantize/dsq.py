"""DSQ: the gradient of a soft staircase.

Gong et al. 2019, "Differentiable Soft Quantization: Bridging Full-Precision and Low-Bit Neural Networks"
(arXiv:1908.05033), section 3.2, the asymptotic function phi and the soft quantizer Q_S; section 3.3, its parameter
alpha.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fxqat.errors import ConfigError
from fxqat.fake_quantize.base import Observer
from fxqat.fake_quantize.learnable import LearnableFakeQuantize
from fxqat.fake_quantize.soft_gradients import finite_gradient, straight_through
from fxqat.fake_quantize.surrogate import SurrogateFakeQuantize
from fxqat.scheme import QuantizeScheme

ALPHA_MIN = 2.0**-10
"""Smallest softness: the staircase is nearly hard, and its steps do not overflow."""

ALPHA_MAX = 0.5
"""Largest softness, the paper's bound."""


class DSQFakeQuantize(SurrogateFakeQuantize, LearnableFakeQuantize):
    """Rounds as deployed and has the gradient of a staircase of tanh steps.

    With ``v`` the distance of x to the lower end of the range in steps, ``i = floor(v)`` the interval it lies in and
    ``k = log(2 / alpha - 1)``::

        phi = tanh(k * (v - i - 1/2)) / (1 - alpha)
        Q_S = lower end + scale * (i + (phi + 1) / 2)        inside the range, its ends outside

    1. x, scale and zero point have the gradient of Q_S; for scale and zero point it is multiplied by LSQ's gradient
       scale. The paper learns the ends of the range instead: ``(quant_min - zero_point) * scale`` and
       ``(quant_max - zero_point) * scale``.
    2. alpha is learned as well, and clamped to ``[ALPHA_MIN, ALPHA_MAX]`` where it is used. With weight decay on alpha,
       as in the paper, the staircase hardens.

    Args:
        scheme: how the tensor is quantized.
        observer: supplies the initial range.
        kind: weight or activation.
        axis: channel axis, None for activations.
        grad_factor: see :class:`~fxqat.fake_quantize.learnable.LearnableFakeQuantize`.
        alpha: initial softness; near 0 the staircase is hard.

    Raises:
        ConfigError: ``alpha`` is not within ``[ALPHA_MIN, ALPHA_MAX]``, or ``grad_factor`` is not positive.
    """

    def __init__(
        self,
        scheme: QuantizeScheme,
        observer: Observer,
        kind: str,
        axis: int | None = None,
        grad_factor: float = 1.0,
        alpha: float = 0.2,
    ) -> None:
        super().__init__(scheme, observer, kind, axis, grad_factor)
        if not ALPHA_MIN <= alpha <= ALPHA_MAX:
            raise ConfigError(f"DSQ: alpha must be within [{ALPHA_MIN:g}, {ALPHA_MAX:g}], got {alpha}")
        self.alpha = nn.Parameter(torch.tensor(float(alpha)))

    def surrogate(self, x: Tensor, used_scale: Tensor) -> Tensor:
        """The soft staircase Q_S."""
        grid, low, high = self.learned_steps(x, used_scale)
        learned = finite_gradient(self.alpha)
        used = torch.nan_to_num(self.alpha.detach(), nan=ALPHA_MAX).clamp(ALPHA_MIN, ALPHA_MAX)
        alpha = straight_through(learned, used)
        v = torch.clamp(x / grid, low, high) - low
        intervals = self.scheme.quant_max - self.scheme.quant_min
        i = v.detach().floor().clamp(0, intervals - 1)
        phi = torch.tanh(torch.log(2.0 / alpha - 1.0) * (v - i - 0.5)) / (1.0 - alpha)
        return (i + (phi + 1.0) / 2.0 + low) * grid

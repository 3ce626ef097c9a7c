"""TQT: power-of-two scales from a learned threshold.

Jain et al. 2019, "Trained Quantization Thresholds for Accurate and Efficient Fixed-Point Inference of Deep Neural
Networks" (arXiv:1903.08066), section 3: equations 6 to 8.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fxqat.errors import ConfigError
from fxqat.fake_quantize.base import Observer
from fxqat.fake_quantize.soft_gradients import finite_gradient, straight_through
from fxqat.fake_quantize.surrogate import SurrogateFakeQuantize
from fxqat.numerics import per_axis
from fxqat.scheme import QuantizeScheme


class TQTFakeQuantize(SurrogateFakeQuantize):
    """Fake-quant whose scale is a power of two; it learns the logarithm of its threshold.

    ``scale = 2 ** ceil(log2_threshold) / 2 ** b``, with b the bits without the sign: ``bit_width - 1`` for symmetric
    schemes, else ``bit_width``. With ``r = round(x / scale)`` and n, p the smallest and largest integer, the gradients
    are:

    * scale: ``r - x / scale`` where ``n <= r <= p``, else n or p (equation 6);
    * log2_threshold: ``scale * ln 2`` times that; the gradient passes straight through the ceil (equations 7, 8);
    * x: 1 where ``n <= r <= p``, else 0.

    The paper's quantizers have no zero point. Here an asymmetric scheme keeps the zero point of calibration, which is 0
    for unsigned values. Calibration determines only the power of two; the threshold starts in the middle of its
    interval. The paper trains the thresholds with Adam.

    Args: as :class:`~fxqat.fake_quantize.base.FakeQuantizeBase`.

    Attributes:
        log2_threshold: ``()`` or ``(channels,)``, logarithm to base 2 of real units.

    Raises:
        ConfigError: the scheme does not have ``scale_bits=1``.
    """

    learned = True

    def __init__(self, scheme: QuantizeScheme, observer: Observer, kind: str, axis: int | None = None) -> None:
        super().__init__(scheme, observer, kind, axis)
        if scheme.scale_bits != 1:
            raise ConfigError(
                f"TQT trains power-of-two scales, but the scheme {scheme} has scale_bits={scheme.scale_bits}. "
                "Set pot_scale: true (scale_bits: 1) in the scheme, or choose Learnable."
            )
        self.threshold_bits = scheme.bit_width - int(scheme.symmetric)
        scale, zero_point = self.initial_qparams()
        self.log2_threshold = nn.Parameter(torch.empty_like(scale))
        self.register_buffer("zero_point", torch.empty_like(zero_point))
        self.store(scale, zero_point)

    @property
    def scale(self) -> Tensor:  # type: ignore[override]
        """The power of two, before it is clamped to valid scales."""
        return torch.exp2(torch.ceil(self.log2_threshold.detach()) - self.threshold_bits)

    @torch.no_grad()
    def store(self, scale: Tensor, zero_point: Tensor) -> None:
        """Set the threshold to the middle of the interval that has this scale."""
        self.log2_threshold.copy_(torch.log2(scale).round_() + (self.threshold_bits - 0.5))
        self.zero_point.copy_(zero_point)

    def rescale(self, ratio: Tensor) -> None:
        """Multiply the threshold by a ratio."""
        self.log2_threshold.data.add_(torch.log2(ratio))  # the derivative by it does not depend on it

    def surrogate(self, x: Tensor, used_scale: Tensor) -> Tensor:
        """A function whose derivatives are equations 6 to 8."""
        scheme = self.scheme
        logarithm = used_scale * math.log(2.0) * finite_gradient(self.log2_threshold)
        grid = per_axis(straight_through(logarithm, used_scale), x.dim(), self.axis)
        zero_point = per_axis(self.qparams()[1], x.dim(), self.axis)
        with torch.no_grad():
            steps = x / grid
            rounded = steps.round()
            limited = torch.clamp(rounded, scheme.quant_min - zero_point, scheme.quant_max - zero_point)
            error = rounded - steps
        return torch.where(limited == rounded, x + error * grid, limited * grid)

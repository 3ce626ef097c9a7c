"""Learnable: trains the scale (LSQ) and, where the scheme does not fix it, the zero point (LSQ+)."""

from __future__ import annotations

from torch import Tensor, nn

from fxqat.errors import ConfigError
from fxqat.fake_quantize.base import WEIGHT, FakeQuantizeBase, Observer
from fxqat.scheme import QuantizeScheme


class LearnableFakeQuantize(FakeQuantizeBase):
    """Fake-quant with a learned step size.

    The gradients are those of :class:`~fxqat.fake_quantize.straight_through.FakeQuantizeSTE`. Those of scale and zero
    point are multiplied by ``grad_factor / sqrt(n * quant_max)``, with n the number of weights that share a scale or,
    for activations, the number of features of one sample.
    The zero point is learned in steps and rounded in the forward pass. LSQ+ learns the offset ``beta = -zero_point *
    scale`` in real units instead, which would not represent 0 exactly.

    Args:
        scheme: how the tensor is quantized.
        observer: supplies the initial range.
        kind: weight or activation.
        axis: channel axis, None for activations.
        grad_factor: additional multiplier of the gradient; 1 in the paper.

    Raises:
        ConfigError: ``grad_factor`` is not positive.

    Source: Esser et al. 2020, LSQ (arXiv:1902.08153), section 2.2; Bhalgat et al. 2020, LSQ+ (arXiv:2004.09576).
    """

    learned = True

    def __init__(
        self, scheme: QuantizeScheme, observer: Observer, kind: str, axis: int | None = None, grad_factor: float = 1.0
    ) -> None:
        super().__init__(scheme, observer, kind, axis)
        if not grad_factor > 0:
            raise ConfigError(f"{type(self).__name__}: grad_factor must be positive, got {grad_factor}")
        self.grad_factor = grad_factor
        scale, zero_point = self.initial_qparams()
        self.scale = nn.Parameter(scale)
        if scheme.fixed_zero_point is not None:
            self.register_buffer("zero_point", zero_point)
        else:
            self.zero_point = nn.Parameter(zero_point)

    def grad_scale(self, x: Tensor) -> float:
        """LSQ's gradient scale ``grad_factor / sqrt(n * quant_max)``."""
        shares = self.scale.numel() if self.kind == WEIGHT else (x.shape[0] if x.dim() else 1)
        n = x.numel() // max(1, shares)
        return float(self.grad_factor / (max(1, n) * max(1, self.scheme.quant_max)) ** 0.5)

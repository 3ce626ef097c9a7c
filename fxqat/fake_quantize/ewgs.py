"""EWGS: each element's gradient is scaled by its rounding error.

Lee et al. 2021, "Network Quantization with Element-wise Gradient Scaling" (arXiv:2104.00903), equations 5 and 6.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fxqat.errors import ConfigError
from fxqat.fake_quantize.base import Observer
from fxqat.fake_quantize.learnable import LearnableFakeQuantize
from fxqat.fake_quantize.surrogate import SurrogateFakeQuantize
from fxqat.scheme import QuantizeScheme


class EWGSFakeQuantize(SurrogateFakeQuantize, LearnableFakeQuantize):
    """LSQ's quantizer; the gradient of its rounding is scaled element by element.

    The paper clips x to ``x_n``, in units of the range, and rounds that to ``x_q``. With ``g`` the gradient of ``x_q``,
    the gradient of ``x_n`` is ``g * (1 + delta * sign(g) * (x_n - x_q))``: smaller where the step against the gradient
    goes to the near rounding boundary, larger where it goes to the far one. The gradients of x, scale and zero point
    follow by the chain rule; those of scale and zero point are multiplied by LSQ's gradient scale. With ``delta=0``
    this is ``Learnable``.

    Args:
        scheme: how the tensor is quantized.
        observer: supplies the initial range.
        kind: weight or activation.
        axis: channel axis, None for activations.
        grad_factor: see :class:`~fxqat.fake_quantize.learnable.LearnableFakeQuantize`.
        delta: the scaling factor, at least 0. The paper updates it from the trace of the Hessian during training. Here
            it is constant; you may set ``quant.delta`` between epochs.

    Raises:
        ConfigError: ``delta`` is negative or not finite, or ``grad_factor`` is not positive.
    """

    def __init__(
        self,
        scheme: QuantizeScheme,
        observer: Observer,
        kind: str,
        axis: int | None = None,
        grad_factor: float = 1.0,
        delta: float = 0.001,
    ) -> None:
        super().__init__(scheme, observer, kind, axis, grad_factor)
        if not 0.0 <= delta < math.inf:
            raise ConfigError(f"EWGS: delta must be a finite number >= 0, got {delta}")
        self.delta = delta

    def surrogate(self, x: Tensor, used_scale: Tensor) -> Tensor:
        """Clip, round with the scaled gradient, and convert back to real units."""
        grid, low, high = self.learned_steps(x, used_scale)
        steps = torch.clamp(x / grid, low, high)
        per_range = self.delta / (self.scheme.quant_max - self.scheme.quant_min)
        return _ScaledRound.apply(steps, per_range) * grid  # type: ignore[no-any-return]


class _ScaledRound(torch.autograd.Function):
    """Rounding, with the gradient ``g + delta * |g| * (x - round(x))``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, delta: float) -> Tensor:
        rounded = x.round()
        ctx.save_for_backward(x - rounded)
        ctx.delta = delta
        return rounded

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (error,) = ctx.saved_tensors
        return torch.addcmul(grad, grad.abs(), error, value=ctx.delta), None

"""The base of fake-quants that use the gradient of another function, the surrogate."""

from __future__ import annotations

import torch
from torch import Tensor

from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.fake_quantize.soft_gradients import finite_gradient, learned_grid, straight_through
from fxqat.numerics import fake_quantize, per_axis


class SurrogateFakeQuantize(FakeQuantizeBase):
    """Rounds exactly as deployed and has the gradient of :meth:`surrogate`.

    Everything is computed in float32 with plain torch operations, so that a method reads like the formula of its paper.
    It saves more tensors for the backward pass than
    :class:`~fxqat.fake_quantize.straight_through.FakeQuantizeSTE`.

    Args: as :class:`~fxqat.fake_quantize.base.FakeQuantizeBase`.
    """

    def surrogate(self, x: Tensor, used_scale: Tensor) -> Tensor:
        """The differentiable function, with gradients to x and to the learned parameters.

        Args:
            x: float32, any shape.
            used_scale: the scale in use, ``()`` or ``(channels,)``, without a gradient.

        Returns:
            Of x's shape.
        """
        raise NotImplementedError

    def rounded(self, x: Tensor, factor: Tensor | None, used_scale: Tensor | None, input_kept: bool) -> Tensor:
        """Round ``x`` as in :meth:`FakeQuantizeBase.rounded`; ``input_kept`` is ignored."""
        dtype, scheme = x.dtype, self.scheme
        used_scale = self.used_scale() if used_scale is None else used_scale
        x = self.target(x, factor, used_scale).float()
        zero_point = self.qparams()[1] if self.has_zero_point else None
        grid = used_scale if factor is None else used_scale / factor
        x_hat = fake_quantize(x.detach(), grid, zero_point, scheme.quant_min, scheme.quant_max, self.axis)
        if not torch.is_grad_enabled():
            return x_hat.to(dtype)
        if factor is None:
            return straight_through(self.surrogate(x, used_scale), x_hat).to(dtype)
        wide = per_axis(factor, x.dim(), self.axis)
        return straight_through(self.surrogate(x * wide, used_scale) / wide, x_hat).to(dtype)

    def learned_steps(self, x: Tensor, used_scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The scale and the ends of the range, with gradients to ``scale`` and ``zero_point``.

        Returns:
            ``(grid, low, high)``, shaped to broadcast with x: the scale in real units per step, and in steps
            ``quant_min - zero_point`` and ``quant_max - zero_point``.
        """
        scheme, multiplier = self.scheme, self.grad_scale(x)
        grid = learned_grid(self.scale, used_scale, multiplier)
        zero_point = self.qparams()[1]
        if self.zero_point.requires_grad:
            zero_point = straight_through(finite_gradient(self.zero_point, multiplier), zero_point)
        grid, zero_point = (per_axis(values, x.dim(), self.axis) for values in (grid, zero_point))
        return grid, scheme.quant_min - zero_point, scheme.quant_max - zero_point

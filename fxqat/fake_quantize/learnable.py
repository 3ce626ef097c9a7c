"""Learnable: trains the scale (LSQ) and, where the scheme does not fix it, the zero point (LSQ+)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fxqat.errors import ConfigError
from fxqat.fake_quantize.base import WEIGHT, FakeQuantizeBase, Observer
from fxqat.numerics import SCALE_MIN
from fxqat.scheme import QuantizeScheme

START = 1 / 16
"""The relative scale after calibration: about as large as a weight, so that one learning rate fits both. It is a power
of two, so that the calibrated scale comes back exactly. With 1/8, 2 and 3 bits learn worse; with 1/32, 8 bits."""


class LearnableFakeQuantize(FakeQuantizeBase):
    """Fake-quant with a learned step size.

    LSQ, in a unit in which the calibrated scale is ``START``. What is learned is relative to the calibrated range::

        scale = calibrated_scale * relative_scale / START
        zero_point = calibrated_zero_point + shift / START

    The gradients of ``relative_scale`` and ``shift`` are their derivatives by
    :class:`~fxqat.fake_quantize.straight_through.FakeQuantizeSTE`, times ``grad_factor / sqrt(n * quant_max)``, with n
    the number of weights that share a scale or, for activations, the number of features of one sample. The zero point
    is rounded in the forward pass, so that 0 is represented exactly.

    In the paper's unit, that of the tensor, a scale of 0.001 is lost to a few steps of Adam with a rate of 1e-4, and
    where BatchNorm makes the folded weights of a channel small, to SGD as well.

    Args:
        scheme: how the tensor is quantized.
        observer: supplies the initial range.
        kind: weight or activation.
        axis: channel axis, None for activations.
        grad_factor: additional multiplier of the gradients; 1 in the paper.

    Attributes:
        relative_scale: ``()`` or ``(channels,)``, ``START`` after calibration; its sign is ignored.
        shift: of the same shape, 0 after calibration; None where the scheme fixes the zero point.
        unit_scale: of the same shape, the scale at ``relative_scale`` 1, in real units per step.
        calibrated_zero_point: of the same shape, integers.

    Raises:
        ConfigError: ``grad_factor`` is not positive.

    Source: Esser et al. 2020, LSQ (arXiv:1902.08153), section 2.2; Bhalgat et al. 2020, LSQ+ (arXiv:2004.09576).
    """

    learned = True
    unit_scale: Tensor
    calibrated_zero_point: Tensor

    def __init__(
        self, scheme: QuantizeScheme, observer: Observer, kind: str, axis: int | None = None, grad_factor: float = 1.0
    ) -> None:
        super().__init__(scheme, observer, kind, axis)
        if not grad_factor > 0:
            raise ConfigError(f"{type(self).__name__}: grad_factor must be positive, got {grad_factor}")
        self.grad_factor = grad_factor
        scale, zero_point = self.initial_qparams()
        self.register_buffer("unit_scale", torch.empty_like(scale))
        self.register_buffer("calibrated_zero_point", torch.empty_like(zero_point))
        self.relative_scale = nn.Parameter(torch.empty_like(scale))
        self.shift = None if scheme.fixed_zero_point is not None else nn.Parameter(torch.empty_like(zero_point))
        self.store(scale, zero_point)

    @property
    def scale(self) -> Tensor:  # type: ignore[override]
        """The learned scale, with a gradient to ``relative_scale``."""
        # a second pass in a step rescales what is saved for the backward pass of the first one
        is_saved = self.follows and torch.is_grad_enabled()
        return self.relative_scale * (self.unit_scale.clone() if is_saved else self.unit_scale.data)

    def scale_and_unit(self) -> tuple[Tensor, Tensor | None]:
        """``(relative_scale, unit_scale)``, which the kernels multiply."""
        return self.relative_scale, self.unit_scale

    @property
    def zero_point(self) -> Tensor:  # type: ignore[override]
        """The learned zero point, before it is rounded, with a gradient to ``shift``."""
        if self.shift is None:
            return self.calibrated_zero_point
        return torch.add(self.calibrated_zero_point, self.shift, alpha=1 / START)

    @torch.no_grad()
    def store(self, scale: Tensor, zero_point: Tensor) -> None:
        """Take them as calibrated: nothing is learned yet."""
        self.unit_scale.copy_(scale / START)
        self.calibrated_zero_point.copy_(zero_point)
        self.relative_scale.fill_(START)
        if self.shift is not None:
            self.shift.fill_(0.0)

    @torch.no_grad()
    def rescale(self, ratio: Tensor) -> None:
        """Multiply the scale by a ratio; what is learned stays."""
        self.unit_scale.mul_(ratio)

    def take_names(self, state: dict[str, Any], prefix: str) -> None:
        """Take what older versions saved: the scale and the zero point themselves."""
        super().take_names(state, prefix)
        scale, zero_point = state.get(f"{prefix}scale"), state.get(f"{prefix}zero_point")
        if isinstance(scale, Tensor) and isinstance(zero_point, Tensor):
            size = scale.detach().abs()
            taken = {
                "unit_scale": torch.where(size == 0, SCALE_MIN, size) / START,
                "calibrated_zero_point": zero_point.detach(),
                "relative_scale": scale.detach().sign() * START,
            }
            if self.shift is not None:
                taken["shift"] = torch.zeros_like(zero_point)
            for name in ("scale", "zero_point"):
                del state[prefix + name]
            state.update({prefix + name: tensor for name, tensor in taken.items()})

    def grad_scale(self, x: Tensor) -> float:
        """LSQ's gradient scale ``grad_factor / sqrt(n * quant_max)``."""
        shares = self.relative_scale.numel() if self.kind == WEIGHT else (x.shape[0] if x.dim() else 1)
        n = x.numel() // max(1, shares)
        return float(self.grad_factor / (max(1, n) * max(1, self.scheme.quant_max)) ** 0.5)

"""Learnable: trains the scale (LSQ) and, where the scheme does not fix it, the zero point (LSQ+)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fxqat.errors import ConfigError
from fxqat.fake_quantize.base import FakeQuantizeBase, Observer
from fxqat.numerics import SCALE_MIN
from fxqat.scheme import QuantizeScheme
from fxqat.utils.torch_compat import SeesLoading


class LearnableFakeQuantize(FakeQuantizeBase, SeesLoading):
    """Fake-quant with a learned step size.

    What is learned is relative to the calibrated range::

        scale = calibrated_scale * relative_scale / start
        zero_point = calibrated_zero_point + (quant_max - quant_min) * shift / start

    So a step of Adam, whose size does not depend on the gradient's, changes every scale by the same share, and with SGD
    the size of a scale does not matter. The more bits there are, the less is to be gained by another scale, and the
    more is lost by a random one: ``start`` is 1 at 8 bits and falls with the bits, so that scales learn faster. The
    gradients are the derivatives by ``relative_scale`` and ``shift`` of
    :class:`~fxqat.fake_quantize.straight_through.FakeQuantizeSTE`, times ``grad_factor``. The zero point is rounded in
    the forward pass, so that 0 is represented exactly.

    LSQ learns the scale itself, and multiplies its gradient by ``1 / sqrt(n * quant_max)``, with n the number of values
    that share it. A scale of 0.001 is then lost to a few steps of Adam with a rate of 1e-4, and at 8 bits, or where
    BatchNorm makes the folded weights of a channel small, to SGD as well.

    Args:
        scheme: how the tensor is quantized.
        observer: supplies the initial range.
        kind: weight or activation.
        axis: channel axis, None for activations.
        grad_factor: multiplier of the gradients of ``relative_scale`` and ``shift``.

    Attributes:
        start: the value of ``relative_scale`` after calibration, :func:`start_of` the bits.
        relative_scale: ``()`` or ``(channels,)``; its sign is ignored.
        shift: of the same shape, 0 after calibration; None where the scheme fixes the zero point.
        unit_scale: of the same shape, the scale at ``relative_scale`` 1, in real units per step.
        calibrated_zero_point: of the same shape, integers.

    Raises:
        ConfigError: ``grad_factor`` is not positive.

    Source: Esser et al. 2020, LSQ (arXiv:1902.08153), equations 2 and 3; Bhalgat et al. 2020, LSQ+ (arXiv:2004.09576);
    You et al. 2024 (arXiv:2404.16898), who compare learned scales, ends of the range and factors of the ends.
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
        self.start = start_of(scheme.bit_width)
        scale, zero_point = self.initial_qparams()
        self.register_buffer("unit_scale", torch.empty_like(scale))
        self.register_buffer("calibrated_zero_point", torch.empty_like(zero_point))
        self.relative_scale = nn.Parameter(torch.empty_like(scale))
        self.shift = None if scheme.fixed_zero_point is not None else nn.Parameter(torch.empty_like(zero_point))
        self.store(scale, zero_point)

    @property
    def scale(self) -> Tensor:  # type: ignore[override]
        """The learned scale, with a gradient to ``relative_scale``."""
        # a copy: what is saved for the backward pass may be calibrated, or broadcast by DDP, before that pass
        return self.relative_scale * self.unit_scale.clone()

    @property
    def zero_point(self) -> Tensor:  # type: ignore[override]
        """The learned zero point, before it is rounded, with a gradient to ``shift``."""
        if self.shift is None:
            return self.calibrated_zero_point
        levels = self.scheme.quant_max - self.scheme.quant_min
        return torch.add(self.calibrated_zero_point, self.shift, alpha=levels / self.start)

    @torch.no_grad()
    def store(self, scale: Tensor, zero_point: Tensor) -> None:
        """Take them as calibrated: nothing is learned yet."""
        self.unit_scale.copy_(scale / self.start)
        self.calibrated_zero_point.copy_(zero_point)
        self.relative_scale.fill_(self.start)
        if self.shift is not None:
            self.shift.fill_(0.0)

    def take_names(self, state: dict[str, Any], prefix: str) -> None:
        """Take what older versions saved: the scale and the zero point themselves."""
        scale, zero_point = state.get(f"{prefix}scale"), state.get(f"{prefix}zero_point")
        if isinstance(scale, Tensor) and isinstance(zero_point, Tensor):
            size = scale.detach().abs()
            taken = {
                "unit_scale": torch.where(size == 0, SCALE_MIN, size) / self.start,
                "calibrated_zero_point": zero_point.detach(),
                "relative_scale": scale.detach().sign() * self.start,
            }
            if self.shift is not None:
                taken["shift"] = torch.zeros_like(zero_point)
            for name in ("scale", "zero_point"):
                del state[prefix + name]
            state.update({prefix + name: tensor for name, tensor in taken.items()})


def start_of(bits: int) -> float:
    """The value of ``relative_scale`` after calibration: 1/4 for 2 bits, 1/2 for 3 to 5, 1 for 6 to 10, 4 for 16.

    ``2 ** ((bits - 8) / 4)``, rounded to a power of two, so that the calibrated scale comes back exactly. With SGD, the
    steps of a scale are those at a start of 1 times ``1 / start ** 2``; that is about LSQ's ``1 / sqrt(quant_max)``.
    """
    return float(2.0 ** round((bits - 8) / 4))

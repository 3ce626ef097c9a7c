"""Oscillation: detects low-bit weights that jump between two integers, and freezes them.

Nagel et al. 2022, "Overcoming Oscillations in Quantization-Aware Training" (arXiv:2203.11086): section 4.1, equation 4
(frequency), and section 4.3, algorithm 1 (iterative freezing). Its dampening is ``fxqat.tools.training.dampening``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from fxqat.errors import ConfigError
from fxqat.fake_quantize.base import Observer
from fxqat.fake_quantize.learnable import LearnableFakeQuantize
from fxqat.fake_quantize.soft_gradients import learned_grid
from fxqat.numerics import per_axis, quantize
from fxqat.scheme import QuantizeScheme


class OscillationFakeQuantize(LearnableFakeQuantize):
    """``Learnable`` for weights that tracks the integer of every weight over the training steps.

    A weight oscillates in a step if its integer changes in the direction opposite to its last change. With ``o = 1`` in
    such a step, else 0, and m the momentum::

        frequency = m * o + (1 - m) * frequency                      (equation 4)
        average   = m * integer + (1 - m) * average

    Once the frequency of a weight exceeds ``freeze_threshold``, its integer is frozen to ``round(average)`` for good
    (algorithm 1). In training and in the file, the weight is then that integer times the scale, which is still learned.
    Integers are relative to the zero point.

    Every forward pass in training mode is a step; passes in eval mode are not. Nothing synchronizes with the device.

    Args:
        scheme: how the weight is quantized.
        observer: supplies the initial range.
        kind: weight.
        axis: channel axis.
        grad_factor: see :class:`~fxqat.fake_quantize.learnable.LearnableFakeQuantize`.
        momentum: m, in (0, 1].
        freeze_threshold: the frequency above which a weight is frozen, at least 0; infinity freezes none. The paper
            lowers it during training with a cosine schedule: see :func:`set_freeze_threshold`.

    Attributes:
        frequency: of the oscillation of every weight, in the weight's shape (in blocks), as the four that follow. All
            five are None until :meth:`attach`.
        average: the moving average of the integers.
        integer: the last integer, NaN before the first step.
        direction: the sign of the last change, -1, 0 or 1.
        frozen: boolean, which weights are frozen.
        freeze_threshold: ``()``.

    Raises:
        ConfigError: the tensor is an activation, or an argument is out of range.
    """

    weights_only = True
    frequency: Tensor | None
    average: Tensor | None
    integer: Tensor | None
    direction: Tensor | None
    frozen: Tensor | None
    freeze_threshold: Tensor

    def __init__(
        self,
        scheme: QuantizeScheme,
        observer: Observer,
        kind: str,
        axis: int | None = None,
        grad_factor: float = 1.0,
        momentum: float = 0.01,
        freeze_threshold: float = math.inf,
    ) -> None:
        super().__init__(scheme, observer, kind, axis, grad_factor)
        if not 0.0 < momentum <= 1.0:
            raise ConfigError(f"Oscillation: momentum must be in (0, 1], got {momentum}")
        _check_threshold(freeze_threshold)
        self.momentum = momentum
        self.register_buffer("freeze_threshold", torch.tensor(float(freeze_threshold)))
        for name in ("frequency", "average", "integer", "direction", "frozen"):
            self.register_buffer(name, None)

    def attach(self, weight: Tensor) -> None:
        """Allocate the state of every weight."""
        zeros = torch.zeros_like(weight, dtype=torch.float32, requires_grad=False)
        self.frequency, self.average, self.direction = zeros, zeros.clone(), zeros.clone()
        self.integer = torch.full_like(zeros, math.nan)
        self.frozen = torch.zeros_like(zeros, dtype=torch.bool)

    def target(self, x: Tensor, factor: Tensor | None = None, used_scale: Tensor | None = None) -> Tensor:
        """The weight, with every frozen value replaced by its integer times the scale."""
        if self.integer is None or self.frozen is None:
            return x
        used_scale = self.used_scale() if used_scale is None else used_scale
        grid = learned_grid(self.scale, used_scale, self.grad_scale(x))
        grid = per_axis(grid if factor is None else grid / factor, x.dim(), self.axis)
        # copies: the state changes before the backward pass if a layer is called twice
        return torch.where(self.frozen.clone(), self.integer.clone() * grid, x).to(x.dtype)

    def rounded(self, x: Tensor, factor: Tensor | None, used_scale: Tensor | None, input_kept: bool) -> Tensor:
        """Update the state in training mode, then round as ``Learnable`` does."""
        if self.training:
            self._count(x, factor, used_scale)
        return super().rounded(x, factor, used_scale, input_kept)

    @torch.no_grad()
    def _count(self, x: Tensor, factor: Tensor | None, used_scale: Tensor | None) -> None:
        if self.frequency is None:
            self.attach(x)
        state = (self.frequency, self.average, self.integer, self.direction, self.frozen)
        frequency, average, last, direction, frozen = (tensor for tensor in state if tensor is not None)
        q = torch.where(frozen, last, self._integers(x, factor, used_scale)).float()  # of a float64 weight too
        fresh = last.isnan()
        change = torch.where(fresh, 0.0, torch.sign(q - last))
        oscillates = change * direction < 0
        frequency.lerp_(oscillates.float(), self.momentum)
        average.copy_(torch.where(fresh, q, torch.lerp(average, q, self.momentum)))
        direction.copy_(torch.where(change == 0, direction, change))
        freezes = (frequency > self.freeze_threshold).logical_and_(~frozen)
        last.copy_(torch.where(freezes, average.round(), q))
        frozen.logical_or_(freezes)

    def _integers(self, x: Tensor, factor: Tensor | None, used_scale: Tensor | None) -> Tensor:
        """The integers, relative to the zero point."""
        scale, zero_point = self.qparams()
        scale = scale if used_scale is None else used_scale
        grid = scale if factor is None else scale / factor
        q = quantize(x, grid, zero_point, self.scheme.quant_min, self.scheme.quant_max, self.axis)
        return q - per_axis(zero_point, x.dim(), self.axis)


def frequency(model: nn.Module) -> dict[str, Tensor]:
    """How often each weight oscillates, by the path of its fake-quant.

    The paper's tables give the share of oscillating weights:
    ``{name: f.gt(0.005).float().mean() for name, f in frequency(model).items()}``.

    Returns:
        Copies in the shapes of the weights, those of blocks in blocks, on their device.

    Source: Nagel et al. 2022 (arXiv:2203.11086), equation 4.
    """
    found = ((name, quant.frequency) for name, quant in _counting(model))
    return {name: values.clone() for name, values in found if values is not None}


def frozen(model: nn.Module) -> dict[str, Tensor]:
    """Which weights are frozen: boolean tensors, otherwise as :func:`frequency`."""
    found = ((name, quant.frozen) for name, quant in _counting(model))
    return {name: values.clone() for name, values in found if values is not None}


def set_freeze_threshold(model: nn.Module, threshold: float) -> None:
    """Set the frequency above which weights are frozen from now on; frozen weights stay frozen.

    Args:
        model: a prepared model.
        threshold: at least 0; infinity freezes nothing more.

    Raises:
        ConfigError: the threshold is negative or NaN, or no weight has the ``Oscillation`` fake-quant.
    """
    _check_threshold(threshold)
    quants = list(_counting(model))
    if not quants:
        raise ConfigError(
            "no weight of the model has the Oscillation fake-quant: prepare the model with "
            "{'extra_qconfig_dict': {'w_fakequantize': 'Oscillation'}}"
        )
    for _, quant in quants:
        quant.freeze_threshold.fill_(threshold)


def _counting(model: nn.Module) -> Iterator[tuple[str, OscillationFakeQuantize]]:
    return ((name, quant) for name, quant in model.named_modules() if isinstance(quant, OscillationFakeQuantize))


def _check_threshold(threshold: float) -> None:
    if not threshold >= 0:
        raise ConfigError(f"Oscillation: freeze_threshold must be a number >= 0 or infinity, got {threshold}")

"""Learn the rounding of the weights in one segment, and the scales of its activations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxqat.errors import ConfigError
from fxqat.tools.post_training.adaround import AdaRoundFakeQuantize
from fxqat.tools.post_training.layer_weights import LayerWeight, weights_of
from fxqat.tools.post_training.segments import Segment, Values
from fxqat.utils.contexts import hooked
from fxqat.utils.tensors import flatten_tensors


@dataclass(frozen=True, kw_only=True)
class LearnedRounding:
    """Settings of the learned rounding.

    Args:
        iterations: training steps per segment, each on one batch; 0: nothing is learned.
        rounding_lr: learning rate of the rounding variables (Adam).
        scale_lr: learning rate of the activation scales, relative to each scale; 0: they are not learned.
        drop: probability that an activation stays float in a step, in steps of 1/256 (at least 1/256 unless it is 0).
        regularization: weight of AdaRound's regularization (a mean over the weights) relative to the error, which is
            scaled to 1 before learning.
        beta: exponent of the regularization at the start and at the end; it falls after ``warmup``.
        warmup: fraction of the iterations without regularization.

    Raises:
        ConfigError: a value is out of range.
    """

    iterations: int = 1000
    rounding_lr: float = 3e-2
    scale_lr: float = 1e-3
    drop: float = 0.0
    regularization: float = 10.0
    beta: tuple[float, float] = (20.0, 2.0)
    warmup: float = 0.2

    def __post_init__(self) -> None:
        if not (0.0 <= self.drop <= 1.0 and 0.0 <= self.warmup < 1.0):
            raise ConfigError(f"drop must be in [0, 1] and warmup in [0, 1), got {self.drop} and {self.warmup}")
        if not (self.rounding_lr > 0 and self.scale_lr >= 0 and self.regularization >= 0):
            raise ConfigError(
                "rounding_lr must be positive, scale_lr and regularization must not be negative, got "
                f"{self.rounding_lr}, {self.scale_lr} and {self.regularization}"
            )

    def scale_lr_factor(self, step: int) -> float:
        """Factor on the learning rate of the scales at a step: half a cosine from 1 to 0."""
        return 0.5 * (1 + math.cos(math.pi * step / self.iterations))

    def beta_at(self, step: int) -> float | None:
        """Exponent of the regularization at a step; None in the warm-up."""
        first = self.warmup * self.iterations
        if step < first:
            return None
        start, end = self.beta
        return end + 0.5 * (start - end) * (1 + math.cos(math.pi * (step - first) / (self.iterations - first)))


def learn_rounding(
    segment: Segment,
    float_inputs: Sequence[Values],
    quant_inputs: Sequence[Values],
    targets: Sequence[Values],
    setting: LearnedRounding,
    generator: torch.Generator,
) -> None:
    """Learn the rounding and the scales of a segment, and write the result into its weights and scales.

    Args:
        segment: a calibrated segment; none of its parameters requires a gradient.
        float_inputs: its inputs in the float model, batch by batch.
        quant_inputs: its inputs in the quantized model.
        targets: its outputs in the float model.
        setting: how to learn.
        generator: draws the batches.
    """
    weights = [weight for layer in segment.own_layers.values() for weight in weights_of(layer)]
    if not weights:
        return
    segment.set_quantized(True)
    with torch.no_grad():
        pairs = zip(quant_inputs, targets, strict=True)
        noise = torch.stack([_distance(segment(values), target) for values, target in pairs]).mean().clamp_min(1e-12)
    with ExitStack() as stack:
        soft = [stack.enter_context(_soft_rounding(weight)) for weight in weights]
        scales = _learnable_scales(segment) if setting.scale_lr else []
        quantizers = segment.quantizers.values() if setting.drop else ()
        stack.enter_context(hooked(quantizers, lambda _, args, output: _mix_randomly(output, args[0], setting.drop)))
        groups: list[dict[str, Any]] = [{"params": [layer.rounding for layer in soft], "lr": setting.rounding_lr}]
        groups += [{"params": [scale], "lr": setting.scale_lr * float(scale.detach().abs().mean())} for scale in scales]
        optimizer = torch.optim.Adam(groups)
        rates: list[Callable[[int], float]] = [lambda step: 1.0, *[setting.scale_lr_factor] * len(scales)]
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rates)
        for step in range(setting.iterations):
            i = int(torch.randint(len(quant_inputs), (), generator=generator))
            inputs = _mixed_inputs(quant_inputs[i], float_inputs[i], setting.drop)
            loss = _distance(segment(inputs), targets[i]) / noise
            beta = setting.beta_at(step)
            if beta is not None:
                total = torch.stack([layer.regularization(beta) for layer in soft]).sum()
                loss = loss + setting.regularization * total / sum(layer.rounding.numel() for layer in soft)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    for scale in scales:
        scale.requires_grad_(False)


@contextmanager
def _soft_rounding(weight: LayerWeight) -> Iterator[AdaRoundFakeQuantize]:
    """Replace a weight's fake-quant by the learned rounding; afterwards write the result into the weight."""
    quant = weight.quant
    soft = AdaRoundFakeQuantize(quant, weight.value())
    weight.quant = soft
    try:
        yield soft
    finally:
        weight.quant = quant
    weight.write_(soft.decided(weight.value().shape))


def _learnable_scales(segment: Segment) -> list[Tensor]:
    """The parameters of the activation quantizers except zero points; from now on they require gradients."""
    named = [pair for quant in segment.quantizers.values() for pair in quant.named_parameters()]
    return [parameter.requires_grad_(True) for name, parameter in named if name != "shift"]


def _mixed_inputs(quant_inputs: Values, float_inputs: Values, probability: float) -> dict[str, Any]:
    """The quantized model's inputs with random elements from the float model's."""

    def mix(a: Any, b: Any) -> Any:
        if not probability or not isinstance(a, Tensor) or not a.is_floating_point():
            return a
        return _mix_randomly(a, b, probability)

    return {name: mix(value, float_inputs[name]) for name, value in quant_inputs.items()}


def _mix_randomly(a: Tensor, b: Tensor, probability: float) -> Tensor:
    """Each element is taken from ``b`` with a probability, else from ``a``."""
    # random bytes take a quarter of the time of random floats
    words = torch.randint(-(2**63), 2**63 - 1, (a.numel() // 8 + 1,), device=a.device)
    chosen = words.view(torch.uint8)[: a.numel()].view(a.shape) <= max(1, round(256 * probability)) - 1
    return torch.lerp(a, b, chosen.to(a.dtype))


def _distance(values: Values, targets: Values) -> Tensor:
    """Mean squared error relative to the mean square, summed over the values."""
    total = torch.zeros(())
    for a, b in zip(flatten_tensors(values), flatten_tensors(targets), strict=True):
        if b.is_floating_point():
            total = total.to(b.device) + (a - b).square().mean() / b.square().mean().clamp_min(1e-12)
    return total

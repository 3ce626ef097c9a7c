"""The loop that learns the rounding of the weights in one segment, and the scales of its activations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxqat.errors import ConfigError
from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.nn.fold import bn_factor
from fxqat.nn.qat import QATLayer
from fxqat.tools.post_training.adaround import AdaRoundFakeQuantize
from fxqat.tools.post_training.segments import Segment, Values
from fxqat.utils.tensors import flatten_tensors


@dataclass(frozen=True)
class Reconstruction:
    """A setting of the loop.

    Args:
        max_layers: weighted layers in a segment, see :func:`fxqat.tools.post_training.segments.split`; 1 is layer by layer.
        gptq: make up for the rounding of each weight by the others first, and choose its scale
            (:mod:`fxqat.tools.post_training.gptq`).
        damping: of that, as a part of the mean square of what a layer reads.
        iterations: steps for each segment, of one batch each; 0, with ``gptq`` only: nothing is learned.
        rounding_lr: learning rate of the rounding variables (Adam).
        scale_lr: learning rate of activation scales, as a part of each scale; 0: they are not learned.
        drop: probability that an activation stays float in a step, to 1/256; 0 only if it is 0.
        regularization: weight of AdaRound's regularization, the mean over the weights, against the error, which counts
            as 1 before anything is learned.
        beta: its exponent in the beginning and in the end; it begins to fall after ``warmup``.
        warmup: part of the iterations without regularization.

    Raises:
        ConfigError: a value is out of its range.
    """

    max_layers: int = 6
    gptq: bool = False
    damping: float = 0.1
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
        if not (self.iterations >= (0 if self.gptq else 1) and self.damping > 0):
            raise ConfigError(
                "iterations (at least 1, or 0 with gptq=True) and damping must be positive, got "
                f"{self.iterations} and {self.damping}"
            )
        if not (self.rounding_lr > 0 and self.scale_lr >= 0 and self.regularization >= 0):
            raise ConfigError(
                "rounding_lr must be positive, scale_lr and regularization not negative, got "
                f"{self.rounding_lr}, {self.scale_lr} and {self.regularization}"
            )

    def rest_at(self, step: int) -> float:
        """What is left at a step of the learning rate of scales: half a cosine."""
        return 0.5 * (1 + math.cos(math.pi * step / self.iterations))

    def beta_at(self, step: int) -> float | None:
        """The exponent of the regularization at a step, None in the warm-up."""
        first = self.warmup * self.iterations
        if step < first:
            return None
        start, end = self.beta
        return end + 0.5 * (start - end) * (1 + math.cos(math.pi * (step - first) / (self.iterations - first)))


def learn(
    segment: Segment,
    exact: Sequence[Values],
    rounded: Sequence[Values],
    targets: Sequence[Values],
    setting: Reconstruction,
    generator: torch.Generator,
) -> None:
    """Learn, and write what was learned into the weights and scales of the segment.

    Args:
        segment: a calibrated one; no parameter of it wants a gradient.
        exact: what it reads in the float model, batch by batch.
        rounded: what it reads in the quantized model.
        targets: what it gives in the float model.
        setting: how.
        generator: of the choice of batches.
    """
    segment.switch(quantized=True)
    with torch.no_grad():
        pairs = zip(rounded, targets, strict=True)
        noise = torch.stack([_distance(segment(values), target) for values, target in pairs]).mean().clamp_min(1e-12)
    with ExitStack() as stack:
        soft = [stack.enter_context(_softened(layer)) for layer in segment.layers.values()]
        scales = _scales(segment) if setting.scale_lr else []
        for quant in segment.quantizers.values() if setting.drop else ():
            stack.enter_context(_dropping(quant, setting.drop))
        groups: list[dict[str, Any]] = [{"params": [layer.rounding for layer in soft], "lr": setting.rounding_lr}]
        groups += [{"params": [scale], "lr": setting.scale_lr * float(scale.detach().abs().mean())} for scale in scales]
        optimizer = torch.optim.Adam(groups)
        rates: list[Callable[[int], float]] = [lambda step: 1.0, *[setting.rest_at] * len(scales)]
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rates)
        for step in range(setting.iterations):
            i = int(torch.randint(len(rounded), (), generator=generator))
            loss = _distance(segment(_mixed(rounded[i], exact[i], setting.drop)), targets[i]) / noise
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
def _softened(layer: QATLayer) -> Iterator[AdaRoundFakeQuantize]:
    """The learned rounding in the place of a layer's weight fake-quant; afterwards it is in the layer's weight."""
    weight, _ = layer.folded()
    quant = layer.weight_fake_quant
    soft = AdaRoundFakeQuantize(quant, weight)
    layer.weight_fake_quant = soft
    try:
        yield soft
    finally:
        layer.weight_fake_quant = quant
    write_folded(layer, soft.rounded())


@torch.no_grad()
def write_folded(layer: QATLayer, weight: Tensor) -> None:
    """Make a layer's weight one that, folded with its BatchNorm, is a given one."""
    if layer.bn is not None:
        factor = layer.op.per_output_channel(bn_factor(layer.bn), weight)
        weight = torch.where(factor == 0, layer.weight, weight / factor)
    layer.weight.copy_(weight)


def _scales(segment: Segment) -> list[Tensor]:
    """What is learned of the activation quantizers' scales, and wants gradients from now on."""
    named = [pair for quant in segment.quantizers.values() for pair in quant.named_parameters()]
    return [parameter.requires_grad_(True) for name, parameter in named if name != "zero_point"]


@contextmanager
def _dropping(quant: FakeQuantizeBase, share: float) -> Iterator[None]:
    """Leave a random part of what a quantizer rounds as it is."""

    def drop(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return _some_of(output, args[0], share)

    handle = quant.register_forward_hook(drop)
    try:
        yield
    finally:
        handle.remove()


def _mixed(rounded: Values, exact: Values, share: float) -> dict[str, Any]:
    """A random part of the values as the float model has them."""

    def mix(a: Any, b: Any) -> Any:
        if not share or not isinstance(a, Tensor) or not a.is_floating_point():
            return a
        return _some_of(a, b, share)

    return {name: mix(value, exact[name]) for name, value in rounded.items()}


def _some_of(a: Tensor, b: Tensor, share: float) -> Tensor:
    """A value of b with a probability, else that of a, for each place by itself."""
    # random bytes take a quarter of the time of random numbers
    words = torch.randint(-(2**63), 2**63 - 1, (a.numel() // 8 + 1,), device=a.device)
    chosen = words.view(torch.uint8)[: a.numel()].view(a.shape) <= max(1, round(256 * share)) - 1
    return torch.lerp(a, b, chosen.to(a.dtype))


def _distance(values: Values, targets: Values) -> Tensor:
    """Mean squared error relative to the mean square, added up over the values."""
    total = torch.zeros(())
    for a, b in zip(flatten_tensors(values), flatten_tensors(targets), strict=True):
        if b.is_floating_point():
            total = total.to(b.device) + (a - b).square().mean() / b.square().mean().clamp_min(1e-12)
    return total

"""What a layer reads, as second moments, and the weight with which it would give what the float model gives.

With ``X`` what a layer reads in the float model and ``X'`` what it reads in the quantized one, columns being samples::

    H  = X' X'^T,   C = (X - X') X'^T
    W* = W + W C (H + lambda I)^-1             (where |W X - W* X'|^2 + lambda |W - W*|^2 is least)

This is a ridge regression (Hoerl and Kennard 1970, doi:10.1080/00401706.1970.10488634). Few samples can be met exactly,
and others are not then (Cha et al. 2026, arXiv:2602.05902, have another remedy). So lambda is that of :data:`DAMPINGS`,
or infinite, with which the ``W*`` of each half of the samples does best on the other half. Where the biases are
corrected afterwards, ``X`` and ``X'`` are taken without their means.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fxqat.nn.qat import QATLayer
from fxqat.tools.post_training.layer_matrices import columns
from fxqat.tools.post_training.segments import Segment, Values

DAMPINGS = (10.0, 3.0, 1.0, 0.3, 0.1, 0.03, 0.01)
"""Values of lambda, as parts of the mean of H's diagonal."""


@dataclass(frozen=True)
class Moments:
    """Sums over samples, in float64.

    Args:
        count: of the samples.
        gram: of ``X' X'^T``, ``(groups, columns, columns)``.
        cross: of ``(X - X') X'^T``, of the same shape.
        mean: of ``X'``, ``(groups, columns, 1)``.
        shift: of ``X - X'``, of the same shape.
    """

    count: int
    gram: Tensor
    cross: Tensor
    mean: Tensor
    shift: Tensor

    @classmethod
    def of(cls, x: Tensor, missing: Tensor) -> Moments:
        """Those of ``X'`` and ``X - X'``, both ``(groups, columns, samples)``."""
        means = (values.double().sum(-1, keepdim=True) for values in (x, missing))
        return cls(x.shape[-1], (x @ x.mT).double(), (missing @ x.mT).double(), *means)

    def __add__(self, other: Moments) -> Moments:
        """Those of all samples."""
        return Moments(
            self.count + other.count,
            self.gram + other.gram,
            self.cross + other.cross,
            self.mean + other.mean,
            self.shift + other.shift,
        )

    def averages(self, centred: bool) -> tuple[Tensor, Tensor]:
        """``H`` and ``C`` of one sample on average, with the means or without."""
        count = max(1, self.count)
        if not centred:
            return self.gram / count, self.cross / count
        around = self.mean.mT / count
        return (self.gram - self.mean @ around) / count, (self.cross - self.shift @ around) / count


def halves(
    segment: Segment, path: str, reference: Segment, rounded: Sequence[Values], exact: Sequence[Values]
) -> tuple[Moments, Moments]:
    """The moments of the first and of the second half of what a layer reads in each call.

    Args:
        segment: a calibrated one.
        path: of the layer.
        reference: the same segment in the float model.
        rounded: what the segment reads in the quantized model, batch by batch; not empty.
        exact: what it reads in the float model.
    """
    layer = segment.layers[path]
    weight, _ = layer.folded()
    samples = _samples(segment, path, rounded, quantized=True)
    references = _samples(reference, path, exact, quantized=False)
    found: list[Moments] = []
    for read, wanted in zip(samples, references, strict=True):
        x, missing = (columns(layer.op, weight, values) for values in (read, wanted - read))
        middle = x.shape[-1] // 2
        parts = [Moments.of(x[..., part], missing[..., part]) for part in (slice(middle), slice(middle, None))]
        found = [a + b for a, b in zip(found, parts, strict=True)] if found else parts
    first, second = found
    return first, second


def towards_float(weight: Tensor, first: Moments, second: Moments, centred: bool) -> Tensor:
    """The weight with which a layer would give what the float model gives, ``W*``.

    Args:
        weight: ``(groups, rows, columns)``.
        first: the moments of one half of the samples.
        second: those of the other half.
        centred: whether the layer's bias is corrected afterwards.
    """
    a, b = first.averages(centred), second.averages(centred)
    left = [0.0]  # without a step
    for damping in DAMPINGS:
        steps = ((_step(weight, *learned, damping), *other) for learned, other in ((a, b), (b, a)))
        # |W (X - X') - S X'|^2 of a step S, without the first square
        left.append(sum(float(((s @ gram) * s - 2 * s * (weight @ cross)).sum()) for s, gram, cross in steps))
    best = left.index(min(left))
    return weight + _step(weight, *(first + second).averages(centred), DAMPINGS[best - 1]) if best else weight


def damped(gram: Tensor, damping: float) -> Tensor:
    """A gram with a part of the mean of its diagonal added to that, so that it has an inverse."""
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    added = (damping * diagonal.mean(-1, keepdim=True)).clamp_min(torch.finfo(gram.dtype).tiny ** 0.5)
    return gram + torch.diag_embed(added.expand_as(diagonal))


def _step(weight: Tensor, gram: Tensor, cross: Tensor, damping: float) -> Tensor:
    """``W* - W``."""
    step: Tensor = torch.linalg.solve(damped(gram, damping), (weight @ cross).mT).mT
    return step


def _samples(segment: Segment, path: str, batches: Sequence[Values], quantized: bool) -> Iterator[Tensor]:
    """What a layer reads, call by call."""
    with _recorded(segment.layers[path]) as inputs:
        for values in batches:
            segment.switch(quantized)
            segment(values)
            yield from inputs
            inputs.clear()


@contextmanager
def _recorded(layer: QATLayer) -> Iterator[list[Tensor]]:
    """The inputs of a layer, as it is called."""
    inputs: list[Tensor] = []

    def record(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        inputs.append(args[0])

    handle = layer.register_forward_pre_hook(record)
    try:
        yield inputs
    finally:
        handle.remove()

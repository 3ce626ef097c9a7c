"""Second moments of a layer's inputs, and the weight that best reproduces the float model's outputs.

``X`` holds the layer's inputs in the float model and ``X'`` those in the quantized model, one column per sample::

    H  = X' X'^T,   C = (X - X') X'^T
    W* = W + W C (H + lambda I)^-1             (minimizes |W X - W* X'|^2 + lambda |W - W*|^2)

This is a ridge regression (Hoerl and Kennard 1970, doi:10.1080/00401706.1970.10488634). With few samples it overfits
(Cha et al. 2026, arXiv:2602.05902, have another remedy). So lambda is chosen by cross-validation: of :data:`DAMPINGS`
and infinity, the one with which the ``W*`` of each half of the samples has the least error on the other half. If biases
are corrected afterwards, the means of ``X`` and ``X'`` are subtracted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from fxqat.tools.post_training.layer_weights import LayerWeight, weights_of
from fxqat.tools.post_training.segments import Segment, Values
from fxqat.utils.contexts import hooked

DAMPINGS = (10.0, 3.0, 1.0, 0.3, 0.1, 0.03, 0.01)
"""Candidates for lambda, relative to the mean of H's diagonal."""


@dataclass(frozen=True)
class Moments:
    """Sums over samples, in float64.

    Args:
        count: number of samples.
        gram: sum of ``X' X'^T``, ``(groups, columns, columns)``.
        cross: sum of ``(X - X') X'^T``, of the same shape.
        mean: sum of ``X'``, ``(groups, columns, 1)``.
        shift: sum of ``X - X'``, of the same shape.
    """

    count: int
    gram: Tensor
    cross: Tensor
    mean: Tensor
    shift: Tensor

    @classmethod
    def of(cls, x: Tensor, difference: Tensor) -> Moments:
        """The moments of ``X'`` and ``X - X'``, both ``(groups, columns, samples)``."""
        sums = (values.double().sum(-1, keepdim=True) for values in (x, difference))
        return cls(x.shape[-1], (x @ x.mT).double(), (difference @ x.mT).double(), *sums)

    def __add__(self, other: Moments) -> Moments:
        """The moments of the samples of both."""
        return Moments(
            self.count + other.count,
            self.gram + other.gram,
            self.cross + other.cross,
            self.mean + other.mean,
            self.shift + other.shift,
        )

    def averages(self, centred: bool) -> tuple[Tensor, Tensor]:
        """``H`` and ``C`` averaged over the samples; ``centred`` subtracts the means."""
        count = max(1, self.count)
        if not centred:
            return self.gram / count, self.cross / count
        mean = self.mean.mT / count
        return (self.gram - self.mean @ mean) / count, (self.cross - self.shift @ mean) / count


def moments_of_halves(
    segment: Segment,
    path: str,
    float_segment: Segment,
    quant_inputs: Sequence[Values],
    float_inputs: Sequence[Values],
    place: int = 0,
) -> tuple[Moments, Moments]:
    """The moments of a layer's inputs: of the first and of the second half of the samples of each call.

    Args:
        segment: a calibrated segment.
        path: path of the layer.
        float_segment: the same segment in the float model.
        quant_inputs: the segment's inputs in the quantized model, batch by batch; not empty.
        float_inputs: its inputs in the float model.
        place: which of the layer's weights, in the order of
            :func:`~fxqat.tools.post_training.layer_weights.weights_of`.
    """
    ours = _reads(segment, path, place, quant_inputs, quantized=True)
    theirs = _reads(float_segment, path, place, float_inputs, quantized=False)
    found: list[Moments] = []
    weight = weights_of(segment.layers[path])[place]
    for read, target in zip(ours, theirs, strict=True):
        halves = _halves(weight, read, target - read)
        found = [a + b for a, b in zip(found, halves, strict=True)] if found else halves
    first, second = found
    return first, second


def _halves(weight: LayerWeight, read: Tensor, difference: Tensor) -> list[Moments]:
    """The moments of the two halves of one call's samples."""
    pieces = list(zip(weight.pieces(read), weight.pieces(difference), strict=True))
    if len(pieces) % 2:
        x, shift = weight.columns(read), weight.columns(difference)
        middle = x.shape[-1] // 2
        return [Moments.of(x[..., half], shift[..., half]) for half in (slice(middle), slice(middle, None))]
    found = [Moments.of(*map(weight.columns, piece)) for piece in pieces]
    middle = len(pieces) // 2
    return [reduce(Moments.__add__, half) for half in (found[:middle], found[middle:])]


def weight_towards_float(weight: Tensor, first: Moments, second: Moments, centred: bool) -> Tensor:
    """``W*``: the weight that best reproduces the float model's outputs.

    Args:
        weight: ``(groups, rows, columns)``.
        first: the moments of one half of the samples.
        second: the moments of the other half.
        centred: whether the layer's bias is corrected afterwards.
    """
    a, b = first.averages(centred), second.averages(centred)
    errors = [0.0]  # of an infinite lambda: W* = W
    for damping in DAMPINGS:
        steps = ((_step(weight, *learned, damping), *other) for learned, other in ((a, b), (b, a)))
        # |W (X - X') - S X'|^2 of a step S, without the term that does not depend on S
        errors.append(sum(float(((s @ gram) * s - 2 * s * (weight @ cross)).sum()) for s, gram, cross in steps))
    best = errors.index(min(errors))
    return weight + _step(weight, *(first + second).averages(centred), DAMPINGS[best - 1]) if best else weight


def damped(gram: Tensor, damping: float) -> Tensor:
    """``H + lambda I``, which has an inverse; lambda is ``damping`` times the mean of H's diagonal."""
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    added = (damping * diagonal.mean(-1, keepdim=True)).clamp_min(torch.finfo(gram.dtype).tiny ** 0.5)
    return gram + torch.diag_embed(added.expand_as(diagonal))


def _step(weight: Tensor, gram: Tensor, cross: Tensor, damping: float) -> Tensor:
    """``W* - W``."""
    step: Tensor = torch.linalg.solve(damped(gram, damping), (weight @ cross).mT).mT
    return step


def _reads(segment: Segment, path: str, place: int, batches: Sequence[Values], quantized: bool) -> Iterator[Tensor]:
    """The values that one of a layer's weights multiplies, call by call."""
    weight = weights_of(segment.layers[path])[place]
    found: list[Tensor] = []

    def read(_: object, args: tuple[object, ...], kwargs: dict[str, object], output: object) -> None:
        found.append(weight.read(args, kwargs, output))

    with hooked([weight.layer], read, with_kwargs=True):
        for values in batches:
            segment.set_quantized(quantized)
            segment(values)
            yield from found
            found.clear()

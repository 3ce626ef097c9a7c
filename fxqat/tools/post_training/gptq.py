"""GPTQ: the error of each rounded weight is made up for by the weights that are rounded behind it.

Source: Frantar et al. 2022 (arXiv:2210.17323), equations 2 and 3 and section 3.3. With ``X`` what a layer reads in the
quantized model, columns being samples::

    H = X X^T + lambda I                       (damped: lambda is a part of the mean of H's diagonal)
    U^T U = H^-1, U upper triangular
    for each column j:  E = (w_j - quant(w_j)) / U_jj;   W_k = W_k - E U_jk  for k > j

Columns go by falling ``H_jj``. It starts from ``W*``, with which the layer would give what the float model gives
(:mod:`fxqat.tools.post_training.input_moments`); Li et al. 2025 (GPTAQ, arXiv:2504.02692) have the same aim column by column.

Of each scale some multiples (:data:`FACTORS`) are tried, and that is taken which leaves the least error, which is
``(Q - W*) H (Q - W*)^T`` for the integers of a row times their scale, ``Q``. Behind that, each column is rounded again
where the error is least with all others as they are (coordinate descent, as Behdin et al. 2023, arXiv:2309.01885)::

    w_j = q_j - ((Q - W*) H)_j / H_jj
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fxqat.numerics import per_axis, valid_scale
from fxqat.tools.post_training.input_moments import damped, halves, towards_float
from fxqat.tools.post_training.layer_matrices import from_rows, rows, summed_along
from fxqat.tools.post_training.segments import Segment, Values

FACTORS = (1.0, *(k / 20 for k in range(12, 29) if k != 20))
"""What a scale is multiplied by; of equal errors the first is taken."""

PASSES = 2
"""Of the coordinate descent, through all columns."""

BLOCK = 64
"""Columns after which those behind them are updated, all at once (section 3.3, step 2)."""


@torch.no_grad()
def compensated(
    segment: Segment,
    path: str,
    reference: Segment,
    rounded: Sequence[Values],
    exact: Sequence[Values],
    damping: float,
    centred: bool,
) -> tuple[Tensor, Tensor]:
    """The folded weight of a layer that, rounded to the nearest, is what was found, and its scale.

    Args:
        segment: a calibrated one, in which the layers before this one are done.
        path: of the layer.
        reference: the same segment in the float model.
        rounded: what the segment reads in the quantized model, batch by batch.
        exact: what it reads in the float model.
        damping: lambda, as a part of the mean of H's diagonal.
        centred: whether the layer's bias is corrected afterwards.

    Returns:
        The weight of which each element is as it was when it was rounded, of the weight's shape, and the scale in use,
        of the scale's shape.
    """
    layer = segment.layers[path]
    op, (weight, _), quant = layer.op, layer.folded(), layer.weight_fake_quant
    first, second = halves(segment, path, reference, rounded, exact)
    gram, _ = (first + second).averages(centred)
    wanted = towards_float(rows(op, weight).double(), first, second, centred)
    error = QuadraticError.around(wanted, damped(gram, damping))
    scale, zero_point = quant.qparams()

    def grid(scale: Tensor) -> Grid:
        values = (per_axis(t, weight.dim(), quant.axis).expand_as(weight) for t in (scale, zero_point))
        step, zero = (rows(op, t)[..., :1].double() for t in values)
        return Grid(step, zero, quant.scheme.quant_min, quant.scheme.quant_max)

    scales = torch.stack([valid_scale(scale * factor, quant.scale_bits) for factor in FACTORS])
    left = [error.left(gptq(error, values), values) for values in map(grid, scales)]
    axis = quant.axis if scale.dim() else None
    best = torch.stack([summed_along(op, values, weight.shape, axis) for values in left]).argmin(0)
    scale = scales.gather(0, best[None])[0]
    found = descended(error, gptq(error, grid(scale)), grid(scale))
    return from_rows(op, found, weight.shape).to(weight.dtype), scale


@dataclass(frozen=True)
class Grid:
    """The values that the rows of some matrices can take.

    Args:
        scale: ``(groups, rows, 1)``.
        zero_point: of the same shape.
        quant_min: the smallest integer.
        quant_max: the largest one.
    """

    scale: Tensor
    zero_point: Tensor
    quant_min: int
    quant_max: int

    def nearest(self, weight: Tensor) -> Tensor:
        """The nearest value of each element of ``(groups, rows, any)``."""
        integers = torch.clamp(torch.round(weight / self.scale) + self.zero_point, self.quant_min, self.quant_max)
        return (integers - self.zero_point) * self.scale


@dataclass(frozen=True)
class QuadraticError:
    """The mean squared error of what some matrices give, as a function of the matrices.

    Args:
        wanted: where it is least, ``W*``, ``(groups, rows, columns)``.
        gram: ``H``, damped, ``(groups, columns, columns)``.
        order: of the columns in GPTQ, ``(groups, columns)``.
        upper: ``U`` of the columns in this order, of the gram's shape.
    """

    wanted: Tensor
    gram: Tensor
    order: Tensor
    upper: Tensor

    @classmethod
    def around(cls, wanted: Tensor, gram: Tensor) -> QuadraticError:
        """From the first two of its arguments."""
        order = gram.diagonal(dim1=-2, dim2=-1).argsort(-1, descending=True)
        ordered = gram.gather(-1, order[:, None, :].expand_as(gram)).gather(-2, order[:, :, None].expand_as(gram))
        upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(ordered)), upper=True)
        return cls(wanted, gram, order, upper)

    def left(self, weight: Tensor, grid: Grid) -> Tensor:
        """What is left of it when a weight is rounded, ``(groups, rows)``."""
        distance = grid.nearest(weight) - self.wanted
        return ((distance @ self.gram) * distance).sum(-1)


def gptq(error: QuadraticError, grid: Grid) -> Tensor:
    """The weight as each column of it was when it was rounded, ``(groups, rows, columns)``."""
    order = error.order[:, None, :].expand_as(error.wanted)
    weight = error.wanted.gather(-1, order)
    for start in range(0, weight.shape[-1], BLOCK):
        end = start + BLOCK
        block, corner = weight[..., start:end], error.upper[..., start:end, start:end]
        errors = torch.empty_like(block)
        for j in range(block.shape[-1]):
            this, behind = slice(j, j + 1), slice(j + 1, None)
            errors[..., this] = (block[..., this] - grid.nearest(block[..., this])) / corner[..., this, this]
            block[..., behind] -= errors[..., this] * corner[..., this, behind]
        weight[..., end:] -= errors @ error.upper[..., start:end, end:]
    return torch.empty_like(weight).scatter_(-1, order, weight)


def descended(error: QuadraticError, weight: Tensor, grid: Grid) -> Tensor:
    """A weight after the coordinate descent, again as each column of it was when it was rounded."""
    weight, nearest = weight.clone(), grid.nearest(weight)
    for _ in range(PASSES):
        gradient = (nearest - error.wanted) @ error.gram
        for start in range(0, weight.shape[-1], BLOCK):
            end = start + BLOCK
            block, slope, corner = (
                nearest[..., start:end],
                gradient[..., start:end],
                error.gram[..., start:end, start:end],
            )
            before = block.clone()
            for j in range(block.shape[-1]):
                this = slice(j, j + 1)
                best = block[..., this] - slope[..., this] / corner[..., this, this]
                step = grid.nearest(best) - block[..., this]
                slope += step * corner[..., this, :]
                block[..., this] += step
                weight[..., start + j : start + j + 1] = best
            gradient[..., end:] += (block - before) @ error.gram[..., start:end, end:]
    return weight

"""GPTQ: round the weights column by column, and let the columns that are left compensate each rounding error.

Source: Frantar et al. 2022 (arXiv:2210.17323), equations 2 and 3 and section 3.3. ``X`` holds the layer's inputs in the
quantized model, one column per sample::

    H = X X^T + lambda I                       (lambda = damping * mean of H's diagonal)
    U^T U = H^-1, U upper triangular
    for each column j:  E = (w_j - quant(w_j)) / U_jj;   W_k = W_k - E U_jk  for k > j

Columns are taken in order of decreasing ``H_jj``. The start is not the weight but ``W*``, which best reproduces the
float model's outputs (:mod:`fxqat.tools.post_training.input_moments`). Li et al. 2025 (GPTAQ, arXiv:2504.02692) pursue
the same target column by column. For a recurrent layer both starts are tried, and the better result is kept
(:mod:`fxqat.tools.post_training.reconstruct`): ``W*`` makes up for coarse inputs; but the gates saturate, so that large
inputs that were clipped count far too much in it, and the states change with the weights.

Several multiples of each scale (:data:`SCALE_FACTORS`) are tried, and the one with the least error
``(Q - W*) H (Q - W*)^T`` is kept, where ``Q`` is the quantized weight. Coordinate descent follows (Behdin et al. 2023,
arXiv:2309.01885): each column is rounded again to where the error is least with all other columns fixed::

    w_j = q_j - ((Q - W*) H)_j / H_jj
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fxqat.errors import ConfigError
from fxqat.numerics import valid_scale
from fxqat.tools.post_training.input_moments import damped, moments_of_halves, weight_towards_float
from fxqat.tools.post_training.layer_matrices import sum_along_axis, weight_from_matrices, weight_to_matrices
from fxqat.tools.post_training.layer_weights import weights_of
from fxqat.tools.post_training.segments import Segment, Values
from fxqat.utils.flags import check_flags

SCALE_FACTORS = (1.0, *(k / 20 for k in range(12, 29) if k != 20))
"""Factors on a scale that are tried; of equal errors the first wins."""

DESCENT_PASSES = 2
"""Passes of the coordinate descent through all columns."""

BLOCK = 64
"""Columns after which the later columns are updated at once (section 3.3, step 2)."""


@dataclass(frozen=True, kw_only=True)
class GPTQ:
    """Settings of GPTQ.

    Args:
        gptq: whether GPTQ rounds the weights and chooses their scales.
        damping: lambda, relative to the mean square of a layer's inputs.

    Raises:
        ConfigError: ``damping`` is not positive, or ``gptq`` is no bool.
    """

    gptq: bool = False
    damping: float = 0.1

    def __post_init__(self) -> None:
        check_flags(ConfigError, "GPTQ", gptq=self.gptq)
        if not self.damping > 0:
            raise ConfigError(f"damping must be positive, got {self.damping}")


@torch.no_grad()
def gptq_weight(
    segment: Segment,
    path: str,
    float_segment: Segment,
    quant_inputs: Sequence[Values],
    float_inputs: Sequence[Values],
    damping: float,
    centred: bool,
    place: int = 0,
    towards_float: bool = True,
) -> tuple[Tensor, Tensor]:
    """Find a folded weight whose nearest rounding is the solution of GPTQ, and its scale.

    Args:
        segment: a calibrated segment, in which the layers before this one are done.
        path: path of the layer.
        float_segment: the same segment in the float model.
        quant_inputs: the segment's inputs in the quantized model, batch by batch.
        float_inputs: its inputs in the float model.
        damping: lambda, relative to the mean of H's diagonal.
        centred: whether the layer's bias is corrected afterwards.
        place: which of the layer's weights, in the order of
            :func:`~fxqat.tools.post_training.layer_weights.weights_of`.
        towards_float: whether the start is ``W*``; otherwise it is the weight.

    Returns:
        Each element of the weight as it was just before it was rounded, of the weight's shape; and the used scale, of
        the scale's shape.
    """
    found = weights_of(segment.layers[path])[place]
    op, weight, quant = found.op, found.value(), found.quant
    first, second = moments_of_halves(segment, path, float_segment, quant_inputs, float_inputs, place)
    gram, _ = (first + second).averages(centred)
    target = weight_to_matrices(op, weight).double()
    if towards_float:
        target = weight_towards_float(target, first, second, centred)
    error = QuadraticError.of(target, damped(gram, damping))
    scale, zero_point = quant.qparams()

    columns = slice(None) if quant.scheme.block_size is not None else slice(1)  # all of a row have one scale

    def grid(scale: Tensor) -> Grid:
        values = (quant.per_weight(t, weight) for t in (scale, zero_point))
        step, zero = (weight_to_matrices(op, t)[..., columns].double() for t in values)
        return Grid(step, zero, quant.scheme.quant_min, quant.scheme.quant_max)

    scales = torch.stack([valid_scale(scale * factor, quant.scale_bits) for factor in SCALE_FACTORS])
    errors = [error.after_rounding(gptq(error, values), values) for values in map(grid, scales)]
    axis = quant.channel_axis if scale.dim() else None
    best = torch.stack([sum_along_axis(op, values, weight.shape, axis) for values in errors]).argmin(0)
    scale = scales.gather(0, quant.per_scale(best)[None])[0]  # the blocks of a channel have one factor
    solution = coordinate_descent(error, gptq(error, grid(scale)), grid(scale))
    return weight_from_matrices(op, solution, weight.shape).to(weight.dtype), scale


@dataclass(frozen=True)
class Grid:
    """The values that quantized matrices can have.

    Args:
        scale: ``(groups, rows, 1)``, or of the matrices' shape.
        zero_point: of the same shape.
        quant_min: smallest integer.
        quant_max: largest integer.
    """

    scale: Tensor
    zero_point: Tensor
    quant_min: int
    quant_max: int

    def of_columns(self, columns: slice) -> Grid:
        """The grid of some columns."""
        if self.scale.shape[-1] == 1:
            return self
        return replace(self, scale=self.scale[..., columns], zero_point=self.zero_point[..., columns])

    def in_order(self, order: Tensor) -> Grid:
        """The grid of columns in another order, ``(groups, rows, columns)``."""
        if self.scale.shape[-1] == 1:
            return self
        return replace(self, scale=self.scale.gather(-1, order), zero_point=self.zero_point.gather(-1, order))

    def nearest(self, weight: Tensor) -> Tensor:
        """Round each element of ``(groups, rows, columns)`` to the nearest value."""
        integers = torch.clamp(torch.round(weight / self.scale) + self.zero_point, self.quant_min, self.quant_max)
        return (integers - self.zero_point) * self.scale


@dataclass(frozen=True)
class QuadraticError:
    """The mean squared error of a layer's outputs as a function of its weight matrices.

    Args:
        target: the matrices of the least error, ``W*``, ``(groups, rows, columns)``.
        gram: ``H``, damped, ``(groups, columns, columns)``.
        order: order of the columns in GPTQ, ``(groups, columns)``.
        upper: ``U`` of the ordered columns, of the gram's shape.
    """

    target: Tensor
    gram: Tensor
    order: Tensor
    upper: Tensor

    @classmethod
    def of(cls, target: Tensor, gram: Tensor) -> QuadraticError:
        """Compute the order and ``U``."""
        order = gram.diagonal(dim1=-2, dim2=-1).argsort(-1, descending=True)
        ordered = gram.gather(-1, order[:, None, :].expand_as(gram)).gather(-2, order[:, :, None].expand_as(gram))
        upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(ordered)), upper=True)
        return cls(target, gram, order, upper)

    def after_rounding(self, weight: Tensor, grid: Grid) -> Tensor:
        """The error of each row of a weight that is rounded to the nearest, ``(groups, rows)``."""
        distance = grid.nearest(weight) - self.target
        return ((distance @ self.gram) * distance).sum(-1)


def gptq(error: QuadraticError, grid: Grid) -> Tensor:
    """Each column of the weight as it was just before it was rounded, ``(groups, rows, columns)``."""
    order = error.order[:, None, :].expand_as(error.target)
    weight, grid = error.target.gather(-1, order), grid.in_order(order)
    for start in range(0, weight.shape[-1], BLOCK):
        end = start + BLOCK
        block, corner = weight[..., start:end], error.upper[..., start:end, start:end]
        errors, of_block = torch.empty_like(block), grid.of_columns(slice(start, end))
        for j in range(block.shape[-1]):
            this, later = slice(j, j + 1), slice(j + 1, None)
            rounded = of_block.of_columns(this).nearest(block[..., this])
            errors[..., this] = (block[..., this] - rounded) / corner[..., this, this]
            block[..., later] -= errors[..., this] * corner[..., this, later]
        weight[..., end:] -= errors @ error.upper[..., start:end, end:]
    return torch.empty_like(weight).scatter_(-1, order, weight)


def coordinate_descent(error: QuadraticError, weight: Tensor, grid: Grid) -> Tensor:
    """Improve a rounded weight; the result again has each column as it was just before it was rounded."""
    weight, nearest = weight.clone(), grid.nearest(weight)
    for _ in range(DESCENT_PASSES):
        gradient = (nearest - error.target) @ error.gram
        for start in range(0, weight.shape[-1], BLOCK):
            end = start + BLOCK
            block, slope, corner = (
                nearest[..., start:end],
                gradient[..., start:end],
                error.gram[..., start:end, start:end],
            )
            before, of_block = block.clone(), grid.of_columns(slice(start, end))
            for j in range(block.shape[-1]):
                this = slice(j, j + 1)
                best = block[..., this] - slope[..., this] / corner[..., this, this]
                step = of_block.of_columns(this).nearest(best) - block[..., this]
                slope += step * corner[..., this, :]
                block[..., this] += step
                weight[..., start + j : start + j + 1] = best
            gradient[..., end:] += (block - before) @ error.gram[..., start:end, end:]
    return weight

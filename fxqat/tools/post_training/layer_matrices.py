"""A weighted layer of any type as a product of matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from fxqat.nn.weighted import WeightedOp


def weight_to_matrices(op: WeightedOp, weight: Tensor) -> Tensor:
    """A weight as one matrix per group, ``(groups, out_channels / groups, inputs per output)``."""
    groups = int(op.arguments.get("groups", 1))
    if op.axis == 1:
        channels, inputs = weight.shape[1], weight.shape[0] // groups
        return weight.reshape(groups, inputs, channels, -1).transpose(1, 2).flatten(2)
    return weight.reshape(groups, weight.shape[0] // groups, -1)


def weight_from_matrices(op: WeightedOp, matrices: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of :func:`weight_to_matrices`.

    Args:
        op: the layer's operation.
        matrices: ``(groups, rows, inputs per output)``.
        shape: the weight's shape; the number of output channels follows from the matrices instead.
    """
    groups, channels, _ = matrices.shape
    if op.axis == 1:
        return matrices.reshape(groups, channels, shape[0] // groups, *shape[2:]).transpose(1, 2).flatten(0, 1)
    return matrices.reshape(groups * channels, *shape[1:])


def sum_along_axis(op: WeightedOp, values: Tensor, shape: torch.Size, axis: int | None) -> Tensor:
    """Give each weight the value of its matrix row, and sum over all dimensions of the weight but one.

    Args:
        op: the layer's operation.
        values: one value for each row of the matrices, ``(groups, rows)``.
        shape: the weight's shape.
        axis: the dimension that is kept; None: sum over all.

    Returns:
        ``(shape[axis],)``, or ``()`` without an axis.
    """
    inputs = shape.numel() // values.numel()
    weight = weight_from_matrices(op, values[..., None].expand(*values.shape, inputs), shape)
    return weight.sum() if axis is None else weight.movedim(axis, 0).flatten(1).sum(1)


def inputs_to_columns(op: WeightedOp, weight: Tensor, x: Tensor) -> Tensor:
    """The matrices that a layer multiplies its weight matrices by, ``(groups, inputs per output, samples)``.

    They are the layer's outputs when its weight matrices are the identity.
    """
    groups, _, inputs = weight_to_matrices(op, weight).shape
    identity = torch.eye(inputs, dtype=x.dtype, device=x.device).expand(groups, -1, -1)
    y = op(x, weight_from_matrices(op, identity, weight.shape), None)
    y = y.movedim(-1 if weight.dim() == 2 else 1 - weight.dim(), 0)
    columns: Tensor = y.reshape(groups, inputs, -1)
    return columns

"""A weighted layer as a product of matrices, whatever its kind."""

from __future__ import annotations

import torch
from torch import Tensor

from fxqat.nn.weighted import TRANSPOSED, WeightedOp


def rows(op: WeightedOp, weight: Tensor) -> Tensor:
    """A weight as matrices, ``(groups, out_channels / groups, inputs of one output)``."""
    groups = int(op.arguments.get("groups", 1))
    if op.layer in TRANSPOSED:
        channels, inputs = weight.shape[1], weight.shape[0] // groups
        return weight.reshape(groups, inputs, channels, -1).transpose(1, 2).flatten(2)
    return weight.reshape(groups, weight.shape[0] // groups, -1)


def from_rows(op: WeightedOp, matrices: Tensor, shape: torch.Size) -> Tensor:
    """The weight of some matrices, of a shape but for its number of output channels."""
    groups, channels, _ = matrices.shape
    if op.layer in TRANSPOSED:
        return matrices.reshape(groups, channels, shape[0] // groups, *shape[2:]).transpose(1, 2).flatten(0, 1)
    return matrices.reshape(groups * channels, *shape[1:])


def summed_along(op: WeightedOp, values: Tensor, shape: torch.Size, axis: int | None) -> Tensor:
    """Values of the rows of a weight's matrices, ``(groups, rows)``, added up along an axis of the weight.

    Returns:
        One value for each place on that axis, or one in all if it is None.
    """
    inputs = shape.numel() // values.numel()
    weight = from_rows(op, values[..., None].expand(*values.shape, inputs), shape)
    return weight.sum() if axis is None else weight.movedim(axis, 0).flatten(1).sum(1)


def columns(op: WeightedOp, weight: Tensor, x: Tensor) -> Tensor:
    """What a layer multiplies its weight by, ``(groups, inputs of one output, samples)``.

    It is what the layer gives with the identity for its matrices.
    """
    groups, _, inputs = rows(op, weight).shape
    identity = torch.eye(inputs, dtype=x.dtype, device=x.device).expand(groups, -1, -1)
    y = op(x, from_rows(op, identity, weight.shape), None)
    y = y.movedim(-1 if weight.dim() == 2 else 1 - weight.dim(), 0)
    found: Tensor = y.reshape(groups, inputs, -1)
    return found

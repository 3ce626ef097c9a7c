"""How the kernels of fake-quant see a tensor in memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

PER_CHANNEL_BITS = (1, 2, 4, 8, 16)
"""Of scale, zero point, factor, used scale and unit scale."""


class Layout(NamedTuple):
    """How a tensor lies in memory, as the kernels see it.

    Attributes:
        outer: rows of channels.
        channels: number of grids.
        inner: neighbouring elements of one channel.
        per_channel: which of the five of ``PER_CHANNEL_BITS`` have a value per channel.
    """

    outer: int
    channels: int
    inner: int
    per_channel: int


def memory_layout(x: Tensor, channels: int, axis: int | None, per_channel: int) -> Layout:
    """The layout of a tensor in the order in memory that ``torch.empty_like`` gives it.

    Args:
        x: any shape and strides; it may be empty.
        channels: number of grids.
        axis: the axis of the channels; not read if there is one grid.
        per_channel: as in :class:`Layout`.
    """
    if channels == 1 or x.numel() == 0:
        return Layout(1, channels, x.numel() // channels, per_channel)
    assert axis is not None
    dense = x if x.is_contiguous() else torch.empty_like(x, device="meta")
    inner = dense.stride(axis)
    return Layout(x.numel() // (channels * inner), channels, inner, per_channel)


def with_strides_of(like: Tensor, values: Tensor) -> Tensor:
    """``values`` in the strides of ``like``: themselves or a copy."""
    return values if values.stride() == like.stride() else torch.empty_like(like).copy_(values)

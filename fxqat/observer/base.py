"""What every observer is: a running real range, per tensor or per channel, that ranks can agree on."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fxqat.scheme import QuantizeScheme


class ObserverBase(nn.Module):
    """Watches tensors and keeps the range ``[min_val, max_val]`` that quantization should cover.

    A range that has seen nothing is ``[+inf, -inf]``, so that "has it seen data" needs no counter and the first update
    needs no branch on data.

    Args:
        scheme: the scheme the range is for.
        axis: channel axis for a per-channel range, None for one range per tensor.
        num_channels: number of channels when ``axis`` is given.
    """

    min_val: Tensor
    max_val: Tensor

    def __init__(self, scheme: QuantizeScheme, axis: int | None = None, num_channels: int | None = None) -> None:
        super().__init__()
        self.scheme = scheme
        self.axis = axis
        shape = () if axis is None else (num_channels or 1,)
        self.register_buffer("min_val", torch.full(shape, float("inf")))
        self.register_buffer("max_val", torch.full(shape, float("-inf")))

    def range_of(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The range of one tensor; what a kind of observer is about.

        Args:
            x: any float tensor, not empty.

        Returns:
            ``(low, high)``, each of shape ``()`` or ``(channels,)``.
        """
        return min_max_of(x, self.axis)

    def merge(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """The running range after one more tensor; the union unless a kind says otherwise."""
        return torch.minimum(self.min_val, low), torch.maximum(self.max_val, high)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Watch ``x`` and return it unchanged."""
        if x.numel():
            low, high = self.merge(*self.range_of(x.detach().float()))
            self.min_val.copy_(low)
            self.max_val.copy_(high)
        return x

    @torch.no_grad()
    def reduce_over_ranks(self) -> bool:
        """Take the union of all ranks' ranges if a process group is running; whether there was one."""
        dist = torch.distributed
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            # a minimum may drop another rank's NaN, but not its infinity; both make the range unusable
            self.min_val.copy_(self.min_val.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf))
            self.max_val.copy_(self.max_val.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf))
            dist.all_reduce(self.min_val, op=dist.ReduceOp.MIN)
            dist.all_reduce(self.max_val, op=dist.ReduceOp.MAX)
            return True
        return False

    def has_seen_data(self) -> bool:
        """Whether any tensor was watched (NaN counts as seen)."""
        return not bool((self.min_val > self.max_val).any())

    def is_finite(self) -> bool:
        """Whether the range is finite: false after NaN or infinity was watched."""
        return bool(torch.isfinite(self.min_val).all() and torch.isfinite(self.max_val).all())

    def extra_repr(self) -> str:
        """The scheme, for printing."""
        return f"{self.scheme}, axis={self.axis}"


def min_max_of(x: Tensor, axis: int | None) -> tuple[Tensor, Tensor]:
    """Smallest and largest value, per tensor (``axis=None``) or per slice along ``axis``."""
    if axis is None:
        low, high = torch.aminmax(x)
    else:
        low, high = torch.aminmax(x.movedim(axis, 0).flatten(1), dim=1)
    return low, high

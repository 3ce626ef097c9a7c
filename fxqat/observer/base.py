"""The base of all observers: a running real range, per tensor or per channel, that ranks can agree on."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fxqat.errors import ConfigError
from fxqat.numerics import min_max_of, rows_of
from fxqat.scheme import QuantizeScheme

TAIL = 1024
"""The largest and the smallest values of a tensor that are not left to chance, of each about so many."""


class ObserverBase(nn.Module):
    """Watches tensors and keeps the range ``[min_val, max_val]`` that quantization should cover.

    Before any data the range is ``[+inf, -inf]``: this needs no counter, and the first update needs no branch on data.
    Several values may have one range: those of one pass through the model are united, an average is over passes.

    Args:
        scheme: the scheme the range is for.
        axis: channel axis for a per-channel range, None for one range per tensor.
        num_channels: number of channels when ``axis`` is given.
        ema_ratio: weight of the past in an exponential moving average over batches, in [0, 1); None takes their union.

    Attributes:
        this_pass: of an average, the range of this pass through the model, and its weight; no part of the state dict.

    Raises:
        ConfigError: ``ema_ratio`` is outside [0, 1).
    """

    min_val: Tensor
    max_val: Tensor

    def __init__(
        self,
        scheme: QuantizeScheme,
        axis: int | None = None,
        num_channels: int | None = None,
        ema_ratio: float | None = None,
    ) -> None:
        super().__init__()
        if ema_ratio is not None and not 0.0 <= ema_ratio < 1.0:
            raise ConfigError(
                f"{self.name}: ema_ratio must be in [0, 1), or None for the union of all batches, got {ema_ratio}"
            )
        self.ema_ratio = ema_ratio
        self.scheme = scheme
        self.axis = axis
        shape = () if axis is None else (num_channels or 1,)
        self.register_buffer("min_val", torch.full(shape, float("inf")))
        self.register_buffer("max_val", torch.full(shape, float("-inf")))
        self.this_pass: tuple[Tensor, Tensor, Tensor] | None = None

    def range_of(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The range of one tensor; most observers override this method only.

        Args:
            x: any float tensor, not empty.

        Returns:
            ``(low, high)``, each of shape ``()`` or ``(channels,)``.
        """
        return min_max_of(x, self.axis)

    def merge(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """The running range after one more tensor: the union, or the moving average."""
        if self.ema_ratio is None:
            return torch.minimum(self.min_val, low), torch.maximum(self.max_val, high)
        return self.averaged(low, high, self.ema_ratio)

    def averaged(self, low: Tensor, high: Tensor, past: float | Tensor) -> tuple[Tensor, Tensor]:
        """``past * running + (1 - past) * new``, or the new range alone while nothing was seen."""
        fresh = self.min_val > self.max_val
        self.this_pass = low, high, torch.where(fresh, torch.ones_like(self.min_val), 1.0 - past)
        return (
            torch.where(fresh, low, torch.lerp(low, self.min_val, past)),
            torch.where(fresh, high, torch.lerp(high, self.max_val, past)),
        )

    @torch.no_grad()
    def forward(self, x: Tensor, same_pass: bool = False) -> Tensor:
        """Watch ``x`` and return it unchanged.

        Args:
            x: the tensor.
            same_pass: in this pass through the model another value with the same range was watched already.
        """
        if not same_pass:
            self.this_pass = None
        if x.numel():
            (self.watch_again if same_pass else self.watch)(x.detach().float())
        return x

    def watch(self, x: Tensor) -> None:
        """Update the running range with one tensor, float32 and not empty."""
        low, high = self.merge(*self.range_of(x))
        self.min_val.copy_(low)
        self.max_val.copy_(high)

    def watch_again(self, x: Tensor) -> None:
        """Update the running range with one more tensor of the same pass.

        An average over passes must not average the values of one pass, or it would clip the largest of them. The range
        of a pass is the union of theirs: the running range changes by what the tensor adds to it, times its weight.
        """
        if self.this_pass is None:  # no average, or all values of this pass so far were empty
            self.watch(x)
            return
        old_low, old_high, weight = self.this_pass
        low, high = self.range_of(x)
        low, high = torch.minimum(old_low, low), torch.maximum(old_high, high)
        self.min_val.add_(weight * (low - old_low))
        self.max_val.add_(weight * (high - old_high))
        self.this_pass = low, high, weight

    @torch.no_grad()
    def reset(self) -> None:
        """Forget all data; a subclass with buffers of its own resets them as well."""
        self.min_val.fill_(math.inf)
        self.max_val.fill_(-math.inf)

    @torch.no_grad()
    def reduce_over_ranks(self) -> bool:
        """Agree with the other ranks on one range; returns whether a process group is running."""
        dist = torch.distributed
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self.unite_ranks()
            return True
        return False

    def unite_ranks(self) -> None:
        """Take the union of all ranks' ranges."""
        union_over_ranks(self.min_val, self.max_val)

    def has_seen_data(self) -> bool:
        """Whether any tensor was watched, with NaN or without."""
        return not bool((self.min_val > self.max_val).any())

    def is_finite(self) -> bool:
        """Whether the range is finite: false after NaN or infinity was watched."""
        return bool(torch.isfinite(self.min_val).all() and torch.isfinite(self.max_val).all())

    @property
    def name(self) -> str:
        """The name in the table of observers."""
        return type(self).__name__.removesuffix("Observer")

    def extra_repr(self) -> str:
        """Scheme and axis, for printing."""
        return f"{self.scheme}, axis={self.axis}"


def samples_of(x: Tensor, axis: int | None, max_samples: int) -> Tensor:
    """The rows of :func:`rows_of`; per tensor, evenly spaced values of it, fewer than ``2 * max_samples``."""
    rows = rows_of(x, axis)
    return rows if axis is not None else rows[:, :: max(1, rows.shape[1] // max_samples)]


def weighted_samples(x: Tensor, axis: int | None, max_samples: int) -> tuple[Tensor, Tensor | None]:
    """The values of each range as rows, and how many values each one stands for, or None if these are all values.

    Per tensor, they are evenly spaced ones and, each for itself, about ``TAIL`` of the largest and of the smallest:
    what a range cuts off are a few values at its ends, and evenly spaced ones would miss most of them.

    Args:
        x: the tensor.
        axis: as in :func:`~fxqat.numerics.rows_of`.
        max_samples: up to twice as many values are all taken.
    """
    rows = rows_of(x, axis)
    step = rows.shape[1] // max_samples
    if axis is not None or step < 2:
        return rows, None
    values = rows[0]
    even = values[::step]
    # the extremes of groups of values that are far from each other, and the values that are left over
    groups, rest = values[: step * max_samples].reshape(step, max_samples), values[step * max_samples :]
    ends = [torch.cat([groups.amax(0), rest]), torch.cat([groups.amin(0), rest])]
    count = max(1, min(TAIL, max_samples // 4))
    high, low = (end.topk(count, largest=end is ends[0]).values for end in ends)
    is_inside = (even <= high[-1]) & (even >= low[-1])
    is_tail = torch.cat([high > high[-1], low < low[-1]])  # not what occurs more often, as the limit of a clamp
    share = (values.numel() - is_tail.sum()) / is_inside.sum()
    return torch.cat([even, high, low]).unsqueeze(0), torch.cat([is_inside * share, is_tail.float()]).unsqueeze(0)


def union_over_ranks(low: Tensor, high: Tensor) -> None:
    """Replace a range by the union over all ranks, in place; NaN becomes infinity."""
    # a reduction may drop the NaN of another rank, but not its infinity; either makes the range unusable
    low.copy_(low.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf))
    high.copy_(high.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf))
    torch.distributed.all_reduce(low, op=torch.distributed.ReduceOp.MIN)
    torch.distributed.all_reduce(high, op=torch.distributed.ReduceOp.MAX)


def share_over_ranks(sums: Tensor) -> None:
    """Replace sums over this rank's data by an equal share of the sum over all ranks, in place.

    The shares add up to the whole, so ranks may continue to watch and reduce again without counting anything twice.
    """
    torch.distributed.all_reduce(sums)
    sums.div_(torch.distributed.get_world_size())

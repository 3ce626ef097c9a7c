"""The results of a profile for one quantized tensor."""

from __future__ import annotations

from dataclasses import dataclass

from fxqat.utils.compare import Channels, Difference

LOST = 0.5
"""Tensors that lose a larger fraction of their channels are listed first."""


@dataclass(frozen=True)
class ProfiledTensor:
    """One quantized tensor, compared with float.

    Args:
        name: the name in the exported file.
        kind: ``"weight"`` or ``"activation"``.
        order: index in the order of execution, from 0; a weight comes before the output of its layer.
        scheme: how it is quantized, as text.
        own: difference at the tensor itself when only this tensor is quantized.
        output: difference at the model's outputs when only this tensor is quantized.
        cumulative: difference at the tensor itself when everything is quantized; for a weight the same as ``own``.
        channels: the channels of the float tensor, and which of them its own rounding loses.
    """

    name: str
    kind: str
    order: int
    scheme: str
    own: Difference
    output: Difference
    cumulative: Difference
    channels: Channels

    @property
    def sort_key(self) -> tuple[bool, float]:
        """Sorts the worst tensor first.

        First come the tensors that lose most of their channels, in the order of execution, because later tensors
        inherit their error. Then come all others by their effect on the output.
        """
        if self.channels.lost_share > LOST:
            return False, self.order
        return True, self.output.sqnr


@dataclass(frozen=True)
class Histogram:
    """Distribution of the values of a tensor.

    Args:
        low: lower end of the first bin.
        high: upper end of the last bin.
        counts: number of values in each bin; all bins have the same width.
        grid: the smallest and the largest value that the quantized tensor can have, over all channels.
    """

    low: float
    high: float
    counts: tuple[int, ...]
    grid: tuple[float, float]

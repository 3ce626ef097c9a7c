"""What a profile holds of each quantized tensor."""

from __future__ import annotations

from dataclasses import dataclass

from fxqat.tools.profiling.compare import Channels, Difference

LOST = 0.5
"""A tensor that loses a larger part of its channels comes before all that do not."""


@dataclass(frozen=True)
class ProfiledTensor:
    """One quantized tensor, compared with float.

    Args:
        name: as in the exported file.
        kind: ``"weight"`` or ``"activation"``.
        order: its place in the order of execution, from 0; a weight comes before what its layer gives.
        scheme: how it is quantized, in words.
        own: its rounding alone, at the tensor itself.
        output: its rounding alone, at the model's outputs.
        cumulative: everything quantized, at the tensor itself; of a weight the same as ``own``.
        channels: those of the float tensor, and which of them its rounding alone loses.
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
    def badness(self) -> tuple[bool, float]:
        """What profiles are sorted by, the worst first.

        First the tensors with most of their channels lost, in the order of execution: those that follow inherit it.
        Then all others by what they do to the output.
        """
        if self.channels.lost_share > LOST:
            return False, self.order
        return True, self.output.sqnr


@dataclass(frozen=True)
class Histogram:
    """How the values of a tensor are spread.

    Args:
        low: where the first bin begins.
        high: where the last bin ends.
        counts: of each bin; all have one width.
        grid: the smallest and the largest value that the quantized tensor can have, of all channels.
    """

    low: float
    high: float
    counts: tuple[int, ...]
    grid: tuple[float, float]

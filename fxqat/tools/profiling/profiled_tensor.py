"""The results of a profile for one quantized tensor, and the verdict on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fxqat.utils.compare import Channels, Difference

HEALTHY, CHECK, DAMAGED = "healthy", "check", "damaged"

CHECK_DB, DAMAGED_DB = 30.0, 20.0
"""Below these ratios at the outputs, a tensor needs a look, and is damaged: its rounding alone then changes the outputs
by 3 % and 10 % of their size. A hundred tensors with 30 dB each add up to about 10 dB."""

CHECK_LOST, DAMAGED_LOST = 0.05, 0.5
"""The same for the fraction of its channels that it loses."""

OUTLIER = 10.0
"""From this ratio on, the widest channel takes most of the range that it shares with the others."""


@dataclass(frozen=True)
class ProfiledTensor:
    """One quantized tensor, compared with float.

    Args:
        name: the name in the exported file.
        kind: ``"weight"`` or ``"activation"``.
        order: index in the order of execution, from 0; a weight comes before the output of its layer.
        scheme: how it is quantized, as text.
        own: difference at the tensor itself when only this tensor is quantized. Values beyond which the ops that read
            it are flat, as SiLU is below -8, count as equal.
        output: difference at the model's outputs when only this tensor is quantized.
        cumulative: difference at the tensor itself when everything is quantized; for a weight the same as ``own``.
        channels: the channels of the float tensor, and which of them its own rounding loses.
        per_channel: whether each of its channels has a scale.
        overrides: rules for ``overrides`` in ``prepare_custom_config_dict`` that leave it float.
    """

    name: str
    kind: str
    order: int
    scheme: str
    own: Difference
    output: Difference
    cumulative: Difference
    channels: Channels
    per_channel: bool = False
    overrides: tuple[Mapping[str, Any], ...] = ()

    @property
    def sort_key(self) -> tuple[bool, float]:
        """Sorts the worst tensor first.

        First come the tensors that lose most of their channels, in the order of execution, because later tensors
        inherit their error. Then come all others by their effect on the output.
        """
        if self.channels.lost_share > DAMAGED_LOST:
            return False, self.order
        return True, self.output.sqnr

    @property
    def verdict(self) -> str:
        """``"healthy"``, ``"check"`` or ``"damaged"``, by its effect on the outputs and the channels that it loses."""
        lost = self.channels.lost_share
        if self.output.sqnr < DAMAGED_DB or lost > DAMAGED_LOST:
            return DAMAGED
        return CHECK if self.output.sqnr < CHECK_DB or lost >= CHECK_LOST else HEALTHY

    @property
    def why(self) -> str:
        """Why it is not healthy; empty if it is."""
        if self.verdict == HEALTHY:
            return ""
        reasons = []
        if self.output.sqnr < CHECK_DB:
            change = 10 ** (-self.output.sqnr / 20)
            reasons.append(f"its rounding alone changes the outputs by {change:.1%} of their size")
        if self.channels.lost_share >= CHECK_LOST:
            reasons.append(f"rounding erases {len(self.channels.lost)} of its {self.channels.count} channels")
        if self.channels.outlier >= OUTLIER and not self.per_channel:
            reasons.append(
                f"channel {self.channels.widest} is {self.channels.outlier:.0f} times as wide as the median channel, "
                "and all have one scale"
            )
        return "; ".join(reasons)


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

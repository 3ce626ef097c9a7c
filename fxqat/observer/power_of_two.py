"""The base of the power-of-two observers: the range that a given scale covers."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from fxqat.errors import ConfigError
from fxqat.numerics import choose_qparams, covered_range
from fxqat.observer.summary import SummaryObserver
from fxqat.scheme import FLOAT32_BITS, QuantizeScheme


class PowerOfTwoObserver(SummaryObserver):
    """Chooses a power of two as the scale, and gives the range that this scale covers.

    The zero point follows from the range of all data. The range is an exact multiple of the scale, so
    ``choose_qparams`` finds scale and zero point again from it, although it rounds scales up.

    Args: as :class:`~fxqat.observer.summary.SummaryObserver`.

    Raises:
        ConfigError: the scheme's scales are not powers of two.
    """

    def __init__(self, scheme: QuantizeScheme, axis: int | None = None, num_channels: int | None = None) -> None:
        super().__init__(scheme, axis, num_channels)
        if scheme.scale_bits != 1:
            raise ConfigError(
                f"{self.name}: needs a scheme whose scales are powers of two, got {scheme} with "
                f"scale_bits={scheme.scale_bits}. Set pot_scale: true (scale_bits: 1), or choose another observer."
            )
        self.any_scale = replace(scheme, scale_bits=FLOAT32_BITS)

    def range_of_scale(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        """The range that a scale covers with the zero point of all data."""
        zero_point = choose_qparams(self.lowest, self.highest, self.any_scale)[1]
        return covered_range(scale, zero_point, self.scheme)

"""The integer schemes that several backends have in common.

Scales have few significant bits: 5 for weights, 4 for activations. The product of two integers and their scales then
needs so few bits that a float32 sum of a thousand products is nearly always exact, and therefore the same in every
runtime, whatever the order of addition. With float32 scales the last bit of a sum depends on that order; about one
value in a million falls on the other side of a rounding boundary, and a deep network spreads that over its output. A
weight scale per channel is up to 1/16 larger than the range needs, one per tensor is off by up to 1/32 in either
direction, an activation scale by up to 1/16. Activations of 16 bits get 12 scale bits: their sums are not exact in any
case, and 1/16 of the range is many steps. Sums of two values get 16 on engines that multiply by ratios of scales:
with few bits many sums are exact halves of a step, which such an engine rounds differently. 16 are the most with which
an 8-bit integer times its scale is exact in float32. ``scale_bits: 24`` gives float32 scales.
"""

from __future__ import annotations

from dataclasses import replace

from fxqat.custom_quantizer.spec import LegalSchemes
from fxqat.scheme import QuantizeScheme

INT8_WEIGHT = QuantizeScheme(
    bit_width=8, signed=True, symmetric=True, per_channel=True, narrow_range=True, scale_bits=5
)
INT8_ACTIVATION = QuantizeScheme(bit_width=8, signed=True, symmetric=True, scale_bits=4)
UINT8_ACTIVATION = QuantizeScheme(bit_width=8, signed=False, symmetric=False, scale_bits=4)

SCALE_BITS_OF_SUMS = 16

UINT8_ACTIVATION_EVEN = replace(UINT8_ACTIVATION, even_zero_point=True)
"""For engines that add the zero point before they round halves to even: an odd one rounds them the other way."""

INT8_WEIGHT_PER_TENSOR = replace(INT8_WEIGHT, per_channel=False)
UINT16_ACTIVATION = QuantizeScheme(bit_width=16, signed=False, symmetric=False, scale_bits=12)
INT8_POWER_OF_TWO = QuantizeScheme(bit_width=8, signed=True, symmetric=True, scale_bits=1)

ONLY_INT8 = (LegalSchemes(frozenset({8}), symmetric=True, signed=True),)
"""Symmetric int8 and nothing else; weights per tensor or per channel."""

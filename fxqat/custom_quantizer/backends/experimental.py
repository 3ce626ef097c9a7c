"""Experimental: TSQAT's placement with asymmetric activations, for trying schemes and widths."""

from __future__ import annotations

from dataclasses import replace

from fxqat.custom_quantizer.backends.tsqat import TSQAT
from fxqat.scheme import QuantizeScheme, TensorQConfig

UINT8_ACTIVATION = QuantizeScheme(bit_width=8, signed=False, symmetric=False)

EXPERIMENTAL = replace(
    TSQAT,
    name="Experimental",
    activation=TensorQConfig(UINT8_ACTIVATION, observer="EMAMinMax", fake_quantize="Learnable"),
    source="the seed's usage guide, backend note 4: for experiments",
)

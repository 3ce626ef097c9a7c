"""Experimental: TSQAT's placement with asymmetric activations, for trying schemes and widths.

Ranges are chosen for least squared error, which is what narrow widths need.
"""

from __future__ import annotations

from dataclasses import replace

from fxqat.custom_quantizer.backends.schemes import INT8_WEIGHT, UINT8_ACTIVATION
from fxqat.custom_quantizer.backends.tsqat import TSQAT
from fxqat.scheme import TensorQConfig

EXPERIMENTAL = replace(
    TSQAT,
    name="Experimental",
    weight=TensorQConfig(INT8_WEIGHT, observer="MSE", fake_quantize="Learnable"),
    activation=TensorQConfig(UINT8_ACTIVATION, observer="MSE", fake_quantize="Learnable"),
    source="fxqat's table for experiments: the placement of TSQAT with asymmetric activations",
)

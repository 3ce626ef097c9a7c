"""Fake-quants simulate the rounding of one tensor and define its gradient."""

from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.fake_quantize.dorefa import DoReFaFakeQuantize
from fxqat.fake_quantize.dsq import DSQFakeQuantize
from fxqat.fake_quantize.ewgs import EWGSFakeQuantize
from fxqat.fake_quantize.fixed import FixedFakeQuantize
from fxqat.fake_quantize.learnable import LearnableFakeQuantize
from fxqat.fake_quantize.oscillation import OscillationFakeQuantize
from fxqat.fake_quantize.pact import PACTFakeQuantize
from fxqat.fake_quantize.surrogate import SurrogateFakeQuantize
from fxqat.fake_quantize.tqt import TQTFakeQuantize

__all__ = [
    "DSQFakeQuantize",
    "DoReFaFakeQuantize",
    "EWGSFakeQuantize",
    "FakeQuantizeBase",
    "FixedFakeQuantize",
    "LearnableFakeQuantize",
    "OscillationFakeQuantize",
    "PACTFakeQuantize",
    "SurrogateFakeQuantize",
    "TQTFakeQuantize",
]

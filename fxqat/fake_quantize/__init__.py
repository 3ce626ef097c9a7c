"""Fake-quants simulate the rounding of one tensor and carry its gradient."""

from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.fake_quantize.fixed import FixedFakeQuantize
from fxqat.fake_quantize.learnable import LearnableFakeQuantize

__all__ = ["FakeQuantizeBase", "FixedFakeQuantize", "LearnableFakeQuantize"]

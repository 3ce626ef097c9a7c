"""The fake-quants by the names that backends and users write."""

from __future__ import annotations

from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.fake_quantize.fixed import FixedFakeQuantize
from fxqat.fake_quantize.learnable import LearnableFakeQuantize

FAKE_QUANTIZES: dict[str, type[FakeQuantizeBase]] = {
    "Fixed": FixedFakeQuantize,
    "Learnable": LearnableFakeQuantize,
}

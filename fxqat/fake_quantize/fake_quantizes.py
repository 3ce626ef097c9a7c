"""The table of fake-quants, by the names that backends and users write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.fake_quantize.dorefa import DoReFaFakeQuantize
from fxqat.fake_quantize.dsq import DSQFakeQuantize
from fxqat.fake_quantize.ewgs import EWGSFakeQuantize
from fxqat.fake_quantize.fixed import FixedFakeQuantize
from fxqat.fake_quantize.learnable import LearnableFakeQuantize
from fxqat.fake_quantize.oscillation import OscillationFakeQuantize
from fxqat.fake_quantize.pact import PACTFakeQuantize
from fxqat.fake_quantize.tqt import TQTFakeQuantize
from fxqat.scheme import TensorQConfig

FAKE_QUANTIZES: dict[str, type[FakeQuantizeBase]] = {
    "Fixed": FixedFakeQuantize,
    "Learnable": LearnableFakeQuantize,
    "PACT": PACTFakeQuantize,
    "DSQ": DSQFakeQuantize,
    "DoReFa": DoReFaFakeQuantize,
    "TQT": TQTFakeQuantize,
    "EWGS": EWGSFakeQuantize,
    "Oscillation": OscillationFakeQuantize,
}

ALIASES: Mapping[str, str] = MappingProxyType({"LSQ": "Learnable", "LSQPlus": "Learnable", "Tqt": "TQT"})
"""Names in other libraries, without ``FakeQuantize`` at the end, where they differ from ours."""

_NO_TRAINING = "it is no fake-quant to train with: use 'Fixed', calibrate, and call"

HINTS: Mapping[str, str] = MappingProxyType(
    {
        "FakeQuantize": "use 'Fixed': scales from the observer, straight-through gradients",
        "FusedMovingAvgObs": "it is observer and fake-quant in one: use observer 'EMAMinMax' and fake-quant 'Fixed'",
        "FakeQuanterWithAbsMaxObserver": "use fake-quant 'Fixed' and observer 'EMAMinMax'",
        "ActLSQplus": "use 'Learnable', which learns scale and zero point, and observer 'LSQPlus'",
        "WeightLSQplus": "use 'Learnable', and observer 'LSQPlus'",
        "AdaRound": f"{_NO_TRAINING} fxqat.tools.reconstruct",
        "QDrop": f"{_NO_TRAINING} fxqat.tools.reconstruct",
        "NNIE": "its logarithmic grid is none of QuantizeLinear; the nearest is 'TQT', scales that are powers of two",
        "abs_max": "that is an observer: use fake-quant 'Fixed' and observer 'MinMax' with symmetry: true",
        "moving_average_abs_max": "that is an observer: use fake-quant 'Fixed' and observer 'EMAMinMax'",
    }
)
"""Names in other libraries of what is spelled in another way here, and how."""


def not_learned(config: TensorQConfig) -> TensorQConfig:
    """A copy with ``Fixed`` instead of a fake-quant that learns; a class of the user's own stays."""
    row = FAKE_QUANTIZES.get(config.fake_quantize) if isinstance(config.fake_quantize, str) else None
    if row is None or not row.learned:
        return config
    return replace(config, fake_quantize="Fixed", fake_quantize_args=MappingProxyType({}))

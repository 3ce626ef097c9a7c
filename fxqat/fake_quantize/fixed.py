"""Fixed: scale and zero point come from the observer and are not trained."""

from __future__ import annotations

from fxqat.fake_quantize.base import FakeQuantizeBase, Observer
from fxqat.scheme import QuantizeScheme


class FixedFakeQuantize(FakeQuantizeBase):
    """Fake-quant whose scale and zero point are buffers; the input has the straight-through gradient.

    Args: as :class:`~fxqat.fake_quantize.base.FakeQuantizeBase`.
    """

    def __init__(self, scheme: QuantizeScheme, observer: Observer, kind: str, axis: int | None = None) -> None:
        super().__init__(scheme, observer, kind, axis)
        scale, zero_point = self.initial_qparams()
        self.register_buffer("scale", scale)
        self.register_buffer("zero_point", zero_point)

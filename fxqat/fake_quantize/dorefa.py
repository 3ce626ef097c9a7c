"""DoReFa: weights pass through a tanh before they are rounded.

Zhou et al. 2016, "DoReFa-Net: Training Low Bitwidth Convolutional Neural Networks with Low Bitwidth Gradients"
(arXiv:1606.06160), equations 9 and 10 (section 2.3).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxqat.fake_quantize.fixed import FixedFakeQuantize
from fxqat.numerics import SCALE_MIN, per_axis


class DoReFaFakeQuantize(FixedFakeQuantize):
    """Fake-quant of weights that rounds ``max|w| * tanh(w) / max|tanh(w)|``.

    The gradient passes the rounding unchanged; tanh and maximum have their own (equation 10). The file stores the
    integers of the transformed weight. Two things differ from the paper, whose grid is
    ``2 / (2**k - 1) * integer - 1``:

    1. The paper's grid does not contain 0, which ONNX represents exactly. Here the integers are those of the scheme.
    2. The paper drops the factor ``max|w|``, because a BatchNorm after the layer compensates for it. Here the weight is
       quantized after BatchNorm is folded into it, so its magnitude matters.

    The scale is not learned but calibrated. With ``enable_quantization(model, weight_cali_on=True)`` it follows the
    weights, as in the paper. Per-channel schemes take the maximum per channel.

    Args: as :class:`~fxqat.fake_quantize.base.FakeQuantizeBase`.

    Raises:
        ConfigError: the tensor is an activation.
    """

    weights_only = True

    def target(self, x: Tensor, factor: Tensor | None = None, used_scale: Tensor | None = None) -> Tensor:
        """The transformed weight (equation 9); with a factor, that of ``x * factor``, divided by the factor."""
        if factor is not None:
            wide = per_axis(factor, x.dim(), self.axis)
            return self.target(x * wide) / wide
        kept = self.axis % x.dim() if self.axis is not None and self.scheme.per_channel else None
        others = [d for d in range(x.dim()) if d != kept]
        size = x.abs().amax(others, keepdim=True).clamp(min=SCALE_MIN)
        return torch.tanh(x) * (size / torch.tanh(size))

"""DoReFa: weights are quantized behind a tanh.

Zhou et al. 2016, "DoReFa-Net: Training Low Bitwidth Convolutional Neural Networks with Low Bitwidth Gradients"
(arXiv:1606.06160), equations 9 and 10 (section 2.3).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxqat.fake_quantize.fixed import FixedFakeQuantize
from fxqat.numerics import SCALE_MIN, per_axis


class DoReFaFakeQuantize(FixedFakeQuantize):
    """Fake-quant of weights: what is rounded is ``max|w| * tanh(w) / max|tanh(w)|``.

    The rounding passes the gradient straight through, the tanh and the maximum have theirs (equation 10). The file
    holds the integers of the transformed weight. Two things differ from the paper, whose grid is
    ``2 / (2**k - 1) * integer - 1``:

    1. ONNX represents 0 exactly, which the paper's grid does not hold: here the integers are those of the scheme.
    2. The paper drops the size of the weights (the factor ``max|w|``), which a BatchNorm behind them makes good. Here
       the weight is quantized with the BatchNorm folded in, so its size counts.

    Nothing is learned: the scale is the calibrated one. ``enable_quantization(model, weight_cali_on=True)`` has it
    follow the weights, as in the paper. The maximum is taken per channel for per-channel schemes.

    Args: as :class:`~fxqat.fake_quantize.base.FakeQuantizeBase`.

    Raises:
        ConfigError: the tensor is an activation.
    """

    weights_only = True

    def target(self, x: Tensor, factor: Tensor | None = None, used_scale: Tensor | None = None) -> Tensor:
        """The transformed weight (equation 9); of ``x * factor``, divided by the factor again, if there is one."""
        if factor is not None:
            wide = per_axis(factor, x.dim(), self.axis)
            return self.target(x * wide) / wide
        kept = self.axis % x.dim() if self.axis is not None and self.scheme.per_channel else None
        others = [d for d in range(x.dim()) if d != kept]
        size = x.abs().amax(others, keepdim=True).clamp(min=SCALE_MIN)
        return torch.tanh(x) * (size / torch.tanh(size))

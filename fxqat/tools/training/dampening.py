"""Dampening: a loss that pulls weights to the values they are rounded to.

Nagel et al. 2022, "Overcoming Oscillations in Quantization-Aware Training" (arXiv:2203.11086), section 4.2, equation 5.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fxqat.errors import CalibrationError
from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.nn.fold import bn_factor
from fxqat.nn.qat import QATLayer
from fxqat.nn.quantized_layer import QuantizedLayer
from fxqat.numerics import fake_quantize, per_axis


def dampening_loss(model: nn.Module) -> Tensor:
    """Sum over all quantized weights of the squared distance to the value that the weight is rounded to.

    Formula: ``sum (w_hat - clip(w, low, high))**2``, with ``low`` and ``high`` the ends of the range, so that a weight
    outside the range has no gradient. ``w`` is the weight with its BatchNorm folded in, which is what is rounded.
    ``w_hat``, the scale and the BatchNorm are constants: only the weights get gradients. In the paper, the coefficient
    of this loss grows from 0 along a cosine.

    Args:
        model: a prepared and calibrated model, also wrapped by DDP or ``torch.compile``. Weights may have any
            fake-quant; a weight whose fake-quant is off is left out.

    Returns:
        ``()``; multiply it by a coefficient and add it to the loss.

    Raises:
        CalibrationError: no weight has its fake-quant on.

    Source: Nagel et al. 2022 (arXiv:2203.11086), equation 5.
    """
    layers = [module for module in model.modules() if isinstance(module, QuantizedLayer)]
    weights = {quant: weight for layer in layers for quant, weight in _weights(layer) if quant.fake_quant_enabled}
    if not weights:
        raise CalibrationError(
            f"dampening_loss: none of {len(layers)} quantized layers has its weight fake-quant on. Calibrate the model "
            "and call enable_quantization(model) first."
        )
    return torch.stack([_loss(quant, weight) for quant, weight in weights.items()]).sum()


def _weights(layer: QuantizedLayer) -> list[tuple[FakeQuantizeBase, Tensor]]:
    """The fake-quants of a layer, and what they round, with its BatchNorm as a constant."""
    if isinstance(layer, QATLayer) and layer.bn is not None:
        factor = layer.op.per_output_channel(bn_factor(layer.bn).detach(), layer.weight)
        return [(layer.weight_fake_quant, layer.weight * factor)]
    return [(quant, values) for _, quant, values in layer.quantized_weights()]


def _loss(quant: FakeQuantizeBase, weight: Tensor) -> Tensor:
    scheme, axis = quant.scheme, quant.axis
    weight = quant.target(quant.in_blocks(weight)).float()
    with torch.no_grad():
        scale, zero_point = quant.qparams()
        low, high = ((limit - zero_point) * scale for limit in (scheme.quant_min, scheme.quant_max))
        w_hat = fake_quantize(weight, scale, zero_point, scheme.quant_min, scheme.quant_max, axis)
    low, high = per_axis(low, weight.dim(), axis), per_axis(high, weight.dim(), axis)
    return (w_hat - torch.clamp(weight, low, high)).square().sum()

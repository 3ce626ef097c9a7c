"""Bias correction: subtract the mean error that quantization causes in each channel from the bias.

Source: Nagel et al. 2019 (arXiv:1906.04721), section 4.2 and appendix D: ``E[y] = E[y_q] - E[error]`` (equation 17).
Both means are measured on data, before the activation, layer by layer, with all earlier layers already corrected.

The float means are those of the prepared model with its fake-quants off. Correction changes its biases, so a model can
be corrected only once, and tools that compare with the float model (``reconstruct``, ``profile``) must run before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fxqat.errors import CalibrationError, ConfigError
from fxqat.fake_quantize.state import enable_quantization
from fxqat.nn.fold import bn_factor
from fxqat.nn.qat import QATLayer
from fxqat.quantization.graph_module import QuantGraphModule, prepared_model
from fxqat.tools.post_training.segments import Segment, Values, float_segments, named_inputs, split, values_read_later
from fxqat.utils.batches import read_batches
from fxqat.utils.contexts import eval_mode


@torch.no_grad()
def correct_bias(gm: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
    """Correct every layer that has a bias or a BatchNorm, in place.

    Args:
        gm: a prepared and calibrated model; afterwards its fake-quants are on.
        batches: batches of inputs, see :func:`fxqat.calibrate`.

    Returns:
        The largest correction of each corrected layer, in units of its output, by path.

    Raises:
        CalibrationError: the model is not calibrated, or the batches give NaN or infinity.
        ConfigError: its biases were corrected before, there are no batches, or a batch does not fit the model.
    """
    gm = prepared_model(gm, ConfigError)
    require_float_biases(gm, "correct_bias")
    inputs = read_batches(gm, batches, "correct_bias")
    enable_quantization(gm)
    gm.provenance.bias_corrected = True  # set first: an interrupt may leave some biases corrected
    found: dict[str, float] = {}
    with eval_mode(gm):
        segments = split(gm, max_layers=1)
        float_inputs = [named_inputs(gm, batch) for batch in inputs]
        quant_inputs = [dict(values) for values in float_inputs]
        for i, (segment, original) in enumerate(zip(segments, float_segments(segments), strict=True)):
            targets = original.run(float_inputs, quantized=False)
            found |= correct_means(segment, quant_inputs, channel_means(original, float_inputs, quantized=False))
            float_inputs = values_read_later(segments[i:], float_inputs, targets)
            quant_inputs = values_read_later(segments[i:], quant_inputs, segment.run(quant_inputs, quantized=True))
    return found


def require_float_biases(gm: QuantGraphModule, caller: str) -> None:
    """Raise if the biases of a model were corrected: with its fake-quants off it is not the float model."""
    if gm.provenance.bias_corrected:
        raise ConfigError(
            f"{caller}: the biases of this model were corrected for quantization errors, so with its fake-quants off "
            "it is no longer the float model. Prepare and calibrate the model again, and correct biases last; to "
            "reconstruct and correct, use reconstruct(..., correct_bias=True)"
        )


def channel_means(segment: Segment, batches: list[Values], quantized: bool) -> dict[str, Tensor]:
    """The channel means of each layer's output before its activation, ``(channels,)``, by path.

    Only layers that can be corrected are measured: those with a bias or a BatchNorm. What the products of a recurrent
    layer are is not seen from outside, so its bias is not corrected.
    """
    qat = {path: layer for path, layer in segment.own_layers.items() if isinstance(layer, QATLayer)}
    layers = {path: layer for path, layer in qat.items() if layer.bias is not None or layer.bn is not None}
    with ExitStack() as stack:
        means = {path: stack.enter_context(_recorded(layer)) for path, layer in layers.items()}
        segment.run(batches, quantized)
    return {path: torch.stack(values).mean(0).to(layers[path].weight.dtype) for path, values in means.items()}


def correct_means(segment: Segment, batches: list[Values], targets: Mapping[str, Tensor]) -> dict[str, float]:
    """Correct the biases of a segment's layers in order, in place.

    Args:
        segment: a segment of a calibrated model.
        batches: its inputs in the quantized model.
        targets: the float model's means of the layers to correct, see :func:`channel_means`.

    Returns:
        The largest correction of each layer.
    """
    found: dict[str, float] = {}
    for path, means in targets.items():
        error = channel_means(segment, batches, quantized=True)[path] - means
        layer = segment.layers[path]
        if not error.isfinite().all():
            raise CalibrationError(
                f"biases cannot be corrected: on these batches the outputs of {path} have NaN or infinity. Look for "
                "NaN in them and for overflow in the float model, and prepare the model again: layers before it are "
                "corrected"
            )
        assert isinstance(layer, QATLayer)  # channel_means measures no other
        _shift_output(layer, -error)
        found[path] = float(error.abs().max())
    return found


@contextmanager
def _recorded(layer: QATLayer) -> Iterator[list[Tensor]]:
    """Record the channel means of a layer's output before its activation, call by call."""
    activation = layer.activation
    recorder = _Recorder(activation, -1 if layer.weight.dim() == 2 else 1)
    layer.activation = recorder
    try:
        yield recorder.means
    finally:
        layer.activation = activation


class _Recorder(nn.Module):
    """An activation (or none) that records the channel means of its input."""

    def __init__(self, activation: nn.Module | None, axis: int) -> None:
        super().__init__()
        self.activation = activation
        self.axis = axis
        self.means: list[Tensor] = []

    def forward(self, y: Tensor) -> Tensor:
        """Apply the activation."""
        axis = self.axis % y.dim()
        self.means.append(y.double().mean([d for d in range(y.dim()) if d != axis]))
        return y if self.activation is None else self.activation(y)


def _shift_output(layer: QATLayer, by: Tensor) -> None:
    """Add a vector to the layer's output before its activation."""
    bn = layer.bn
    if bn is None:
        assert layer.bias is not None
        layer.bias.add_(by)
    elif bn.bias is not None:
        bn.bias.add_(by)
    else:
        assert bn.running_mean is not None
        bn.running_mean.sub_(by / bn_factor(bn))

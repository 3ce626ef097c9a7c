"""Bias correction: the mean error that quantization brings to each channel is taken out of the bias.

Source: Nagel et al. 2019 (arXiv:1906.04721), section 4.2 and appendix D: ``E[y] = E[y_q] - E[error]`` (equation 17),
with both expectations measured on data before the activation, layer by layer, behind layers that are corrected already.

The float expectation is that of the prepared model without its fake-quants. Its biases are others afterwards, so a
model is corrected once, and what compares with the float model (``reconstruct``) comes before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fxqat.errors import ConfigError
from fxqat.fake_quantize.state import enable_quantization
from fxqat.nn.fold import bn_factor
from fxqat.nn.qat import QATLayer
from fxqat.quantization.graph_module import QuantGraphModule
from fxqat.tools.post_training.segments import Segment, Values, inputs_of, needed_after, split
from fxqat.utils.batches import read_batches
from fxqat.utils.contexts import eval_mode


@torch.no_grad()
def correct_bias(gm: QuantGraphModule, batches: Iterable[Any]) -> dict[str, float]:
    """Correct every layer that has a bias or a BatchNorm, in place.

    Args:
        gm: a prepared and calibrated model; afterwards its fake-quants are on.
        batches: the model's inputs.

    Returns:
        The largest correction of each corrected layer, in units of its output, by path.

    Raises:
        CalibrationError: the model is not calibrated.
        ConfigError: its biases are corrected already.
    """
    require_float_biases(gm, "correct_bias")
    inputs = read_batches(gm, batches, "correct_bias")
    enable_quantization(gm)
    gm.provenance.bias_corrected = True  # before the first: an interrupt leaves some of them corrected
    found: dict[str, float] = {}
    with eval_mode(gm):
        segments = split(gm, max_layers=1)
        exact = [inputs_of(gm, batch) for batch in inputs]
        rounded = [dict(values) for values in exact]
        for i, segment in enumerate(segments):
            targets = segment.run(exact, quantized=False)
            found |= shift_means(segment, rounded, channel_means(segment, exact, quantized=False))
            exact = needed_after(segments[i:], exact, targets)
            rounded = needed_after(segments[i:], rounded, segment.run(rounded, quantized=True))
    return found


def require_float_biases(gm: QuantGraphModule, who: str) -> None:
    """Raise if the biases of a model are corrected, so that without its fake-quants it is not the float model."""
    if gm.provenance.bias_corrected:
        raise ConfigError(
            f"{who}: the biases of this model were corrected for its errors of quantization, so that with its "
            "fake-quants off it is not the float model any more. Prepare and calibrate it anew, and correct it last; "
            "to reconstruct and to correct, use reconstruct(..., correct_bias=True)"
        )


def channel_means(segment: Segment, batches: list[Values], quantized: bool) -> dict[str, Tensor]:
    """The mean of each channel of what its layers give before their activations, ``(channels,)``, by path.

    Only of layers that can be corrected: those with a bias or a BatchNorm.
    """
    layers = {path: layer for path, layer in segment.layers.items() if layer.bias is not None or layer.bn is not None}
    with ExitStack() as stack:
        means = {path: stack.enter_context(_recorded(layer)) for path, layer in layers.items()}
        segment.run(batches, quantized)
    return {path: torch.stack(values).mean(0).to(layers[path].weight.dtype) for path, values in means.items()}


def shift_means(segment: Segment, batches: list[Values], wanted: Mapping[str, Tensor]) -> dict[str, float]:
    """Correct the layers of a segment, one behind the other.

    Args:
        segment: of a calibrated model.
        batches: what it reads in the quantized model.
        wanted: its means in the float model, see :func:`channel_means`.

    Returns:
        The largest correction of each layer.
    """
    found: dict[str, float] = {}
    for path, means in wanted.items():
        error = channel_means(segment, batches, quantized=True)[path] - means
        _shift(segment.layers[path], -error)
        found[path] = float(error.abs().max())
    return found


@contextmanager
def _recorded(layer: QATLayer) -> Iterator[list[Tensor]]:
    """The channel means of what a layer gives before its activation, call by call."""
    activation = layer.activation
    recorder = _Recorder(activation, -1 if layer.weight.dim() == 2 else 1)
    layer.activation = recorder
    try:
        yield recorder.means
    finally:
        layer.activation = activation


class _Recorder(nn.Module):
    """An activation, or nothing, that notes the channel means of what it gets."""

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


def _shift(layer: QATLayer, by: Tensor) -> None:
    """Add to what the layer gives before its activation."""
    bn = layer.bn
    if bn is None:
        assert layer.bias is not None
        layer.bias.add_(by)
    elif bn.bias is not None:
        bn.bias.add_(by)
    else:
        assert bn.running_mean is not None
        bn.running_mean.sub_(by / bn_factor(bn))

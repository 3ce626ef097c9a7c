"""Bias correction: shift each channel so that quantization causes the least squared error.

Source: Nagel et al. 2019 (arXiv:1906.04721), section 4.2 and appendix D: ``E[y] = E[y_q] - E[error]`` (equation 17), on
data, layer by layer, with all earlier layers already corrected. The paper takes the error before the activation, fxqat
the one after it: before SiLU or GELU most values are negative, where these are flat, and a mean over them says nothing
about the others. Where no activation reads the layer, or another op also reads it, the shift is minus the mean error.

The float values are those of the prepared model with its fake-quants off. Correction changes its biases, so a model can
be corrected only once, not after ``reconstruct``, and tools that compare with the float model (``profile``) must run
before.
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
from fxqat.nn.parametrized import has_computed_bias
from fxqat.nn.qat import QATLayer
from fxqat.quantization.graph_module import mark_fitted, prepared_model, require_float_model
from fxqat.tools.post_training.activations import Activation
from fxqat.tools.post_training.segments import Segment, Values, float_segments, named_inputs, split, values_read_later
from fxqat.utils.batches import read_batches
from fxqat.utils.contexts import eval_mode

COMPARED = 2**13
"""Values of a channel that are compared, of all batches together."""

STEPS = 6
"""Shifts that are tried, each a Gauss-Newton step from the one before."""


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
        ConfigError: it was corrected or reconstructed before, there are no batches, or a batch does not fit the model.
    """
    gm = prepared_model(gm, ConfigError)
    require_float_model(gm, "correct_bias")
    inputs = read_batches(gm, batches, "correct_bias")
    enable_quantization(gm)
    mark_fitted(gm, "correct_bias")
    found: dict[str, float] = {}
    with eval_mode(gm):
        segments = split(gm, max_layers=1)
        float_inputs = [named_inputs(gm, batch) for batch in inputs]
        quant_inputs = [dict(values) for values in float_inputs]
        for i, (segment, original) in enumerate(zip(segments, float_segments(segments), strict=True)):
            targets = original.run(float_inputs, quantized=False)
            found |= correct_channels(segment, quant_inputs, channel_values(original, float_inputs, quantized=False))
            float_inputs = values_read_later(segments[i:], float_inputs, targets)
            quant_inputs = values_read_later(segments[i:], quant_inputs, segment.run(quant_inputs, quantized=True))
    return found


def channel_values(segment: Segment, batches: list[Values], quantized: bool) -> dict[str, Tensor]:
    """Values of each channel of each layer's output before its activation, ``(channels, values)``, by path.

    They are at the same random places whenever the segment runs on these batches, :data:`COMPARED` in all, or all there
    are. Only layers that can be corrected are measured: those with a bias or a BatchNorm. What the products of a
    recurrent layer are is not seen from outside, so its bias is not corrected.
    """
    qat = {path: layer for path, layer in segment.own_layers.items() if isinstance(layer, QATLayer)}
    layers = {path: layer for path, layer in qat.items() if layer.bn is not None or _has_own_bias(layer)}
    with ExitStack() as stack:
        recorded = {path: stack.enter_context(_recorded(layer, len(batches))) for path, layer in layers.items()}
        segment.run(batches, quantized)
    return {path: torch.cat(values, 1) for path, values in recorded.items()}


def correct_channels(segment: Segment, batches: list[Values], targets: Mapping[str, Tensor]) -> dict[str, float]:
    """Correct the biases of a segment's layers in order, in place.

    Args:
        segment: a segment of a calibrated model.
        batches: its inputs in the quantized model.
        targets: the float model's values of the layers to correct, see :func:`channel_values`.

    Returns:
        The largest correction of each layer.
    """
    found: dict[str, float] = {}
    for path, wanted in targets.items():
        values = channel_values(segment, batches, quantized=True)[path]
        layer = segment.layers[path]
        if not (values - wanted).isfinite().all():
            raise CalibrationError(
                f"biases cannot be corrected: on these batches the outputs of {path} have NaN or infinity. Look for "
                "NaN in them and for overflow in the float model, and prepare the model again: layers before it are "
                "corrected"
            )
        assert isinstance(layer, QATLayer)  # channel_values measures no other
        shift = best_shift(values, wanted, segment.activations[path])
        _shift_output(layer, shift)
        found[path] = float(shift.abs().max())
    return found


def best_shift(values: Tensor, wanted: Tensor, activation: Activation | None) -> Tensor:
    """What to add to the values of each channel for the least squared error after the activation.

    Formula: ``argmin over s of sum of (activation(values + s) - activation(wanted))**2``, by Gauss-Newton steps from
    the mean difference.

    Args:
        values: ``(channels, values)``.
        wanted: of the same shape.
        activation: elementwise; None for the identity.

    Returns:
        ``(channels,)``, float32: the best of 0 and the shifts that were tried.
    """
    shift = (wanted.double() - values.double()).mean(1).float()
    if activation is None:
        return shift
    values, wanted = values.float(), wanted.float()  # sums of squares may be too large for float16
    target = activation(wanted.clone())
    best, least = torch.zeros_like(shift), (activation(values.clone()) - target).square().sum(1)
    for _ in range(STEPS):
        with torch.enable_grad():
            shifted = (values + shift.unsqueeze(1)).requires_grad_()
            y = activation(shifted.clone())
            (slope,) = torch.autograd.grad(y.sum(), shifted)
        error = target - y.detach()
        squared = error.square().sum(1)
        best, least = torch.where(squared < least, shift, best), torch.minimum(squared, least)
        shift = shift + (slope * error).sum(1) / slope.square().sum(1).clamp(min=torch.finfo(slope.dtype).tiny)
    return best


@contextmanager
def _recorded(layer: QATLayer, batches: int) -> Iterator[list[Tensor]]:
    """Record values of each channel of a layer's output before its activation, call by call."""
    activation = layer.activation
    recorder = _Recorder(activation, 1 - layer.weight.dim(), max(1, COMPARED // batches))
    layer.activation = recorder
    try:
        yield recorder.values
    finally:
        layer.activation = activation


class _Recorder(nn.Module):
    """An activation (or none) that records values of each channel of its input, at random places."""

    def __init__(self, activation: nn.Module | None, axis: int, limit: int) -> None:
        super().__init__()
        self.activation = activation
        self.axis = axis
        self.limit = limit
        self.values: list[Tensor] = []

    def forward(self, y: Tensor) -> Tensor:
        """Apply the activation."""
        rows = y.movedim(self.axis, 0).reshape(y.shape[self.axis], -1)
        if rows.shape[1] > self.limit:
            places = torch.randint(rows.shape[1], (self.limit,), generator=torch.Generator().manual_seed(0))
            rows = rows[:, places.to(y.device)]
        self.values.append(torch.where(y.isfinite().all(), rows, torch.nan))  # what is not finite may be elsewhere
        return y if self.activation is None else self.activation(y)


def _has_own_bias(layer: QATLayer) -> bool:
    """Whether a layer has a bias that a vector can be added to."""
    return layer.bias is not None and not has_computed_bias(layer)


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

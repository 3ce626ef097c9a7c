"""Bias correction: the mean error that quantization brings to each channel is taken out of the bias.

Source: Nagel et al. 2019 (arXiv:1906.04721), section 4.2 and appendix D: ``E[y] = E[y_q] - E[error]`` (equation 17),
with both expectations measured on data before the activation, layer by layer, behind layers that are corrected already.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fxqat.fake_quantize.state import enable_quantization
from fxqat.nn.fold import bn_factor
from fxqat.nn.qat import QATLayer
from fxqat.quantization.graph_module import QuantGraphModule
from fxqat.tools.segments import Segment, Values, inputs_of, needed_after, split
from fxqat.utils.modes import eval_mode


@torch.no_grad()
def correct_bias(gm: QuantGraphModule, batches: Sequence[tuple[Any, ...]]) -> dict[str, float]:
    """Correct every layer that has a bias or a BatchNorm, in place.

    Args:
        gm: a prepared and calibrated model; afterwards its fake-quants are on.
        batches: the model's inputs.

    Returns:
        The largest correction of each corrected layer, in units of its output, by path.

    Raises:
        CalibrationError: the model is not calibrated.
    """
    enable_quantization(gm)
    found: dict[str, float] = {}
    with eval_mode(gm):
        segments = split(gm, max_layers=1)
        exact = [inputs_of(gm, batch) for batch in batches]
        rounded = [dict(values) for values in exact]
        for i, segment in enumerate(segments):
            targets = segment.run(exact, quantized=False)
            for path, layer in segment.layers.items():
                if layer.bias is not None or layer.bn is not None:
                    error = _means(segment, layer, rounded, True) - _means(segment, layer, exact, False)
                    _shift(layer, -error)
                    found[path] = float(error.abs().max())
            exact = needed_after(segments[i:], exact, targets)
            rounded = needed_after(segments[i:], rounded, segment.run(rounded, quantized=True))
    return found


def _means(segment: Segment, layer: QATLayer, batches: list[Values], quantized: bool) -> Tensor:
    """The mean of each channel of what a layer gives before its activation, ``(channels,)``."""
    sums: list[Tensor] = []

    def record(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        axis = output.dim() - 1 if layer.weight.dim() == 2 else 1
        sums.append(output.double().mean([d for d in range(output.dim()) if d != axis]))

    handle = layer.register_forward_hook(record)
    try:
        with _without_activation(layer):
            segment.run(batches, quantized)
    finally:
        handle.remove()
    return torch.stack(sums).mean(0).to(layer.weight.dtype)


@contextmanager
def _without_activation(layer: QATLayer) -> Iterator[None]:
    activation, layer.activation = layer.activation, None
    try:
        yield
    finally:
        layer.activation = activation


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

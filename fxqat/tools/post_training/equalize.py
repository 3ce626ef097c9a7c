"""Cross-layer equalization: move weight ranges between consecutive layers without changing the model's function.

Source: Nagel et al. 2019 (arXiv:1906.04721). With an activation for which ``f(s x) = s f(x)``, output channel i of a
layer can be divided by ``s_i`` and input channel i of the next multiplied by it (equations 5 to 7);
``s_i = sqrt(r1_i * r2_i) / r2_i`` makes both ranges equal (equation 11). High biases are absorbed by the next layer
(equations 12 to 15): ``c = max(0, beta - 3 |gamma|)`` passes a ReLU unchanged, except for one value in a thousand.

The paper replaces ReLU6 by ReLU, which can cost more accuracy than it gains. Here a ReLU6 can stay if there is data: a
channel that is often clipped keeps the factor 1, and no other channel is scaled so far that it would be clipped.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from fxqat.errors import CalibrationError, ConfigError
from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.fake_quantize.state import named_fake_quants
from fxqat.nn.parametrized import computed_tensors
from fxqat.nn.qat import QATLayer
from fxqat.ops.families import IDENTITY
from fxqat.ops.identify import identify
from fxqat.quantization.graph_module import QuantGraphModule, prepared_model
from fxqat.utils.batches import check_batches, read_batch
from fxqat.utils.contexts import eval_mode, hooked
from fxqat.utils.flags import check_flags
from fxqat.utils.fx_graph import called_module, calls_of, only_user

HOMOGENEOUS = frozenset(
    ("relu", "leaky_relu", "max_pool1d", "max_pool2d", "max_pool3d")
    + ("avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
    + ("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d")
)
"""Ops with ``f(s x) = s f(x)`` for a positive factor per channel."""
CLIP = 6.0
CLIPPED_OFTEN = 0.01
"""A channel is not scaled if ReLU6 clips a larger fraction of its values."""


class Pair(NamedTuple):
    """Two layers; the output of the first is read by the second only.

    Args:
        first: path of the first.
        second: path of the second.
        absorbs: whether the second can absorb high biases of the first: there is only a ReLU between them.
    """

    first: str
    second: str
    absorbs: bool


@dataclass
class ClipLimit:
    """How far the output channels of a ReLU6 can be scaled up.

    Args:
        peak: the largest value of each channel so far, ``(channels,)``, at most 6.
        clipped: which channels are clipped often, ``(channels,)``.
    """

    peak: Tensor
    clipped: Tensor

    def limit_(self, factor: Tensor) -> Tensor:
        """Limit the divisors of the channels so that no more values are clipped; update the peaks."""
        factor = torch.where(self.clipped, torch.ones_like(factor), torch.maximum(factor, self.peak / CLIP))
        self.peak = self.peak / factor
        return factor


def equalize(
    gm: nn.Module,
    batches: Iterable[Any] = (),
    *,
    iterations: int = 20,
    absorb_bias: bool = True,
    replace_relu6: bool = False,
) -> list[Pair]:
    """Equalize the weights of consecutive layers, in place.

    Args:
        gm: a prepared model that is not calibrated yet.
        batches: batches of inputs, see :func:`fxqat.calibrate`, to measure what each ReLU6 clips. Without them, layers
            with a ReLU6 between them are not equalized.
        iterations: passes over all pairs; a layer may be in two of them.
        absorb_bias: let the second layer absorb high biases of the first. With zero padding this changes the output
            slightly at the border.
        replace_relu6: replace each ReLU6 between two layers by ReLU, which computes the same below 6.

    Returns:
        The equalized pairs.

    Raises:
        CalibrationError: the model is calibrated already; its ranges would no longer fit.
        ConfigError: a batch does not fit the model.
    """
    check_flags(ConfigError, "equalize", absorb_bias=absorb_bias, replace_relu6=replace_relu6)
    gm = prepared_model(gm, ConfigError)
    check_not_calibrated(gm, "equalize")
    check_batches(batches, "equalize")
    if replace_relu6:
        _replace_relu6(gm)
    with torch.no_grad():
        limits = _clip_limits(gm, batches)
        pairs = list(_pairs(gm, limits))
        for _ in range(iterations):
            for pair in pairs:
                _equalize_pair(_layer(gm, pair.first), _layer(gm, pair.second), limits.get(pair.first))
        for pair in pairs if absorb_bias else ():
            if pair.absorbs:
                _absorb(_layer(gm, pair.first), _layer(gm, pair.second))
    return pairs


def check_not_calibrated(gm: QuantGraphModule, caller: str) -> None:
    """Refuse a calibrated model.

    Raises:
        CalibrationError: a fake-quant has seen data; its range would no longer fit.
    """
    if any(quant.observer.has_seen_data() and quant.scheme.fixed_range is None for _, quant in named_fake_quants(gm)):
        raise CalibrationError(f"{caller} changes the ranges of weights and activations: call it before calibration")


def _layer(gm: QuantGraphModule, path: str) -> QATLayer:
    layer = gm.get_submodule(path)
    assert isinstance(layer, QATLayer)
    return layer


def _replace_relu6(gm: QuantGraphModule) -> None:
    for node in gm.graph.nodes:
        layer = called_module(node)
        if isinstance(layer, QATLayer) and type(layer.activation) is nn.ReLU6 and _reader(node) is not None:
            layer.activation = nn.ReLU().train(layer.training)


def _clip_limits(gm: QuantGraphModule, batches: Iterable[Any]) -> dict[str, ClipLimit]:
    """Measure the layers with a ReLU6, by path."""
    peaks: dict[str, list[Tensor]] = defaultdict(list)
    clipped: dict[str, list[Tensor]] = defaultdict(list)

    layers = {layer: path for path, layer in gm.named_modules() if isinstance(layer, QATLayer)}
    clipping = {layer: path for layer, path in layers.items() if type(layer.activation) is nn.ReLU6}

    def measure(layer: QATLayer, _: Any, output: Tensor) -> None:
        channels = output.movedim(-1 if layer.weight.dim() == 2 else 1, 0).flatten(1)
        peaks[clipping[layer]].append(channels.amax(1))
        clipped[clipping[layer]].append((channels >= CLIP).float().mean(1))

    with eval_mode(gm), hooked(clipping, measure):
        for batch in batches if clipping else ():
            gm(*read_batch(gm, batch, "equalize"))
    means = {path: torch.stack(fractions).mean(0) for path, fractions in clipped.items()}
    return {path: ClipLimit(torch.stack(seen).amax(0), means[path] > CLIPPED_OFTEN) for path, seen in peaks.items()}


def _pairs(gm: QuantGraphModule, limits: Mapping[str, ClipLimit]) -> Iterator[Pair]:
    calls = {key: len(nodes) for key, nodes in calls_of(gm).items()}
    owners = Counter(id(tensor) for module in gm.modules() for tensor in module.parameters(recurse=False))
    for node in gm.graph.nodes:
        first, reader = called_module(node), _reader(node)
        if not isinstance(first, QATLayer) or reader is None or not _can_be_scaled(first, str(node.target) in limits):
            continue
        second = called_module(reader)
        assert isinstance(second, QATLayer)
        if computed_tensors(first) or computed_tensors(second):
            continue  # a factor cannot be written into it
        if owners[id(first.weight)] > 1 or owners[id(second.weight)] > 1:
            continue  # a tied weight is not only this layer's
        if calls[id(first)] == calls[id(second)] == 1 and first.weight.dim() == second.weight.dim():
            directly = all(isinstance(called_module(n), FakeQuantizeBase) for n in _between(node, reader))
            yield Pair(str(node.target), str(reader.target), directly and _can_absorb(first, second))


def _can_be_scaled(first: QATLayer, has_limit: bool) -> bool:
    """Whether the layer can absorb a factor per output channel, and its activation is homogeneous or limited."""
    normalized = first.bn is None or first.bn.weight is not None
    return normalized and (has_limit or type(first.activation) in (type(None), nn.ReLU, nn.LeakyReLU))


def _can_absorb(first: QATLayer, second: QATLayer) -> bool:
    """Whether the statistics of the first layer's channels are known, and the second layer can absorb a shift."""
    can_shift = second.op.axis == 0 and (second.bias is not None or second.bn is not None)
    return first.bn is not None and isinstance(first.activation, nn.ReLU) and can_shift


def _reader(node: fx.Node) -> fx.Node | None:
    """The only layer that reads the value of a node, through homogeneous ops; None if there is no such layer."""
    reader = only_user(node)
    while reader is not None and not isinstance(called_module(reader), QATLayer):
        op = identify(reader)
        passes = isinstance(called_module(reader), FakeQuantizeBase) or op.family == IDENTITY or op.name in HOMOGENEOUS
        reader = only_user(reader) if passes else None
    return reader


def _between(node: fx.Node, reader: fx.Node) -> Iterator[fx.Node]:
    following = only_user(node)
    while following is not None and following is not reader:
        yield following
        following = only_user(following)


def _equalize_pair(first: QATLayer, second: QATLayer, limit: ClipLimit | None) -> None:
    """Equation 11 for one pair, within the limits of a ReLU6.

    For a channel that is all zero on one side every factor is right. It is scaled so that its other side is no larger
    than the largest equalized range, because a dead channel may be read with weights far beyond all others.
    """
    outgoing, incoming = _by_output(first).abs().amax((1, 2)), by_input(second).abs().amax((1, 2))
    equalized = torch.sqrt(outgoing * incoming)
    largest = equalized.max()
    if not largest > 0:
        return
    factor = torch.where(outgoing > 0, torch.clamp(outgoing / largest, min=1.0), torch.clamp(largest / incoming, max=1))
    factor = torch.where(equalized > 0, equalized / incoming, factor)
    factor = torch.where((outgoing > 0) | (incoming > 0), factor, torch.ones_like(factor))
    if limit is not None:
        factor = limit.limit_(factor)
    if first.bn is not None:
        first.bn.weight.div_(factor)
        first.bn.bias.div_(factor)
    else:
        first.weight.div_(first.op.per_output_channel(factor, first.weight))
        if first.bias is not None:
            first.bias.div_(factor)
    multiply_inputs(second, factor)


def multiply_inputs(layer: QATLayer, factor: Tensor) -> None:
    """Multiply the weight of each input channel by its factor, ``(in_channels,)``, in place."""
    grouped = _grouped(layer, layer.weight)
    shape = [grouped.shape[0], 1, 1, 1]
    shape[1 if layer.op.axis == 1 else 2] = -1
    layer.weight.copy_((grouped * factor.reshape(shape)).reshape(layer.weight.shape))


def _absorb(first: QATLayer, second: QATLayer) -> None:
    """Equations 12 to 15 for one pair."""
    assert first.bn is not None
    excess = torch.clamp(first.bn.bias - 3 * first.bn.weight.abs(), min=0.0)
    first.bn.bias.sub_(excess)
    weight = _grouped(second, second.weight).sum(3)
    shift = (weight * excess.reshape(weight.shape[0], 1, -1)).sum(2).reshape(-1)
    if second.bias is not None:
        second.bias.add_(shift)
    else:
        assert second.bn is not None
        assert second.bn.running_mean is not None
        second.bn.running_mean.sub_(shift)


def _grouped(layer: QATLayer, weight: Tensor) -> Tensor:
    """A weight as ``(groups, out, in, positions)``; of a transposed convolution ``(groups, in, out, positions)``."""
    groups = int(layer.op.arguments.get("groups", 1))
    return weight.reshape(groups, weight.shape[0] // groups, weight.shape[1], -1)


def _by_output(layer: QATLayer) -> Tensor:
    """The folded weight as ``(out_channels, in, positions)``."""
    grouped = _grouped(layer, layer.folded()[0])
    return (grouped.transpose(1, 2) if layer.op.axis == 1 else grouped).flatten(0, 1)


def by_input(layer: QATLayer) -> Tensor:
    """The folded weight as ``(in_channels, out, positions)``."""
    grouped = _grouped(layer, layer.folded()[0])
    return (grouped if layer.op.axis == 1 else grouped.transpose(1, 2)).flatten(0, 1)

"""Cross-layer equalization: ranges of weights are moved between consecutive layers without changing the function.

Source: Nagel et al. 2019 (arXiv:1906.04721). With an activation for which ``f(s x) = s f(x)``, output channel i of a
layer can be divided by ``s_i`` and input channel i of the next multiplied by it (equations 5 to 7);
``s_i = sqrt(r1_i * r2_i) / r2_i`` makes both ranges equal (equation 11). High biases are absorbed by the next layer
(equations 12 to 15): ``c = max(0, beta - 3 |gamma|)`` passes a ReLU unchanged, but for one value in a thousand.

The paper replaces ReLU6 by ReLU, which can cost more than it gains. Here a ReLU6 may stay: on data, a channel that is
often clipped keeps its factor 1, and no other is made so large that it would be clipped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from fxqat.errors import CalibrationError
from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.fake_quantize.state import named_fake_quants
from fxqat.nn.qat import QATLayer
from fxqat.ops.identify import identify
from fxqat.ops.table import IDENTITY
from fxqat.quantization.graph_module import QuantGraphModule
from fxqat.utils.batches import check_batches, read_batch
from fxqat.utils.contexts import eval_mode
from fxqat.utils.fx_graph import called_module, calls_of, only_user

HOMOGENEOUS = frozenset(
    ("relu", "leaky_relu", "max_pool1d", "max_pool2d", "max_pool3d")
    + ("avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
    + ("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d")
)
"""Ops that a positive factor of each channel passes through."""
CLIP = 6.0
OFTEN = 0.01
"""Part of a channel's values that ReLU6 clips, from which on the channel is not scaled."""


class Pair(NamedTuple):
    """Two layers of which the second reads what the first gives, and nobody else does.

    Args:
        first: path of the first.
        second: path of the second.
        absorbs: whether a shift of channels passes from the one to the other: there is nothing but a ReLU between.
    """

    first: str
    second: str
    absorbs: bool


@dataclass
class Room:
    """How far the channels that a ReLU6 gives can be scaled.

    Args:
        peak: the largest value of each channel, ``(channels,)``, at most 6; divided by what the channel is divided by.
        clipped: which channels are clipped often, ``(channels,)``.
    """

    peak: Tensor
    clipped: Tensor

    def limited(self, factor: Tensor) -> Tensor:
        """The nearest divisors of the channels that clip nothing more; they count as applied."""
        factor = torch.where(self.clipped, torch.ones_like(factor), torch.maximum(factor, self.peak / CLIP))
        self.peak = self.peak / factor
        return factor


def equalize(
    gm: QuantGraphModule,
    batches: Iterable[Any] = (),
    *,
    iterations: int = 20,
    absorb_bias: bool = True,
    replace_relu6: bool = False,
) -> list[Pair]:
    """Equalize the weights of consecutive layers, in place.

    Args:
        gm: a prepared model that is not calibrated yet.
        batches: inputs of the model, each a tensor or a tuple, to see what each ReLU6 clips. Without them no ReLU6 is
            between two layers of a pair.
        iterations: times that all pairs are gone through: a layer may be in two of them.
        absorb_bias: let the second layer take over high biases of the first. With zero padding this changes a little at
            the border.
        replace_relu6: make each ReLU6 between two layers a ReLU, which is what most values see. Others stay apart.

    Returns:
        The pairs.

    Raises:
        CalibrationError: the model is calibrated already; its ranges would not fit any more.
    """
    if any(quant.observer.has_seen_data() and quant.scheme.fixed_range is None for _, quant in named_fake_quants(gm)):
        raise CalibrationError("equalize changes the ranges of weights and values: call it before calibration")
    check_batches(batches, "equalize")
    if replace_relu6:
        _replace_relu6(gm)
    with torch.no_grad():
        rooms = _rooms(gm, batches)
        pairs = list(_pairs(gm, rooms))
        for _ in range(iterations):
            for pair in pairs:
                _balance(_layer(gm, pair.first), _layer(gm, pair.second), rooms.get(pair.first))
        for pair in pairs if absorb_bias else ():
            if pair.absorbs:
                _absorb(_layer(gm, pair.first), _layer(gm, pair.second))
    return pairs


def _layer(gm: QuantGraphModule, path: str) -> QATLayer:
    layer = gm.get_submodule(path)
    assert isinstance(layer, QATLayer)
    return layer


def _replace_relu6(gm: QuantGraphModule) -> None:
    for node in gm.graph.nodes:
        layer = called_module(node)
        if isinstance(layer, QATLayer) and type(layer.activation) is nn.ReLU6 and _reader(node) is not None:
            layer.activation = nn.ReLU().train(layer.training)


def _rooms(gm: QuantGraphModule, batches: Iterable[Any]) -> dict[str, Room]:
    """By path, of the layers with a ReLU6 that ran."""
    peaks: dict[str, list[Tensor]] = defaultdict(list)
    clipped: dict[str, list[Tensor]] = defaultdict(list)

    def watch(path: str, layer: QATLayer, _: Any, output: Tensor) -> None:
        rows = output.movedim(-1 if layer.weight.dim() == 2 else 1, 0).flatten(1)
        peaks[path].append(rows.amax(1))
        clipped[path].append((rows >= CLIP).float().mean(1))

    layers = {path: layer for path, layer in gm.named_modules() if isinstance(layer, QATLayer)}
    clipping = {path: layer for path, layer in layers.items() if type(layer.activation) is nn.ReLU6}
    with eval_mode(gm), ExitStack() as stack:
        for path, layer in clipping.items():
            stack.callback(layer.register_forward_hook(partial(watch, path)).remove)
        for batch in batches if clipping else ():
            gm(*read_batch(gm, batch, "equalize"))
    means = {path: torch.stack(shares).mean(0) for path, shares in clipped.items()}
    return {path: Room(torch.stack(seen).amax(0), means[path] > OFTEN) for path, seen in peaks.items()}


def _pairs(gm: QuantGraphModule, rooms: Mapping[str, Room]) -> Iterator[Pair]:
    calls = {key: len(nodes) for key, nodes in calls_of(gm).items()}
    for node in gm.graph.nodes:
        first, reader = called_module(node), _reader(node)
        if not isinstance(first, QATLayer) or reader is None or not _can_be_scaled(first, str(node.target) in rooms):
            continue
        second = called_module(reader)
        assert isinstance(second, QATLayer)
        if calls[id(first)] == calls[id(second)] == 1 and first.weight.dim() == second.weight.dim():
            directly = all(isinstance(called_module(n), FakeQuantizeBase) for n in _between(node, reader))
            yield Pair(str(node.target), str(reader.target), directly and _can_absorb(first, second))


def _can_be_scaled(first: QATLayer, has_room: bool) -> bool:
    """Whether a factor for each output channel can be written into the layer, and passes its activation."""
    normalized = first.bn is None or first.bn.weight is not None
    return normalized and (has_room or type(first.activation) in (type(None), nn.ReLU, nn.LeakyReLU))


def _can_absorb(first: QATLayer, second: QATLayer) -> bool:
    """Whether the statistics of the first layer's channels are known, and the second can take a shift of them."""
    has_place = second.op.axis == 0 and (second.bias is not None or second.bn is not None)
    return first.bn is not None and isinstance(first.activation, nn.ReLU) and has_place


def _reader(node: fx.Node) -> fx.Node | None:
    """The layer that alone reads the value of a node, through homogeneous ops."""
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


def _balance(first: QATLayer, second: QATLayer, room: Room | None) -> None:
    """Equation 11 for one pair, as far as there is room.

    Of a channel that is all zero on one side, any factor does: its other side is made no larger than what is largest
    elsewhere. A dead channel may be read with weights far beyond all others.
    """
    outgoing, incoming = _by_output(first).abs().amax((1, 2)), _by_input(second).abs().amax((1, 2))
    equalized = torch.sqrt(outgoing * incoming)
    largest = equalized.max()
    if not largest > 0:
        return
    factor = torch.where(outgoing > 0, torch.clamp(outgoing / largest, min=1.0), torch.clamp(largest / incoming, max=1))
    factor = torch.where(equalized > 0, equalized / incoming, factor)
    factor = torch.where((outgoing > 0) | (incoming > 0), factor, torch.ones_like(factor))
    if room is not None:
        factor = room.limited(factor)
    if first.bn is not None:
        first.bn.weight.div_(factor)
        first.bn.bias.div_(factor)
    else:
        first.weight.div_(first.op.per_output_channel(factor, first.weight))
        if first.bias is not None:
            first.bias.div_(factor)
    grouped = _grouped(second, second.weight)
    inputs_at = 1 if second.op.axis == 1 else 2
    shape = [grouped.shape[0], 1, 1, 1]
    shape[inputs_at] = -1
    second.weight.copy_((grouped * factor.reshape(shape)).reshape(second.weight.shape))


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


def _by_input(layer: QATLayer) -> Tensor:
    """The folded weight as ``(in_channels, out, positions)``."""
    grouped = _grouped(layer, layer.folded()[0])
    return (grouped if layer.op.axis == 1 else grouped.transpose(1, 2)).flatten(0, 1)

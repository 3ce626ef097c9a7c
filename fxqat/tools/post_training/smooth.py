"""SmoothQuant: move the ranges of channels from the outputs of normalization layers into the weights that read them.

In transformers a few channels behind a LayerNorm are far larger than all others, and one scale for the whole tensor
leaves the others few integers. Output channel j of the layer can be divided by ``s_j``, if input channel j of every
linear layer that reads it is multiplied by it: weights have a scale for each output channel, or are easier to quantize.

Source: Xiao et al. 2022 (arXiv:2211.10438), equations 3 and 4.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from fxqat.custom_quantizer.unread_values import reads_no_value
from fxqat.custom_quantizer.value_kinds import value_kinds
from fxqat.errors import CalibrationError, ConfigError
from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.nn.parametrized import has_computed_weight
from fxqat.nn.qat import QATLayer
from fxqat.ops.families import IDENTITY
from fxqat.ops.identify import identify
from fxqat.quantization.graph_module import QuantGraphModule, prepared_model
from fxqat.tools.post_training.equalize import by_input, check_not_calibrated, multiply_inputs
from fxqat.utils.batches import check_batches, read_batch
from fxqat.utils.contexts import eval_mode, hooked
from fxqat.utils.fx_graph import argument, attribute_of, called_module, calls_of, only_user
from fxqat.utils.node_meta import SHAPE, Kind
from fxqat.utils.train_eval_graph import eval_or_train

NORMS = ("layer_norm", "rms_norm")
"""Operations with a factor for each channel of the last dimension."""


class Smoothed(NamedTuple):
    """A normalization whose output was smoothed.

    Args:
        norm: its node.
        layers: paths of the linear layers that read it.
        before: the largest value of its output over the mean of the largest values of all channels, before.
        after: the same, after.
    """

    norm: str
    layers: tuple[str, ...]
    before: float
    after: float


@dataclass(frozen=True)
class Norm:
    """A normalization that can take part.

    Args:
        name: of its node.
        parameters: its weight and, if it has one, its bias; its output scales with both, channel by channel.
        layers: the linear layers that read it, by path; at least one of them is quantized.
    """

    name: str
    parameters: tuple[Tensor, ...]
    layers: dict[str, QATLayer | nn.Linear]


def smooth(gm: nn.Module, batches: Iterable[Any], *, alpha: float = 0.5) -> list[Smoothed]:
    """Divide the output channels of LayerNorm and RMSNorm by factors that the linear layers behind them take, in place.

    Formula: ``s_j = max|x_j|**alpha / max|w_j|**(1 - alpha)``, with ``x_j`` channel j of the output on all batches and
    ``w_j`` what all quantized layers that read it multiply it by. A channel that is zero on one side keeps the factor
    1. The model computes the same function.

    A LayerNorm or RMSNorm, as a module or a function, takes part if it has a weight, normalizes the last dimension
    alone, is called once, and only linear layers read it, at least one of them quantized, each of them called once and
    with a weight of its own, directly or through operations that keep the last dimension (reshape, permute, roll, pad,
    dropout). So does one that is written out, as in Llama: a product with a parameter of the last dimension, and a sum
    of it with another one. What runs on none of the batches, as in training only, stays as it is.

    Args:
        gm: a prepared model that is not calibrated yet.
        batches: batches of inputs, see :func:`fxqat.calibrate`.
        alpha: how much of the ranges the weights take: 0 none, 1 all.

    Returns:
        What was smoothed, in the order of execution.

    Raises:
        CalibrationError: the model is calibrated already; its ranges would no longer fit.
        ConfigError: ``alpha`` is not from 0 to 1, there are no batches, a batch does not fit the model, or no layer
            can take part.
    """
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 <= alpha <= 1:
        raise ConfigError(f"smooth: expected alpha from 0 to 1, got {alpha!r}")
    gm = prepared_model(gm, ConfigError)
    check_not_calibrated(gm, "smooth")
    check_batches(batches, "smooth")
    norms = list(_norms(gm))
    if not norms:
        raise ConfigError(
            "smooth: the model has no LayerNorm or RMSNorm with a weight whose output only linear layers read. Leave "
            "smooth out; for convolutions there is equalize."
        )
    peaks = _peaks(gm, norms, batches)
    with torch.no_grad():
        return [_smooth_one(norm, peaks[norm.name], alpha) for norm in norms if norm.name in peaks]


def _smooth_one(norm: Norm, peak: Tensor, alpha: float) -> Smoothed:
    quantized = [layer for layer in norm.layers.values() if isinstance(layer, QATLayer)]
    read = torch.stack([by_input(layer).abs().amax((1, 2)) for layer in quantized]).amax(0)
    factor = torch.where((peak > 0) & (read > 0), peak.pow(alpha) / read.pow(1 - alpha), torch.ones_like(peak))
    for parameter in norm.parameters:
        parameter.div_(factor)
    for layer in norm.layers.values():
        if isinstance(layer, QATLayer):
            multiply_inputs(layer, factor)
        else:
            layer.weight.mul_(factor)
    return Smoothed(norm.name, tuple(norm.layers), _unevenness(peak), _unevenness(peak / factor))


def _unevenness(peak: Tensor) -> float:
    return float(peak.max() / peak.mean().clamp(min=torch.finfo(peak.dtype).tiny))


def _peaks(gm: QuantGraphModule, norms: Sequence[Norm], batches: Iterable[Any]) -> dict[str, Tensor]:
    """The largest magnitude of each channel of the outputs, by node: each ``(channels,)``."""
    names: dict[nn.Module, str] = {next(iter(norm.layers.values())): norm.name for norm in norms}
    peaks: dict[str, Tensor] = {}

    def measure(layer: nn.Module, inputs: tuple[Tensor, ...], _: Any) -> None:
        name, seen = names[layer], inputs[0].abs().reshape(-1, inputs[0].shape[-1]).amax(0)
        peaks[name] = torch.maximum(peaks[name], seen) if name in peaks else seen

    with eval_mode(gm), torch.no_grad(), hooked(names, measure):
        for batch in batches:
            gm(*read_batch(gm, batch, "smooth"))
    if not peaks:
        raise ConfigError("smooth: needs at least one batch of inputs on which a normalization runs")
    for name, peak in peaks.items():
        if not torch.isfinite(peak).all():
            raise CalibrationError(f"smooth: the output of {name!r} is not finite on the batches")
    return peaks


def can_smooth(gm: QuantGraphModule) -> bool:
    """Whether a normalization can take part."""
    return any(True for _ in _norms(gm))


def _norms(gm: QuantGraphModule) -> Iterator[Norm]:
    """The normalizations that can take part, in the order of execution."""
    calls = {key: len(nodes) for key, nodes in calls_of(gm).items()}
    kinds = value_kinds(gm)
    reads: Counter[int] = Counter()  # of parameters, by modules and by nodes
    for owner in gm.modules():
        reads.update(id(tensor) for tensor in owner.parameters(recurse=False))
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            reads[id(attribute_of(gm, node))] += len(node.users)
    for node in gm.graph.nodes:
        parameters = _parameters(gm, node)
        module = called_module(node)
        own = 1 if module is not None else 2  # a module that owns it, and a function that reads it
        is_shared = module is not None and calls[id(module)] > 1
        if not parameters or is_shared or any(reads[id(tensor)] > own for tensor in parameters):
            continue
        layers = _linear_readers(node, parameters[0].shape[-1], kinds) or {}
        if any(map(has_computed_weight, layers.values())):
            continue  # a factor cannot be written into it
        is_quantized = any(isinstance(layer, QATLayer) for layer in layers.values())
        if is_quantized and all(calls[id(layer)] == reads[id(layer.weight)] == 1 for layer in layers.values()):
            yield Norm(node.name, parameters, layers)


def _parameters(gm: QuantGraphModule, node: fx.Node) -> tuple[Tensor, ...]:
    """The weight, and the bias if there is one, with which a value scales; nothing for other values."""
    name = identify(node).name
    if name in NORMS:
        return _of_norm(gm, node)
    if name not in ("add", "mul") or len(node.args) != 2:
        return ()
    by_place = [_of_channels(gm, each, node) for each in node.args]
    found = [each for each in by_place if each is not None]
    if name == "mul" or len(found) != 1:
        return tuple(found) if len(found) == 1 else ()
    product = _unquantized(node.args[by_place.index(None)])
    if product is None or identify(product).name != "mul" or only_user(product) is None:
        return ()
    of_product = _parameters(gm, product)
    return (*of_product, *found) if of_product else ()


def _of_channels(gm: QuantGraphModule, value: object, node: fx.Node) -> nn.Parameter | None:
    """A parameter with an element for each index of the last dimension of an operation's result."""
    read = _unquantized(value)
    given = attribute_of(gm, read) if read is not None and read.op == "get_attr" else None
    shape = node.meta.get(SHAPE, ())
    fits = isinstance(given, nn.Parameter) and given.dim() and shape and given.numel() == given.shape[-1] == shape[-1]
    return given if fits and isinstance(given, nn.Parameter) else None


def _unquantized(value: object) -> fx.Node | None:
    """The node whose value is given, without a fake-quant that only one node reads."""
    if not isinstance(value, fx.Node):
        return None
    is_quantized = isinstance(called_module(value), FakeQuantizeBase) and only_user(value) is not None
    return value.all_input_nodes[0] if is_quantized else value


def _of_norm(gm: QuantGraphModule, node: fx.Node) -> tuple[Tensor, ...]:
    """The weight and bias of a normalization of the last dimension; nothing if one of them is computed."""
    module = called_module(node)
    if module is not None:
        given = [getattr(module, name, None) for name in ("weight", "bias")]
    else:
        read = [argument(node, 2, "weight"), argument(node, 3, "bias")]
        given = [
            attribute_of(gm, each) if isinstance(each, fx.Node) and each.op == "get_attr" else each for each in read
        ]
    if given[0] is None or not all(each is None or isinstance(each, nn.Parameter) for each in given):
        return ()
    return tuple(each for each in given if each is not None) if given[0].dim() == 1 else ()


def _linear_readers(
    node: fx.Node, channels: int, kinds: Mapping[fx.Node, Kind]
) -> dict[str, QATLayer | nn.Linear] | None:
    """The linear layers, by path, that read a value whose last dimension holds channels; None if others read it."""
    found: dict[str, QATLayer | nn.Linear] = {}
    for user in node.users:
        layer, op = called_module(user), identify(user)
        if reads_no_value(user, node, kinds):
            continue
        if isinstance(layer, (QATLayer, nn.Linear)) and op.name == "linear":
            found[str(user.target)] = layer
            continue
        passes = isinstance(layer, FakeQuantizeBase) or op.family == IDENTITY or _keeps_last(user, channels)
        is_chosen = user.target is eval_or_train  # its readers read another value in the other mode
        behind = _linear_readers(user, channels, kinds) if passes and not is_chosen else None
        if behind is None:
            return None
        found |= behind
    return found


def _keeps_last(node: fx.Node, channels: int) -> bool:
    """Whether an operation moves values, or adds zeros, along the other dimensions only.

    A reshape that keeps the size of the last dimension keeps what is in it: the elements stay in their order.
    """
    shape = node.meta.get(SHAPE, ())
    if not shape or shape[-1] != channels:
        return False
    name, last = identify(node).name, {-1, len(shape) - 1}
    if name == "reshape":
        return True
    if name == "pad":
        amounts, value = argument(node, 1, "pad"), argument(node, 3, "value")
        return list(amounts or ())[:2] == [0, 0] and not value and argument(node, 2, "mode") in (None, "constant")
    if name == "roll":
        dims = argument(node, 2, "dims")
        return dims is not None and last.isdisjoint(dims if isinstance(dims, (tuple, list)) else (dims,))
    if name != "permute" or node.kwargs:
        return False
    dims = [dim for given in node.args[1:] for dim in (given if isinstance(given, (tuple, list)) else (given,))]
    if getattr(node.target, "__name__", node.target) == "permute":
        return dims[-1] in last
    return len(dims) == 2 and last.isdisjoint(dims)

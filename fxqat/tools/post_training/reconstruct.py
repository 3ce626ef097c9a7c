"""Reconstruction: segment by segment, make the quantized model reproduce the outputs of the float model.

The published methods are settings of one procedure (:data:`METHODS`):

* GPTQ: layer by layer, in closed form: the other weights compensate the rounding error of each weight. Frantar et al.
  2022 (arXiv:2210.17323), see :mod:`fxqat.tools.post_training.gptq`;
* AdaRound: layer by layer, the rounding of the weights is learned. Nagel et al. 2020 (arXiv:2004.10568), equations 21
  to 25;
* BRECQ: blocks instead of layers, and the scales of activations are learned as well. Li et al. 2021 (arXiv:2102.05426),
  equation 10, with the squared error of the output instead of the Fisher-weighted error;
* QDrop: BRECQ with a random part of the activations left float. Wei et al. 2022 (arXiv:2203.05740), equation 8.

The result is written into the weights, so that rounding to the nearest gives the learned integers. What GPTQ writes
lies between them, where learning can go on; without its fake-quants the model is then far from the float model.

At 4 bits and below, most of the error before learning may be a shift of channel means, which the choice of rounding can
hardly correct. So the biases of a segment can be corrected (:mod:`fxqat.tools.post_training.correct_bias`) before
learning, and again after it.

Of three states of a segment (before learning, after it, after the last bias correction) the one with the least error is
kept: with few iterations, learning may end worse than GPTQ, and a bias correction may undo part of what was learned.

All calls of a layer are in one segment where that is small enough. Else, and if its weight is also another layer's, it
is learned where it is called first, and its other segments are learned with it as it is then.

GPTQ looks at the products of a layer, but the inputs of a layer that is called several times may change with its own
weights, and so do the states of a recurrent layer, whose gates saturate as well. So a segment with such layers is tried
in three ways: rounded to the nearest, by GPTQ that starts at the weight, and by GPTQ that starts at the weight that
best reproduces the float model's products. The one with the least error of the segment's outputs, with the inputs that
it has in the quantized model, is kept before learning.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from fxqat.errors import CalibrationError, ConfigError
from fxqat.fake_quantize.state import enable_quantization
from fxqat.nn.parametrized import has_computed_weight
from fxqat.nn.qat import QATLayer
from fxqat.nn.recurrent import QATRecurrentLayer
from fxqat.quantization.graph_module import QuantGraphModule, finished_model, mark_fitted, require_float_model
from fxqat.tools.post_training.adaround_loop import LearnedRounding, learn_rounding
from fxqat.tools.post_training.correct_bias import channel_values, correct_channels
from fxqat.tools.post_training.gptq import GPTQ, gptq_weight
from fxqat.tools.post_training.layer_weights import require_plain, weights_of
from fxqat.tools.post_training.segments import Segment, Values, float_segments, named_inputs, split, values_read_later
from fxqat.utils.batches import read_batches
from fxqat.utils.contexts import eval_mode
from fxqat.utils.flags import check_flags
from fxqat.utils.tensors import flatten_tensors


@dataclass(frozen=True, kw_only=True)
class Reconstruction(LearnedRounding, GPTQ):
    """Settings of a reconstruction: GPTQ if ``gptq``, then learned rounding if ``iterations`` is not 0.

    Args:
        max_layers: most weighted layers in a segment, see :func:`fxqat.tools.post_training.segments.split`; 1: layer by
            layer. All other arguments are those of :class:`~fxqat.tools.post_training.gptq.GPTQ` and of
            :class:`~fxqat.tools.post_training.adaround_loop.LearnedRounding`.

    Raises:
        ConfigError: a value is out of range.
    """

    max_layers: int = 6

    def __post_init__(self) -> None:
        GPTQ.__post_init__(self)
        LearnedRounding.__post_init__(self)
        least = 0 if self.gptq else 1
        if not self.iterations >= least:
            raise ConfigError(f"iterations must be at least {least} with gptq={self.gptq}, got {self.iterations}")


METHODS: Mapping[str, Reconstruction] = MappingProxyType(
    {
        "GPTQ": Reconstruction(max_layers=1, gptq=True, iterations=0),
        "AdaRound": Reconstruction(max_layers=1, scale_lr=0.0),
        "BRECQ": Reconstruction(),
        "QDrop": Reconstruction(drop=0.5),
    }
)


def reconstruct(
    gm: nn.Module,
    batches: Iterable[Any],
    method: str | Reconstruction = "QDrop",
    *,
    correct_bias: bool = False,
    seed: int = 0,
    progress: bool = False,
) -> dict[str, tuple[float, float]]:
    """Choose the rounding of weights and the scales of activations on unlabelled data, in place.

    Args:
        gm: a prepared and calibrated model; afterwards its fake-quants are on and its mode is unchanged.
        batches: batches of inputs, see :func:`fxqat.calibrate`. They are kept in memory, with the values between two
            segments of the float and of the quantized model.
        method: a name in :data:`METHODS`, or a setting.
        correct_bias: correct the biases of each segment before learning, and after it where that lowers the error.
        seed: seed of the random numbers.
        progress: show a progress bar if the output is a terminal.

    Returns:
        For each segment with weights, by the path of its last layer: the mean squared error of its outputs relative to
        the mean square of the float model's, before and after.

    Raises:
        CalibrationError: the model is not calibrated, or the batches give NaN.
        ConfigError: unknown method, no batches, a batch that does not fit the model, a weight fake-quant that rounds a
            function of the weight, or a model that was reconstructed or whose biases were corrected before (without its
            fake-quants it is not the float model).
    """
    check_flags(ConfigError, "reconstruct", correct_bias=correct_bias, progress=progress)
    gm = finished_model(gm, ConfigError)
    setting = _setting(method)
    require_float_model(gm, "reconstruct")
    inputs = read_batches(gm, batches, "reconstruct")
    enable_quantization(gm)
    _require_plain_weights(gm)
    mark_fitted(gm, "reconstruct")
    errors: dict[str, tuple[float, float]] = {}
    generator = torch.Generator().manual_seed(seed)
    with eval_mode(gm), torch.random.fork_rng(), _frozen(gm):
        torch.manual_seed(seed)
        segments = split(gm, setting.max_layers)
        originals = float_segments(segments)
        float_inputs = [named_inputs(gm, batch) for batch in inputs]
        quant_inputs = [dict(values) for values in float_inputs]
        for i, segment in enumerate(tqdm(segments, "reconstruct", leave=False, disable=None if progress else True)):
            targets = originals[i].run(float_inputs, quantized=False)
            if segment.own_layers:
                _require_numbers(segment, targets)
                wanted = channel_values(originals[i], float_inputs, quantized=False) if correct_bias else {}
                before = _error(segment, quant_inputs, targets)
                after = _reconstruct_(
                    segment, originals[i], float_inputs, quant_inputs, targets, wanted, setting, generator
                )
                errors[list(segment.own_layers)[-1]] = (before, after)
            float_inputs = values_read_later(segments[i:], float_inputs, targets)
            quant_inputs = values_read_later(segments[i:], quant_inputs, segment.run(quant_inputs, quantized=True))
    return errors


def _reconstruct_(
    segment: Segment,
    original: Segment,
    float_inputs: list[Values],
    quant_inputs: list[Values],
    targets: list[Values],
    wanted: Mapping[str, Tensor],
    setting: Reconstruction,
    generator: torch.Generator,
) -> float:
    """Reconstruct one segment, and return its error; the arguments are those of :func:`learn_rounding`.

    ``original`` computes the values of the float model. ``wanted`` has its values for the layers whose biases are
    corrected.
    """
    float_segment = copy.deepcopy(original) if setting.gptq else original  # before its biases are corrected
    round_by_gptq = partial(_apply_gptq_, segment, float_segment, float_inputs, quant_inputs, wanted, setting)
    steps: list[Callable[[], object]] = []
    if not setting.gptq:
        correct_channels(segment, quant_inputs, wanted)
    elif not segment.repeated.isdisjoint(segment.own_layers):
        correct_channels(segment, quant_inputs, wanted)
        nearest = copy.deepcopy(segment.module.state_dict())

        def round_from(towards_float: bool) -> None:
            segment.module.load_state_dict(nearest)
            round_by_gptq(towards_float=towards_float)

        _keep_best_(segment, quant_inputs, targets, [partial(round_from, False), partial(round_from, True)])
    else:
        round_by_gptq()
    if setting.iterations:
        steps.append(partial(learn_rounding, segment, float_inputs, quant_inputs, targets, setting, generator))
    if setting.iterations and wanted:
        steps.append(partial(correct_channels, segment, quant_inputs, wanted))
    return _keep_best_(segment, quant_inputs, targets, steps)


def _apply_gptq_(
    segment: Segment,
    float_segment: Segment,
    float_inputs: list[Values],
    quant_inputs: list[Values],
    wanted: Mapping[str, Tensor],
    setting: GPTQ,
    towards_float: bool = True,
) -> None:
    """Apply GPTQ to the layers of a segment in order, and correct the bias of each before the next one.

    ``towards_float`` says where the weights of ``segment.repeated`` start, see :func:`gptq_weight`.
    """
    for path, layer in segment.own_layers.items():
        centred = path in wanted
        to_float = towards_float or path not in segment.repeated
        for place, weight in enumerate(weights_of(layer)):
            inputs = (quant_inputs, float_inputs)
            found, scale = gptq_weight(
                segment,
                path,
                float_segment,
                *inputs,
                setting.damping,
                centred=centred,
                place=place,
                towards_float=to_float,
            )
            weight.write_(found)
            weight.quant.set_qparams(scale, weight.quant.qparams()[1])
        correct_channels(segment, quant_inputs, {path: wanted[path]} if centred else {})


def _keep_best_(
    segment: Segment, batches: list[Values], targets: list[Values], steps: Sequence[Callable[[], object]]
) -> float:
    """Change a segment step by step, go back to its state with the least error, and return that error."""
    states = [(_error(segment, batches, targets), copy.deepcopy(segment.module.state_dict()))]
    for step in steps:
        step()
        states.append((_error(segment, batches, targets), copy.deepcopy(segment.module.state_dict())))
    least, state = min(states, key=itemgetter(0))
    segment.module.load_state_dict(state)
    return least


def _setting(method: str | Reconstruction) -> Reconstruction:
    if isinstance(method, Reconstruction):
        return method
    if method not in METHODS:
        raise ConfigError(f"unknown reconstruction {method!r}; known: {', '.join(METHODS)}")
    return METHODS[method]


def _require_plain_weights(gm: QuantGraphModule) -> None:
    """Raise if a weight fake-quant rounds a function of the weight: no result could be written into the weight.

    Nor could it into a computed weight, which is told.
    """
    computed = [
        path for path, layer in gm.named_modules() if isinstance(layer, QATLayer) and has_computed_weight(layer)
    ]
    if computed:
        logging.getLogger("fxqat").warning(
            "reconstruct: the weights of %s are computed from other tensors and stay rounded to the nearest. To change "
            "them, make them parameters before prepare_by_platform: parametrize.remove_parametrizations, prune.remove",
            ", ".join(computed),
        )
    for path, layer in gm.named_modules():
        for weight in weights_of(layer) if isinstance(layer, (QATLayer, QATRecurrentLayer)) else ():
            require_plain(path, weight, "reconstruct")


@contextmanager
def _frozen(gm: nn.Module) -> Iterator[None]:
    """No parameter requires a gradient in the block, unless the block asks for it; afterwards all is as before."""
    before = [(parameter, parameter.requires_grad, parameter.grad) for parameter in gm.parameters()]
    for parameter, *_ in before:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter, required, gradient in before:
            parameter.requires_grad_(required)
            parameter.grad = gradient


def _require_numbers(segment: Segment, targets: list[Values]) -> None:
    if any(tensor.isnan().any() for tensor in flatten_tensors(targets)):
        raise CalibrationError(
            f"reconstruct: on these batches the float model computes NaN in {list(segment.own_layers)[-1]}. Look for "
            "NaN in them and for overflow in the model, and prepare the model again: layers before it are reconstructed"
        )


def _error(segment: Segment, batches: list[Values], targets: list[Values]) -> float:
    """Mean squared error of the quantized segment relative to the mean square of the float one."""
    errors = squares = 0.0
    for values, target in zip(segment.run(batches, quantized=True), targets, strict=True):
        for a, b in zip(flatten_tensors(values), flatten_tensors(target), strict=True):
            if b.is_floating_point():
                errors += float((a - b).square().sum())
                squares += float(b.square().sum())
    return errors / squares if squares else 0.0

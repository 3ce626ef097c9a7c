"""Reconstruction: segment by segment, the quantized model is made to give what the float model gives.

One loop, of which the published methods are settings (:data:`METHODS`):

* GPTQ: each layer by itself, without a loop: what the rounding of a weight takes away is made up for by the others.
  Frantar et al. 2022 (arXiv:2210.17323), see :mod:`fxqat.tools.post_training.gptq`;
* AdaRound: each layer by itself, the rounding of its weights is learned. Nagel et al. 2020 (arXiv:2004.10568),
  equations 21 to 25;
* BRECQ: blocks instead of layers, and the scales of activations are learned, too. Li et al. 2021 (arXiv:2102.05426),
  equation 10, with the squared error of the output in place of the Fisher-weighted one;
* QDrop: as BRECQ, with a random part of the activations left float. Wei et al. 2022 (arXiv:2203.05740), equation 8.

What was learned is written into the weights, which are then rounded to the nearest as ever.

At 4 bits and below most of the error before learning may be a shift of the means, which rounding alone can hardly undo.
So the biases of a segment can be corrected (``fxqat.tools.post_training.correct_bias``) before it is learned, and again behind that.

Of what it was before it was learned, behind that, and with its biases corrected again, a segment is left as it is when
its error is least: few iterations may leave it worse than GPTQ does, and a correction may undo what was learned.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from fxqat.errors import ConfigError
from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.fake_quantize.state import enable_quantization
from fxqat.nn.qat import QATLayer
from fxqat.quantization.graph_module import QuantGraphModule
from fxqat.tools.post_training.adaround_loop import Reconstruction, learn, write_folded
from fxqat.tools.post_training.correct_bias import channel_means, require_float_biases, shift_means
from fxqat.tools.post_training.gptq import compensated
from fxqat.tools.post_training.segments import Segment, Values, inputs_of, needed_after, split
from fxqat.utils.batches import read_batches
from fxqat.utils.contexts import eval_mode
from fxqat.utils.tensors import flatten_tensors

METHODS: Mapping[str, Reconstruction] = MappingProxyType(
    {
        "GPTQ": Reconstruction(max_layers=1, gptq=True, iterations=0),
        "AdaRound": Reconstruction(max_layers=1, scale_lr=0.0),
        "BRECQ": Reconstruction(),
        "QDrop": Reconstruction(drop=0.5),
    }
)


def reconstruct(
    gm: QuantGraphModule,
    batches: Iterable[Any],
    method: str | Reconstruction = "QDrop",
    *,
    correct_bias: bool = False,
    seed: int = 0,
    progress: bool = False,
) -> dict[str, tuple[float, float]]:
    """Choose the rounding of weights, and the scales of activations, on unlabelled data. In place.

    Args:
        gm: a prepared and calibrated model; afterwards its fake-quants are on and it is in the mode it was in.
        batches: the model's inputs; all values between the segments are kept for two segments at a time.
        method: a name in :data:`METHODS`, or a setting.
        correct_bias: correct the biases of each segment before it is learned, and behind that if its error falls by it.
        seed: of the random numbers.
        progress: show a progress bar.

    Returns:
        For each segment with weights, by the path of its last layer: the mean squared error of what it gives,
        relative to the float model's mean square, before and after.

    Raises:
        CalibrationError: the model is not calibrated.
        ConfigError: unknown method, no batches, a weight's fake-quant that rounds something else than the weight, or a
            model with corrected biases, which is no float model to come near to.
    """
    setting = _setting(method)
    require_float_biases(gm, "reconstruct")
    inputs = read_batches(gm, batches, "reconstruct")
    enable_quantization(gm)
    _require_plain_weights(gm)
    gm.provenance.bias_corrected = correct_bias  # before the first: an interrupt leaves some of them corrected
    found: dict[str, tuple[float, float]] = {}
    generator = torch.Generator().manual_seed(seed)
    with eval_mode(gm), torch.random.fork_rng(), _frozen(gm):
        torch.manual_seed(seed)
        segments = split(gm, setting.max_layers)
        exact = [inputs_of(gm, batch) for batch in inputs]
        rounded = [dict(values) for values in exact]
        for i, segment in enumerate(tqdm(segments, "reconstruct", leave=False, disable=None if progress else True)):
            targets = segment.run(exact, quantized=False)
            if segment.layers:
                means = channel_means(segment, exact, quantized=False) if correct_bias else {}
                before = _error(segment, rounded, targets)
                if setting.gptq:
                    _compensate(segment, exact, rounded, means, setting.damping)
                else:
                    shift_means(segment, rounded, means)
                steps: list[Callable[[], object]] = []
                if setting.iterations:
                    steps.append(partial(learn, segment, exact, rounded, targets, setting, generator))
                if setting.iterations and means:
                    steps.append(partial(shift_means, segment, rounded, means))
                after = _best(segment, rounded, targets, steps)
                found[list(segment.layers)[-1]] = (before, after)
            exact = needed_after(segments[i:], exact, targets)
            rounded = needed_after(segments[i:], rounded, segment.run(rounded, quantized=True))
    return found


def _compensate(
    segment: Segment, exact: list[Values], rounded: list[Values], means: Mapping[str, Tensor], damping: float
) -> None:
    """GPTQ of the layers of a segment, one behind the other; each bias is corrected before the next one is done."""
    reference = copy.deepcopy(segment)
    for path, layer in segment.layers.items():
        weight, scale = compensated(segment, path, reference, rounded, exact, damping, centred=path in means)
        write_folded(layer, weight)
        layer.weight_fake_quant.set_qparams(scale, layer.weight_fake_quant.qparams()[1])
        shift_means(segment, rounded, {path: means[path]} if path in means else {})


def _best(
    segment: Segment, batches: list[Values], targets: list[Values], steps: Sequence[Callable[[], object]]
) -> float:
    """Change a segment step by step, and leave it as it was when its error was least, which is returned."""
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
    """Raise if a weight's fake-quant rounds another tensor: what is learned could not be written into the weight."""
    for path, layer in gm.named_modules():
        if isinstance(layer, QATLayer) and type(layer.weight_fake_quant).target is not FakeQuantizeBase.target:
            raise ConfigError(
                f"reconstruct: {type(layer.weight_fake_quant).__name__} of {path} rounds a function of the weight; "
                "prepare the model with another w_fakequantize, such as Fixed or Learnable"
            )


@contextmanager
def _frozen(gm: nn.Module) -> Iterator[None]:
    """No parameter wants a gradient, except for those that ask for it inside."""
    wanting = [parameter for parameter in gm.parameters() if parameter.requires_grad]
    for parameter in wanting:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in wanting:
            parameter.requires_grad_(True)


def _error(segment: Segment, batches: list[Values], targets: list[Values]) -> float:
    """Mean squared error of the quantized segment over the mean square of the float one."""
    errors = squares = 0.0
    for values, target in zip(segment.run(batches, quantized=True), targets, strict=True):
        for a, b in zip(flatten_tensors(values), flatten_tensors(target), strict=True):
            if b.is_floating_point():
                errors += float((a - b).square().sum())
                squares += float(b.square().sum())
    return errors / squares if squares else 0.0

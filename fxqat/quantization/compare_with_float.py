"""Compare a calibrated model with the float model: does it still compute the same function once it is quantized?

A batch takes three passes:

1. The graph runs node by node on two values at once: the float value x, and the value x' that the node computes from
   *rounded* operands. After a fake-quant x' is the rounded x, and after a layer with a weight it is x again. So
   rounding errors add up only from there on, and an operation does not inherit those of all layers before it. Two
   differences follow: what rounding costs a value, and what rounded operands cost an operation (the cosine of a phase
   of 8 bits, a sort).
2. The model runs with its fake-quants on, and its outputs are compared.

If a node has a problem, the first part is repeated, as if this node read float operands, then also the nodes before it,
until no problem is left: these are the overrides that the user is given.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxqat.errors import ConfigError
from fxqat.fake_quantize.state import is_calibrated, named_fake_quants, require_calibrated, switches_kept
from fxqat.nn.quantized_layer import QuantizedLayer
from fxqat.quantization.find_overrides import find_overrides
from fxqat.quantization.graph_module import QuantGraphModule, prepared_model, require_float_model
from fxqat.quantization.quantization_noise import WEIGHT, NodeNoise, OutputNoise, QuantizationNoise
from fxqat.quantization.two_values import MAX_ERROR, MeanError, TwoValues, is_dense
from fxqat.utils.batches import check_batches, read_batch
from fxqat.utils.compare import Comparison
from fxqat.utils.contexts import buffers_kept, equal_random_numbers, eval_mode
from fxqat.utils.fx_graph import called_module
from fxqat.utils.tensors import copied
from fxqat.utils.train_eval_graph import graph_of_mode


@torch.no_grad()
def compare_with_float(model: nn.Module, batches: Iterable[Any]) -> QuantizationNoise:
    """Compare a calibrated model with the float model: the same model with its fake-quants off.

    :func:`fxqat.calibrate` does this on its first batch. After a calibration loop of your own, call it with a batch or
    two: each takes about the time of three forward passes. A node whose quantization costs more than it may, or an
    output whose cosine to the float output is below 0.95, is logged as a warning to the logger ``fxqat``, with the
    ``overrides`` that cure it. Modes, switches, buffers and random state of the model stay as they are.

    Args:
        model: a calibrated model of ``prepare_by_platform``, also wrapped by DDP or ``torch.compile``.
        batches: an iterable of batches as for :func:`fxqat.calibrate`.

    Returns:
        The comparison, which is also kept as ``gm.quantization_noise``.

    Raises:
        CalibrationError: the model is not calibrated.
        ConfigError: there are no batches, one does not fit the model, or the model was not prepared, or its weights
            or biases were fitted to quantization errors (then it is not the float model without its fake-quants).

    Example:
        >>> from fxqat import enable_calibration, enable_quantization, prepare_by_platform
        >>> gm = prepare_by_platform(nn.Sequential(nn.Linear(4, 2)), "TSQAT")
        >>> enable_calibration(gm)
        >>> x = torch.arange(12.0).reshape(3, 4)
        >>> y = gm(x)
        >>> enable_quantization(gm)
        >>> compare_with_float(gm, [x]).cosine > 0.99
        True
    """
    gm = prepared_model(model, ConfigError)
    check_batches(batches, "compare_with_float")
    noise = measure_noise(gm, (read_batch(gm, batch, "compare_with_float") for batch in batches))
    noise.warn("compare_with_float")
    gm.provenance.noise = noise
    return noise


def compare_if_possible(model: nn.Module, inputs: tuple[Any, ...], caller: str) -> None:
    """As :func:`compare_with_float`, after a calibration that may not be the last: what cannot be compared is left."""
    if not isinstance(model, QuantGraphModule) or model.provenance.fitted_by or not is_calibrated(model):
        return
    try:
        model.provenance.noise = measure_noise(model, [inputs])
    except Exception as error:  # noqa: BLE001  the calibration is done and must not be lost
        logging.getLogger("fxqat").warning(
            "%s: the quantized model could not be compared with the float model: %s: %s. The comparison needs about "
            "twice the memory of a forward pass; compare=False leaves it out",
            caller,
            type(error).__name__,
            error,
        )
    else:
        model.provenance.noise.warn(caller)


@torch.no_grad()
def measure_noise(gm: QuantGraphModule, batches: Iterable[tuple[Any, ...]]) -> QuantizationNoise:
    """As :func:`compare_with_float`, from the arguments of forward; nothing is logged or kept."""
    require_float_model(gm, "compare_with_float")
    require_calibrated(gm)
    graph = graph_of_mode(gm.graph, training=False)
    run = TwoValues(gm, graph)
    outputs = _Outputs()
    count, failure, inputs = 0, "", ()
    with eval_mode(gm), buffers_kept(gm), switches_kept(gm):
        for inputs in batches:
            count += 1
            _switch_all(gm, quantize=False)
            exact = run.on(inputs)
            _switch_all(gm, quantize=True)
            with equal_random_numbers(gm):
                try:
                    found = gm(*copied(inputs))
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:  # noqa: BLE001  rounded values may lead the user's code anywhere
                    failure = f"the fake-quant model fails where the float model runs: {type(error).__name__}: {error}"
                    continue
            outputs.add(exact, found)
        if not count:
            raise ConfigError("compare_with_float: needs at least one batch of inputs")
        nodes = [*run.nodes(), *_weights(graph)]
        _switch_all(gm, quantize=False)
        overrides = find_overrides(gm, run, inputs) if any(node.problem for node in nodes) else []
    layers = dict.fromkeys(node.node for node in nodes if node.kind == WEIGHT and node.problem)
    overrides += [{"match": {"module": layer}, "weight": None} for layer in layers]
    nodes.sort(key=lambda node: (not node.problem, -node.error))
    return QuantizationNoise(count, outputs.noises(), tuple(nodes), tuple(overrides), failure)


def _weights(graph: fx.Graph) -> Iterator[NodeNoise]:
    """The weights of the layers that a graph calls, once each."""
    seen: set[int] = set()
    for node in graph.nodes:
        layer = called_module(node)
        if not isinstance(layer, QuantizedLayer) or id(layer) in seen:
            continue
        seen.add(id(layer))
        for name, quant, weight in layer.quantized_weights():
            rounded = quant.quantize(weight)
            error, comparison = MeanError(), Comparison()
            error.add(weight, rounded)
            comparison.add(weight, rounded)
            problem = ""
            if error.is_above(MAX_ERROR):
                problem = f"rounding its {name} costs {error.share():.0%} of the mean size"
            figures = (error.share(), comparison.difference().sqnr, problem)
            shares_scale = quant.qparams()[0].dim() == 0 and len(weight) > 1
            yield NodeNoise(str(node.target), WEIGHT, *figures, shares_scale=shares_scale)


def _switch_all(gm: QuantGraphModule, quantize: bool) -> None:
    for _, quant in named_fake_quants(gm):
        quant.observer_enabled, quant.fake_quant_enabled = False, quantize


class _Outputs:
    """The outputs of two models, compared over batches."""

    def __init__(self) -> None:
        self.compared: dict[str, MeanError | Comparison] = {}

    def add(self, exact: Any, found: Any) -> None:
        """Add the outputs of one batch."""
        others = dict(_named(found, ""))
        for name, x in _named(exact, ""):
            other = others.get(name, x.new_empty(0))
            is_number = x.is_floating_point() and is_dense(x) and x.numel() and x.shape == other.shape
            compared = self.compared.setdefault(name, Comparison() if is_number else MeanError())
            if isinstance(compared, MeanError) or is_number:
                compared.add(x, other)

    def noises(self) -> tuple[OutputNoise, ...]:
        """The results."""
        return tuple(
            OutputNoise(name, each.difference())
            if isinstance(each, Comparison)
            else OutputNoise(name, None, min(1.0, each.share()))
            for name, each in self.compared.items()
        )


def compare_outputs(exact: Any, found: Any) -> tuple[OutputNoise, ...]:
    """Compare the outputs of two models for the same inputs, nested or not."""
    outputs = _Outputs()
    outputs.add(exact, found)
    return outputs.noises()


def _named(value: Any, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors in an output, named like the outputs of an exported file."""
    if isinstance(value, Tensor):
        yield prefix or "output", value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _named(item, f"{prefix}_{key}" if prefix else str(key))
    elif isinstance(value, (tuple, list)):
        for number, item in enumerate(value):
            yield from _named(item, f"{prefix or 'output'}_{number}")
    elif is_dataclass(value) and not isinstance(value, type):
        yield from _named({field.name: getattr(value, field.name) for field in fields(value)}, prefix)

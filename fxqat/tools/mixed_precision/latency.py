"""Cost of bit widths in time: each layer of the exported file, timed separately in ONNX Runtime.

ONNX Runtime has kernels for few pairs of widths (8-bit weights and activations, and some others). For all other pairs
it converts to float, computes, and converts back. Each layer is cut out of the file, from its integer inputs to its
integer outputs, and timed at each pair of widths. So the measured times include such conversions.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
from onnx import helper

from fxqat.convert_export import convert_export
from fxqat.errors import ExportError
from fxqat.onnx.ort_runs import explained, open_session
from fxqat.tools.mixed_precision.bank import WidthBank
from fxqat.tools.mixed_precision.costs import Cost, Row, stored_bits
from fxqat.tools.mixed_precision.graph_costs import layer_inputs
from fxqat.utils.batches import read_batch
from fxqat.utils.temporary import temporary_folder

WARMUP = 3
INDICES = (onnx.TensorProto.INT32, onnx.TensorProto.INT64)
"""Types of indices, which are 0: every table has that row."""


def layer_latency(bank: WidthBank, inputs: Sequence[Any], threads: int | None = None, runs: int = 30) -> Cost:
    """Total time of the layers with weights in ONNX Runtime on this CPU; the median of some runs for each layer.

    Args:
        bank: the bank. Its model is exported once for each pair of storage types of weights and activations.
        inputs: one batch of inputs, of the batch size to time.
        threads: threads of ONNX Runtime; by default the number of torch's threads.
        runs: runs of each layer at each pair of widths.

    Raises:
        ExportError: the model cannot be exported.
    """
    stored = {name: stored_bits(bank, name) for name in bank.units}
    kinds = [sorted({s for n, of in stored.items() if bank.units[n].is_weight is weights for s in of.values()})
             for weights in (True, False)]  # fmt: skip
    times: dict[tuple[str, int, int | None], float] = {}
    readers = layer_inputs(bank)
    for of_weights, of_values in product(*kinds):
        widths = {
            name: _nearest(of, of_weights if bank.units[name].is_weight else of_values) for name, of in stored.items()
        }
        found = dict.fromkeys(readers, 0.0)
        for name, layer in layer_models(bank, widths, inputs):
            found[name] += _milliseconds(layer, threads or torch.get_num_threads(), runs)
        for name, reader in readers.items():
            of_reader = stored[reader][widths[reader]] if reader else None
            times[name, stored[name][widths[name]], of_reader] = found[name]
    single: dict[str, Mapping[int, float]] = {}
    pairs: dict[tuple[str, str], Mapping[tuple[int, int], float]] = {}
    for name, reader in readers.items():
        weights = stored[name].items()
        if reader is None:
            single[name] = {bits: times[name, kind, None] for bits, kind in weights}
        else:
            values = stored[reader].items()
            pairs[name, reader] = {(w, v): times[name, i, j] for (w, i), (v, j) in product(weights, values)}
    return Cost("layers", "ms", (Row(single, pairs),))


def layer_models(
    bank: WidthBank, widths: Mapping[str, int], inputs: Sequence[Any]
) -> Iterator[tuple[str, onnx.ModelProto]]:
    """Each call of each layer of the exported file as a separate model, with the name of its weight's unit.

    Its inputs and outputs are the layer's integers; or float values if the layer's are float, or of less than 8 bits,
    which ONNX Runtime does not take as inputs.
    """
    with temporary_folder() as folder:
        path = folder / "whole.onnx"
        convert_export(bank.mix(widths), read_batch(bank.model, inputs, "layer_latency"), path, verify=False)
        whole = onnx.shape_inference.infer_shapes(onnx.load(path))
    cutter = onnx.utils.Extractor(whole)
    graph = _Graph(whole)
    for name, unit in bank.units.items():
        if unit.is_weight:
            stored = (f"{tensor}_quantized" for tensor in unit.tensors)
            readers = {id(node): node for constant in stored for node in graph.readers_of_constant(constant)}
            assert readers, f"no node of the file reads {name}"
            for node in readers.values():
                yield name, cutter.extract_model(graph.inputs_of(node), graph.outputs_of(node))


class _Graph:
    """Finds the inputs and outputs of layers in a QDQ file."""

    def __init__(self, model: onnx.ModelProto) -> None:
        graph = model.graph
        self.makers = {name: node for node in graph.node for name in node.output}
        self.readers: dict[str, list[onnx.NodeProto]] = {}
        for node in graph.node:
            for name in node.input:
                self.readers.setdefault(name, []).append(node)
        self.constants = {tensor.name for tensor in graph.initializer} | {""}
        for node in graph.node:
            if self.constants.issuperset(node.input):
                self.constants.update(node.output)
        self.types = {value.name: value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.input)}

    def readers_of_constant(self, constant: str) -> Iterator[onnx.NodeProto]:
        """The operations that combine a constant, or a constant computed from it, with a value."""
        for node in self.readers.get(constant, ()):
            if self.constants.issuperset(node.input):
                yield from self.readers_of_constant(node.output[0])
            else:
                yield node

    def inputs_of(self, node: onnx.NodeProto) -> list[str]:
        """The values that an operation reads, as integers if they can be a model's input."""
        return list(dict.fromkeys(self._source_of(name) for name in node.input if name not in self.constants))

    def _source_of(self, value: str) -> str:
        maker = self.makers.get(value)
        if maker is None or maker.op_type != "DequantizeLinear":
            return value
        if self._can_be_input(maker.input[0]):
            return str(maker.input[0])
        source = self.makers.get(maker.input[0])
        return str(source.input[0]) if source is not None and source.op_type == "QuantizeLinear" else value

    def outputs_of(self, node: onnx.NodeProto) -> list[str]:
        """The outputs of an operation after all that follows, up to their integers or to a second operand."""
        return [self._end_of(name) for name in node.output if name]

    def _end_of(self, value: str) -> str:
        while True:
            readers = self.readers.get(value, [])
            if len(readers) != 1 or sum(name not in self.constants for name in readers[0].input) != 1:
                return value
            following = str(readers[0].output[0])
            if readers[0].op_type == "QuantizeLinear":
                return following if self._can_be_input(following) else value
            value = following

    def _can_be_input(self, name: str) -> bool:
        return self.types.get(name) in (onnx.TensorProto.INT8, onnx.TensorProto.UINT8)


def _milliseconds(model: onnx.ModelProto, threads: int, runs: int) -> float:
    """The median of some runs; without optimizations if the optimized model fails."""
    try:
        return _timed(model, ort.GraphOptimizationLevel.ORT_ENABLE_ALL, threads, runs)
    except ExportError:
        return _timed(model, ort.GraphOptimizationLevel.ORT_DISABLE_ALL, threads, runs)


@explained()
def _timed(model: onnx.ModelProto, level: ort.GraphOptimizationLevel, threads: int, runs: int) -> float:
    session = open_session(model, level, threads)
    given, random = {}, np.random.default_rng(0)
    for value in model.graph.input:
        tensor = value.type.tensor_type
        shape = [dimension.dim_value for dimension in tensor.shape.dim]
        most = 1 if tensor.elem_type in INDICES else 100
        given[value.name] = random.integers(0, most, shape).astype(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    seconds = []
    for _ in range(WARMUP + runs):
        began = time.perf_counter()
        session.run(None, given)
        seconds.append(time.perf_counter() - began)
    return 1000 * statistics.median(seconds[WARMUP:])


def _nearest(stored: Mapping[int, int], kind: int) -> int:
    """The width with the nearest storage type."""
    return min(stored, key=lambda bits: (abs(stored[bits] - kind), -bits))

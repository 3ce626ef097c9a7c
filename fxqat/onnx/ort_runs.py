"""Run a quantized file in ONNX Runtime: freely, or with given integers at every quantized tensor."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import onnxruntime as ort

from fxqat.errors import ExportError
from fxqat.onnx.external_data import ROOT
from fxqat.onnx.selections import DATA, indices_of

INT32, INT64 = onnx.TensorProto.INT32, onnx.TensorProto.INT64

FOLDED = 2**25
"""Up to so many numbers in constants that are transposed, ONNX Runtime's constant folding is part of the comparison."""

BEFORE_TRANSPOSE = ("QuantizeLinear", "DequantizeLinear", "Max", "Min")
"""What a weight goes through before it is transposed."""

COMPUTED = ":computed"
"""Ending of the int32 tensor that a Q node computes, and of the int64 indices that a node selects."""

GIVEN = ":given"
"""Ending of the int32 tensor that the readers of a Q node get instead."""

FOUND = ":found"
"""Ending of a Q node's output when its readers get given integers."""


def with_integers_out(
    model: onnx.ModelProto, quantizers: Sequence[onnx.NodeProto], indices: Iterable[str] = ()
) -> onnx.ModelProto:
    """A copy of the model that also outputs the integers of these Q nodes, and these indices, as ``:computed``.

    Integers that a Clip follows (``fxqat.onnx.integer_clamps``) are those after it, under the name of the Q node's.
    """
    result = onnx.ModelProto()
    result.CopyFrom(model)
    clipped = _clipped(model)
    names = [*((node.output[0], INT32) for node in quantizers), *((name, INT64) for name in indices)]
    for name, data_type in names:
        result.graph.node.append(_cast(clipped.get(name, name), name + COMPUTED, data_type))
        result.graph.output.append(_integers(name + COMPUTED, data_type=data_type))
    return result


def with_integers_in(
    model: onnx.ModelProto,
    quantizers: Sequence[onnx.NodeProto],
    integers: Mapping[str, np.ndarray],
    selections: Mapping[str, np.ndarray],
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A copy in which the readers of these Q nodes read given integers; what a Q node computes is ``:computed``.

    Given and computed integers are int32 and are cast in the model, because numpy has no types of 4 and 2 bits.
    The readers of a selecting node read given indices in the same way; what it selects from is ``:data``.
    """
    result = with_integers_out(model, [])
    types = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    clipped = _clipped(model)
    ends = {clipped.get(node.output[0], node.output[0]): node for node in quantizers}
    feeds, before, after = {}, [], []
    for node in result.graph.node:
        end = node.output[0]
        if end in ends:
            name, source = ends[end].output[0], ends[end].input
            feeds[name + GIVEN] = integers[source[0]].astype(np.int32, copy=False)
            result.graph.input.append(_integers(name + GIVEN, feeds[name + GIVEN].shape))
            result.graph.output.append(_integers(name + COMPUTED))
            data_type = types[source[2]] if len(source) > 2 else onnx.TensorProto.UINT8  # at run time
            before.append(_cast(name + GIVEN, end, data_type))
            after.append(_cast(end + FOUND, name + COMPUTED, INT32))
            node.output[0] = end + FOUND
        indices = indices_of(node)
        if indices in selections:
            feeds[indices + GIVEN] = selections[indices].astype(np.int64, copy=False)
            result.graph.input.append(_integers(indices + GIVEN, feeds[indices + GIVEN].shape, INT64))
            result.graph.output.append(_integers(indices + COMPUTED, data_type=INT64))
            result.graph.output.append(onnx.ValueInfoProto(name=indices + DATA))
            before.append(_cast(indices + GIVEN, indices, INT64))
            after.append(_cast(indices + FOUND, indices + COMPUTED, INT64))
            after.append(onnx.helper.make_node("Identity", [node.input[0]], [indices + DATA]))
            node.output[list(node.output).index(indices)] = indices + FOUND
    nodes = [*before, *result.graph.node, *after]
    del result.graph.node[:]
    result.graph.node.extend(nodes)
    del result.graph.value_info[:]
    return result, feeds


def _clipped(model: onnx.ModelProto) -> dict[str, str]:
    """The integers that a Clip of a Q node's integers gives, by the name of the Q node's."""
    made = {node.output[0] for node in model.graph.node if node.op_type == "QuantizeLinear"}
    clips = [node for node in model.graph.node if node.op_type == "Clip" and node.input[0] in made]
    return {clip.input[0]: clip.output[0] for clip in clips}


def _cast(source: str, result: str, data_type: int) -> onnx.NodeProto:
    return onnx.helper.make_node("Cast", [source], [result], to=data_type)


def _integers(name: str, shape: Sequence[int] | None = None, data_type: int = INT32) -> onnx.ValueInfoProto:
    return onnx.helper.make_tensor_value_info(name, data_type, shape)


def run(
    model: onnx.ModelProto,
    feeds: Mapping[str, np.ndarray],
    level: ort.GraphOptimizationLevel,
    without: Sequence[str] = (),
) -> dict[str, np.ndarray]:
    """The outputs of a model at an optimization level, by name; ``without`` names optimizers that are not used.

    Raises:
        ExportError: ONNX Runtime cannot load or run the model.
    """
    with explained():
        # its ranges depend on the number of threads where there are several samples
        is_alone = any(node.op_type == "DynamicQuantizeLSTM" for node in model.graph.node)
        session = open_session(model, level, threads=1 if is_alone else None, without=without, once=True)
        names = [value.name for value in session.get_outputs()]
        return dict(zip(names, session.run(names, dict(feeds)), strict=True))


def open_session(
    model: onnx.ModelProto | bytes,
    level: ort.GraphOptimizationLevel,
    threads: int | None = None,
    optimized: Path | None = None,
    without: Sequence[str] = (),
    once: bool = False,
) -> ort.InferenceSession:
    """A session on the CPU whose threads sleep while they wait; by default with ONNX Runtime's number of threads.

    Args:
        model: the model, or the content of its file.
        level: the optimization level.
        threads: number of threads.
        optimized: where to write the optimized model, None for nowhere.
        without: names of optimizers that are not used.
        once: it runs once: what a node has freed goes back to the system, and is not kept for the next run.
    """
    options = ort.SessionOptions()
    options.enable_cpu_mem_arena = options.enable_mem_pattern = not once
    options.graph_optimization_level = level
    options.log_severity_level = 3
    options.intra_op_num_threads = threads or 0
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", ROOT)
    if optimized is not None:
        options.optimized_model_filepath = str(optimized)
    content = model if isinstance(model, bytes) else model.SerializeToString()
    return ort.InferenceSession(
        content, options, providers=["CPUExecutionProvider"], disabled_optimizers=list(without) or None
    )


@contextmanager
def explained() -> Iterator[None]:
    """Turn any error of ONNX Runtime in the block into an :class:`ExportError`; its errors have no common base."""
    try:
        yield
    except Exception as cause:
        unknown = "not a registered function/op" in str(cause)
        remedy = (
            ". If the program that will run the file has this operator, export with verify=False" if unknown else ""
        )
        raise ExportError(f"ONNX Runtime {ort.__version__} cannot run the exported model: {cause}{remedy}") from cause


class Optimized(NamedTuple):
    """A run at full optimization.

    Args:
        outputs: the outputs by name; None if ONNX Runtime's optimizer breaks the model.
        error: its error; None if it runs.
        without: the names of the optimizers that were left out.
    """

    outputs: dict[str, np.ndarray] | None
    error: str | None
    without: tuple[str, ...]


@functools.cache
def sums_saturate() -> bool:
    """Whether ONNX Runtime adds products of uint8 and int8 wrongly on this processor, as on x86 without VNNI.

    There its kernels add two products in 16 bits, which saturate. It is tried once, with the largest numbers.

    Source: ONNX Runtime documentation, "Quantize ONNX Models", on U8S8 and ``reduce_range``.
    """
    size = 64
    weight = onnx.numpy_helper.from_array(np.full((size, 1), 127, np.int8), "w")
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.UINT8, [1, size])
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMulInteger", ["x", "w"], ["y"])], "g", [x], [_integers("y", [1, 1])], [weight]
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 13)], ir_version=8)
    found = run(model, {"x": np.full((1, size), 255, np.uint8)}, ort.GraphOptimizationLevel.ORT_DISABLE_ALL)
    return int(found["y"].item()) != size * 255 * 127


def run_optimized(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> Optimized:
    """Run a model at full optimization.

    ONNX Runtime's optimizer breaks models with int8 activations before a Linear with a 3-D input from opset 21 on, and
    models where it moves integers of 4 or 2 bits to operators that do not take them (seen in 1.31).

    A model with more than ``FOLDED`` numbers in constants that are transposed is run without constant folding: that
    computes them in float, and holds them about three times (an export of vit_b_16 adds 3.1 times the float weights
    with it, and 1.4 without). Other constants stay integers.
    """
    without = ("ConstantFolding",) if _size_of_transposed(model.graph) > FOLDED else ()
    try:
        return Optimized(run(model, feeds, ort.GraphOptimizationLevel.ORT_ENABLE_ALL, without), None, without)
    except ExportError as cause:
        return Optimized(None, str(cause.__cause__), without)


def _size_of_transposed(graph: onnx.GraphProto) -> int:
    """How many numbers the constants have that a Transpose reads, as they are or clamped, quantized or dequantized."""
    read = {name for node in graph.node if node.op_type == "Transpose" for name in node.input}
    for node in reversed(graph.node):  # a node comes after those whose outputs it reads
        if node.op_type in BEFORE_TRANSPOSE and not read.isdisjoint(node.output):
            read.add(node.input[0])
    return sum(math.prod(tensor.dims) for tensor in graph.initializer if tensor.name in read)


def with_reals_out(model: onnx.ModelProto, names: Iterable[str]) -> onnx.ModelProto:
    """A copy of the model that also outputs these float tensors."""
    result = with_integers_out(model, [])
    known = {value.name for value in result.graph.output}
    for name in names:
        if name not in known:
            result.graph.output.append(onnx.ValueInfoProto(name=name))
    return result

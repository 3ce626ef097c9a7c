"""ONNX Runtime on the CPU, with all of its optimizations."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import onnxruntime as ort

from fxqat.onnx.ort_runs import explained, open_session, sums_saturate
from fxqat.tools.engines.base import CompiledFile, Engine, Operator, known_names, nodes_in
from fxqat.utils.temporary import temporary_folder

BYTES = {getattr(onnx.TensorProto, kind) for kind in ("INT8", "UINT8", "INT4", "UINT4", "INT16", "UINT16")}
"""Types of quantized values."""

CONVERSIONS = ("QuantizeLinear", "DequantizeLinear")
FLOAT_OUTPUTS = ("DequantizeLinear", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "MatMulNBits", "Cast")
SUFFIX = "_token_"
"""What ONNX Runtime's optimizer puts behind the name of a node that it makes of another."""


class OnnxRuntimeFile(CompiledFile):
    """A session of ONNX Runtime."""

    def __init__(self, session: ort.InferenceSession, content: bytes, threads: int) -> None:
        self.session, self.content, self.threads = session, content, threads

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The outputs by name; ``ExportError`` if ONNX Runtime cannot run the file."""
        names = [value.name for value in self.session.get_outputs()]
        with explained():
            return dict(zip(names, self.session.run(names, dict(inputs)), strict=True))

    def input_names(self) -> list[str]:
        """The names of the inputs, in the order of the file."""
        return [value.name for value in self.session.get_inputs()]

    def operators(self) -> tuple[Operator, ...]:
        """The nodes of the optimized graph, except conversions between integers and floats."""
        known = known_names(self.content)
        with temporary_folder() as folder, explained():
            path = folder / "optimized.onnx"
            open_session(self.content, ort.GraphOptimizationLevel.ORT_ENABLE_ALL, self.threads, path)
            graph = onnx.load(path).graph
        integers = {tensor.name for tensor in graph.initializer if tensor.data_type in BYTES}
        integers |= {value.name for value in graph.input if value.type.tensor_type.elem_type in BYTES}
        found = []
        for node in graph.node:
            reads = any(name in integers for name in node.input)
            if node.op_type == "QuantizeLinear" or (reads and not _gives_floats(node)):
                integers.update(node.output)
            if node.op_type not in CONVERSIONS:
                found.append(Operator(node.name, node.op_type, reads, nodes_in([node.name], known, SUFFIX)))
        return tuple(found)


def _gives_floats(node: onnx.NodeProto) -> bool:
    """Whether a node that reads integers gives floats; QGemm does so without the parameters of its output."""
    return node.op_type in FLOAT_OUTPUTS or (node.op_type == "QGemm" and len(node.input) < 8)


def runtime_here() -> str:
    """The ``runtime`` of ``convert_export`` whose files ONNX Runtime computes fast and right on this machine.

    It is ``"onnxruntime_avx2"`` on x86 without VNNI, where sums of products of uint8 and int8 saturate, and otherwise
    ``"onnxruntime"``.
    """
    return "onnxruntime_avx2" if sums_saturate() else "onnxruntime"


class OnnxRuntimeEngine(Engine):
    """ONNX Runtime at its default optimization level."""

    name = "onnxruntime"

    @property
    def version(self) -> str:
        """The version of ONNX Runtime."""
        return str(ort.__version__)

    def compile(self, content: bytes) -> CompiledFile:
        """A session on the CPU; ``ExportError`` if ONNX Runtime cannot load the file."""
        with explained():
            session = open_session(content, ort.GraphOptimizationLevel.ORT_ENABLE_ALL, self.threads)
        return OnnxRuntimeFile(session, content, self.threads)

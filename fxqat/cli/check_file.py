"""The checks of ``fxqat verify``: ONNX Runtime, scales, float model, certificate, engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
from torch import Tensor, nn

from fxqat.convert_export import certify_file
from fxqat.errors import ConfigError, ParityError
from fxqat.onnx.opset import opset_of
from fxqat.onnx.ort_runs import run, run_optimized
from fxqat.onnx.output_parity import compare
from fxqat.onnx.quant_params import check_entries
from fxqat.onnx.verify import check_model
from fxqat.quantization.compare_with_float import compare_outputs
from fxqat.quantization.graph_module import QuantGraphModule
from fxqat.quantization.raw_inputs import parse_input_stats
from fxqat.tools.engines.base import Engine
from fxqat.tools.engines.engine_parity import verify
from fxqat.utils.batches import read_batch
from fxqat.utils.tensors import flatten_tensors


class FileChecks:
    """What is known of a file, and the checks; each returns what it found, or raises ``ExportError``.

    Args:
        path: the file.
        proto: its content.
        arrays: its inputs by name.
        raw: mean and std of the inputs that it takes as uint8, by name, as in the JSON of scales.
    """

    def __init__(self, path: Path, proto: onnx.ModelProto, arrays: dict[str, np.ndarray], raw: dict[str, Any]) -> None:
        self.path, self.proto, self.arrays = path, proto, arrays
        self.tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        stats = [(raw[name]["mean"], raw[name]["std"]) if name in raw else None for name in arrays]
        self.stats = stats if any(stats) else None
        self.outputs: dict[str, np.ndarray] = {}

    def onnxruntime(self) -> str:
        """The ONNX checker, and ONNX Runtime without and with optimizations."""
        check_model(self.proto, opset_of(self.proto))
        self.outputs = run(self.proto, self.arrays, ort.GraphOptimizationLevel.ORT_DISABLE_ALL)
        optimized, error, without = run_optimized(self.proto, self.arrays)
        if optimized is None:
            return f"{ort.__version__}; at its default optimization level it fails: {error}"
        cosines = [f"{name} {compare(optimized[name], found).cosine:.6f}" for name, found in self.outputs.items()]
        but = f" (without {', '.join(without)}, to save memory)" if without else ""
        return (
            f"{ort.__version__}; cosine of outputs with its optimizations{but} to those without: {', '.join(cosines)}"
        )

    def scales(self, entries: dict[str, Any]) -> str:
        """The scales of the JSON."""
        check_entries(self.proto, entries)
        known = {node.input[0] for node in self.proto.graph.node if node.op_type == "QuantizeLinear"}
        if unknown := sorted(known - entries.keys()):
            raise ParityError(f"{', '.join(unknown[:4])}: quantized in the ONNX file, but not in the JSON")
        return f"{len(entries)} tensors are equal"

    def float_model(self, model: nn.Module) -> str:
        """The outputs of the float model."""
        with torch.no_grad():
            normalizers = parse_input_stats(self.stats, tuple(self.tensors.values()))
            pairs = zip(self.tensors.items(), normalizers, strict=True)
            exact = flatten_tensors(model(*_arguments(model, {n: x if f is None else f(x) for (n, x), f in pairs})))
        shapes = [[tuple(x.shape) for x in found] for found in (exact, self.outputs.values())]
        if shapes[0] != shapes[1]:
            raise ParityError(f"the model has outputs of the shapes {shapes[0]}, the file {shapes[1]}")
        found = {name: torch.from_numpy(np.array(array)) for name, array in self.outputs.items()}
        return "; ".join(map(str, compare_outputs(dict(zip(found, exact, strict=True)), found)))

    def certificate(self, gm: QuantGraphModule) -> str:
        """Every quantized tensor, step by step."""
        return certify_file(gm, _arguments(gm, self.tensors), self.proto, self.stats).summary()

    def engine(self, engine: Engine) -> str:
        """Every quantized tensor on an engine."""
        report = verify(self.path, self.arrays, engine)
        if not report.passed:
            raise ParityError(str(report))
        return str(report)


def _arguments(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Any, ...]:
    """The arguments of forward, by the names of the file's inputs, or in their order."""
    try:
        return read_batch(model, inputs, "verify")
    except ConfigError:
        return read_batch(model, tuple(inputs.values()), "verify")

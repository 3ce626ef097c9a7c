"""ONNX files: export of float models, inference with ONNX Runtime, latency."""

import statistics
import time
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnx.version_converter
import onnxruntime as ort
import torch
from errors import UserError
from logs import LOG, progress
from torch import Tensor, nn

from fxqat.tools.engines import runtime_here

EXPORTER_OPSET = 18  # the oldest opset that torch's exporter writes; converting to an older one often fails
LATENCY_WARMUP, LATENCY_RUNS, LATENCY_SECONDS = 10, 300, 20.0
RUNTIMES = ("auto", "onnxruntime", "onnxruntime_avx2", "openvino", "none")
RUNTIME_HELP = (
    "write the quantized file for this runtime: the same integers in the form that it runs fast. auto: that of the "
    "backend, or ONNX Runtime, which measures the latency here (onnxruntime_avx2 on x86 without VNNI); none: that of "
    "the backend, or its chips (default: auto)"
)


def runtime_for(gm: nn.Module, asked: str) -> str | None:
    """The ``runtime`` of ``convert_export`` for one of ``RUNTIMES``."""
    if asked != "auto":
        return None if asked == "none" else asked
    named = gm.provenance.runtime or "onnxruntime"
    chosen = runtime_here() if named == "onnxruntime" else named
    if chosen == "onnxruntime_avx2":
        LOG.info("no VNNI in this processor: weights are uint8 in the file, or ONNX Runtime's sums would saturate")
    return chosen


class OnnxModel:
    """An ONNX file in ONNX Runtime on the CPU; takes batches of any size.

    Args:
        path: a file with one input (batch, 3, height, width).
        optimize: whether ONNX Runtime may rewrite the graph for speed.

    Raises:
        UserError: ONNX Runtime cannot load the file.
    """

    def __init__(self, path: Path, *, optimize: bool = True) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        level = ort.GraphOptimizationLevel
        options.graph_optimization_level = level.ORT_ENABLE_ALL if optimize else level.ORT_DISABLE_ALL
        try:
            self.session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime's errors have no other base class
            raise UserError(f"ONNX Runtime {ort.__version__} cannot load {path}: {error}") from error
        self.input = self.session.get_inputs()[0].name
        self.batch = self.session.get_inputs()[0].shape[0]
        self.metadata: dict[str, str] = self.session.get_modelmeta().custom_metadata_map

    def __call__(self, images: Tensor) -> Tensor:
        """The first output for images (any number, 3, height, width); copies fill the last batch of a fixed size."""
        padding = -len(images) % self.batch
        padded = torch.cat([images, images[-1:].expand(padding, -1, -1, -1)]).numpy()
        outputs = [self.run(padded[i : i + self.batch])[0] for i in range(0, len(padded), self.batch)]
        return torch.from_numpy(np.concatenate(outputs)[: len(images)])

    def run(self, batch: np.ndarray) -> list[np.ndarray]:
        """All outputs of one call, with a batch of the file's size."""
        return self.session.run(None, {self.input: batch})


def export_float(model: nn.Module, example: Tensor, path: Path, opset_version: int) -> None:
    """Write a float model as ONNX with torch's exporter: the baseline for size and latency.

    Raises:
        UserError: ONNX cannot convert the model to the opset.
    """
    model.eval()
    native = max(opset_version, EXPORTER_OPSET)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's, about itself
        program = torch.onnx.export(model, (example,), opset_version=native, dynamo=True, verbose=False)
    proto = program.model_proto
    try:
        if opset_version < native:
            proto = onnx.version_converter.convert_version(proto, opset_version)
    except RuntimeError as error:
        raise UserError(f"--opset-version {opset_version}: ONNX cannot convert this float model to it") from error
    partial = path.with_name(path.name + ".partial")
    onnx.save(proto, partial)
    partial.replace(path)


def measure_latency(paths: list[Path], example: Tensor) -> list[float]:
    """Median milliseconds of one call of each file; the files take turns, so other load affects them equally.

    Args:
        paths: ONNX files of the same input.
        example: one batch, (batch, 3, height, width).
    """
    models, batch = [OnnxModel(path) for path in paths], example.cpu().numpy()
    times: list[list[float]] = [[] for _ in models]
    deadline = time.perf_counter() + LATENCY_SECONDS
    for _ in progress(range(LATENCY_WARMUP + LATENCY_RUNS), "latency", "run"):
        for model, taken in zip(models, times, strict=True):
            start = time.perf_counter()
            model.run(batch)
            taken.append(1000 * (time.perf_counter() - start))
        if time.perf_counter() > deadline:
            break
    return [statistics.median(taken[LATENCY_WARMUP:] or taken) for taken in times]

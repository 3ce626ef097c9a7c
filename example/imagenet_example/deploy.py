"""Everything about the exported files: write them, run them with ONNX Runtime, compare, and measure."""

import copy
import statistics
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import onnx.version_converter
import onnxruntime as ort
import torch
from data import Batch
from engine import accuracy_of, count_hits, progress
from errors import UserError
from logs import quiet
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm
from training import Accuracy

EXPORTER_OPSET = 18  # the oldest of torch's exporter; a conversion to older ones fails for many models
COMPARED_IMAGES = 1000
LATENCY_WARMUP, LATENCY_RUNS, LATENCY_SECONDS = 10, 300, 20.0


class OffByAStep(NamedTuple):
    """Share (0 .. 1) of the model's output values that ONNX Runtime gives at least a quantization step away."""

    plain: float  # graph optimizations off: the file as it is written
    optimized: float  # all optimizations: the file as it is deployed
    images: int


class OnnxModel:
    """An ONNX file in ONNX Runtime on the CPU, called with batches of any size.

    Args:
        path: a file with one input (batch, 3, height, width) of fixed batch size and one output (batch, classes).
        optimize: let ONNX Runtime rewrite the graph for speed.
    """

    def __init__(self, path: Path, *, optimize: bool = True) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        level = ort.GraphOptimizationLevel
        options.graph_optimization_level = level.ORT_ENABLE_ALL if optimize else level.ORT_DISABLE_ALL
        try:
            self.session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime's have no other base class
            raise UserError(f"ONNX Runtime {ort.__version__} does not take {path}: {error}") from error
        self.input = self.session.get_inputs()[0].name
        self.batch = self.session.get_inputs()[0].shape[0]

    def __call__(self, images: Tensor) -> Tensor:
        """Logits of the images; the last batch is filled up with copies of an image and cut again."""
        padding = -len(images) % self.batch
        padded = torch.cat([images, images[-1:].expand(padding, -1, -1, -1)]).numpy()
        outputs = [self.run(padded[i : i + self.batch]) for i in range(0, len(padded), self.batch)]
        return torch.from_numpy(np.concatenate(outputs)[: len(images)])

    def run(self, batch: np.ndarray) -> np.ndarray:
        """One call of the session with a batch of exactly its size."""
        return self.session.run(None, {self.input: batch})[0]


def export_float(model: nn.Module, example: Tensor, path: Path, opset_version: int) -> None:
    """Write a float model as ONNX with torch's exporter, the baseline of size and latency."""
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


def evaluate_onnx(path: Path, loader: DataLoader[Batch]) -> Accuracy:
    """Accuracy of an ONNX file in ONNX Runtime."""
    return accuracy_of(count_hits(OnnxModel(path), loader, "ONNX Runtime"))


@torch.no_grad()
def compare_outputs(model: nn.Module, path: Path, loader: DataLoader[Batch]) -> OffByAStep:
    """How far ONNX Runtime is from the fake-quant model, over the first images of validation.

    A step is the scale of the output where the file quantizes it, else 1/127 of the largest output.

    Args:
        model: the fake-quant model that was exported.
        path: its ONNX file.
        loader: images; at most `COMPARED_IMAGES` are taken.
    """
    reference = copy.deepcopy(model).cpu().eval()
    plain, optimized = OnnxModel(path, optimize=False), OnnxModel(path)
    outputs: list[tuple[Tensor, Tensor, Tensor]] = []
    images_left = COMPARED_IMAGES
    for images, _ in progress(loader, "compare"):
        part = images[:images_left]
        outputs.append((reference(part), plain(part), optimized(part)))
        images_left -= len(part)
        if not images_left:
            break
    expected, found_plain, found_optimized = (torch.cat(parts) for parts in zip(*outputs, strict=True))
    step = output_step(path) or expected.abs().max().item() / 127

    def share_off(found: Tensor) -> float:
        return ((found - expected).abs() > step / 2).float().mean().item()

    return OffByAStep(share_off(found_plain), share_off(found_optimized), len(expected))


def output_step(path: Path) -> float | None:
    """The scale of a file's first output, if a DequantizeLinear gives it."""
    graph = onnx.load(path).graph
    producer = next(node for node in graph.node if graph.output[0].name in node.output)
    if producer.op_type != "DequantizeLinear":
        return None
    scale = next(tensor for tensor in graph.initializer if tensor.name == producer.input[1])
    return float(onnx.numpy_helper.to_array(scale))


def measure_latency(paths: list[Path], example: Tensor) -> list[float]:
    """Median milliseconds of one call of each file, run in turn so that a busy moment meets all of them alike.

    Args:
        paths: ONNX files of the same input.
        example: one batch, (batch, 3, height, width).
    """
    models, batch = [OnnxModel(path) for path in paths], example.cpu().numpy()
    times: list[list[float]] = [[] for _ in models]
    deadline = time.perf_counter() + LATENCY_SECONDS
    for _ in tqdm(range(LATENCY_WARMUP + LATENCY_RUNS), desc="latency", leave=False, disable=quiet()):
        for model, taken in zip(models, times, strict=True):
            start = time.perf_counter()
            model.run(batch)
            taken.append(1000 * (time.perf_counter() - start))
        if time.perf_counter() > deadline:
            break
    return [statistics.median(taken[LATENCY_WARMUP:] or taken) for taken in times]

"""The exported file compared with the model: its accuracy, and the share of outputs that differ."""

import copy
from pathlib import Path
from typing import NamedTuple

import onnx
import torch
from accuracy import Accuracy, accuracy_of, count_hits
from data import Batch
from logs import progress
from onnx_files import OnnxModel
from torch import Tensor, nn
from torch.utils.data import DataLoader

COMPARED_IMAGES = 1000


class OffByAStep(NamedTuple):
    """Share (0 .. 1) of output values for which ONNX Runtime is off by a quantization step or more."""

    plain: float  # without graph optimizations: the file as written
    optimized: float  # with all optimizations: the file as deployed
    images: int


def evaluate_onnx(path: Path, loader: DataLoader[Batch]) -> Accuracy:
    """Accuracy of an ONNX file in ONNX Runtime."""
    return accuracy_of(count_hits(OnnxModel(path), loader, "ONNX Runtime"))


@torch.no_grad()
def compare_outputs(model: nn.Module, path: Path, loader: DataLoader[Batch]) -> OffByAStep:
    """Compare the outputs of ONNX Runtime with those of the fake-quant model.

    A step is the scale of the output if the file quantizes it, otherwise 1/127 of the largest output.

    Args:
        model: the fake-quant model that was exported.
        path: its ONNX file.
        loader: validation images; the first `COMPARED_IMAGES` are used.
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
    """The scale of a file's first output, if it comes from a DequantizeLinear node; otherwise None."""
    graph = onnx.load(path).graph
    producer = next(node for node in graph.node if graph.output[0].name in node.output)
    if producer.op_type != "DequantizeLinear":
        return None
    scale = next(tensor for tensor in graph.initializer if tensor.name == producer.input[1])
    return float(onnx.numpy_helper.to_array(scale))

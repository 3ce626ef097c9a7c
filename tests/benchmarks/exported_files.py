"""Do two versions of the package export the same files? 16 models, 4 backends, fixed seeds.

::

    python tests/benchmarks/exported_files.py write --output before     # with the one version on PYTHONPATH
    python tests/benchmarks/exported_files.py write --output after      # with the other
    python tests/benchmarks/exported_files.py compare before after

A file is ``same`` if its bytes are. Else the two models are compared node by node and tensor by tensor: ``same but for
biases of zeros`` if they differ only in convolutions that had a float bias of zeros and now have none. The parameter
files (JSON) must have the same bytes. About ten minutes on two cores for each version.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

import numpy as np
import onnx
import timm
import torch
import torchvision
from onnx import numpy_helper
from prettytable import PrettyTable

import fxqat

BACKENDS = ("TSQAT", "ONNXRuntime", "TensorRT", "Vitis")
TORCHVISION = (
    *("resnet18", "mobilenet_v2", "mobilenet_v3_small", "shufflenet_v2_x0_5", "squeezenet1_1", "densenet121"),
    *("efficientnet_b0", "regnet_y_400mf", "mnasnet0_5", "googlenet", "convnext_tiny", "swin_t"),
)
TIMM = ("vit_tiny_patch16_224", "mixer_s32_224", "levit_128s", "repvgg_a0")
FIXED_SIZE = {"vit_tiny_patch16_224": 224, "mixer_s32_224": 224, "levit_128s": 224}


def build(name: str) -> tuple[torch.nn.Module, torch.Tensor]:
    """A model with random weights of a fixed seed, and its input."""
    torch.manual_seed(0)
    options = {"aux_logits": False, "init_weights": True} if name == "googlenet" else {}
    if name in TORCHVISION:
        model = torchvision.models.get_model(name, weights=None, **options)
    else:
        model = timm.create_model(name, pretrained=False)
    size = FIXED_SIZE.get(name, 64)
    return model.eval(), torch.randn(2, 3, size, size)


def export(name: str, backend: str, folder: Path) -> None:
    """Prepare, calibrate and export one model."""
    model, x = build(name)
    gm = fxqat.prepare_by_platform(model, backend, example_inputs=(x,)).eval()
    fxqat.enable_calibration(gm)
    with torch.no_grad():
        gm(x)
    fxqat.enable_quantization(gm)
    stem = folder / f"{name}-{backend}"
    fxqat.convert_export(gm, (x,), stem.with_suffix(".onnx"), stem.with_suffix(".json"), verify=False)


def write(arguments: argparse.Namespace) -> None:
    """Export everything that is not there yet."""
    torch.set_num_threads(1)
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name in (*TORCHVISION, *TIMM):
        for backend in BACKENDS:
            if not (arguments.output / f"{name}-{backend}.json").exists():
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    export(name, backend, arguments.output)
                print(name, backend, flush=True)


def _same_bytes(before: Path, after: Path) -> bool:
    return before.read_bytes() == after.read_bytes()


def difference(before: Path, after: Path) -> str:
    """How two ONNX files differ, in words."""
    if _same_bytes(before, after):
        return "same"
    first, second = onnx.load(before), onnx.load(after)
    one, other = _content(first), _content(second)
    return "same but for biases of zeros" if one == other else "DIFFERENT"


def _content(model: onnx.ModelProto) -> tuple[list[tuple[object, ...]], dict[str, bytes], list[bytes]]:
    """Nodes, tensors, and inputs and outputs of a file, without biases of zeros of convolutions."""
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    nodes = []
    for node in model.graph.node:
        inputs = list(node.input)
        if node.op_type in ("Conv", "ConvTranspose") and len(inputs) == 3:
            bias = tensors.get(inputs[2])
            if bias is not None and not np.any(numpy_helper.to_array(bias)):
                inputs.pop()
        nodes.append(
            (node.op_type, node.name, inputs, list(node.output), [a.SerializeToString() for a in node.attribute])
        )
    read = {name for node in nodes for name in node[2]}
    values = [value.SerializeToString() for value in (*model.graph.input, *model.graph.output)]
    return nodes, {name: tensor.SerializeToString() for name, tensor in tensors.items() if name in read}, values


def compare(arguments: argparse.Namespace) -> int:
    """Print how the files of two folders differ; 1 if any does."""
    table = PrettyTable(["model", *BACKENDS], align="l")
    wrong = 0
    for name in (*TORCHVISION, *TIMM):
        cells = []
        for backend in BACKENDS:
            paths = [folder / f"{name}-{backend}.onnx" for folder in (arguments.before, arguments.after)]
            words = difference(*paths)
            if not _same_bytes(*[path.with_suffix(".json") for path in paths]):
                words += "; JSON DIFFERENT"
            wrong += "DIFFERENT" in words
            cells.append(words)
        table.add_row([name, *cells])
    print(table)
    print(f"{len(table.rows) * len(BACKENDS) - wrong} of {len(table.rows) * len(BACKENDS)} as before")
    return int(wrong > 0)


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write", help="export every model")
    writing.add_argument("--output", type=Path, required=True)
    comparing = commands.add_parser("compare", help="compare two folders")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "compare":
        return compare(arguments)
    write(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())

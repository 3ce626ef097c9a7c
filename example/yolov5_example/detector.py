"""Detectors: a float model, a quantized model, or an ONNX file."""

import json
from pathlib import Path
from typing import Any

import onnx
import onnx.utils
import torch
from blocks import Detect
from errors import UserError
from model import ANCHORS, STRIDES, Yolo
from onnx_files import OnnxModel
from torch import Tensor, nn
from weights import build_for, read_weights

from fxqat import convert_export, load_checkpoint, prepare_by_platform
from fxqat.convert_export import ExportReport

BOXES, MAPS = "boxes", [f"map_{stride}" for stride in STRIDES]
ABOUT = "yolov5_example"  # key of an ONNX file's metadata
MAPS_IN_INTEGERS = ("TSQAT", "Experimental", "QNN", "QNN_A16", "Vitis", "LiteRT", "ONNXRuntime", "ONNXRuntime_AVX2")
"""Backends that quantize the maps; the others return float maps, or keep the last layers float if that is faster."""


def default_config(backend: str) -> dict[str, Any]:
    """The configuration without ``--quant-config``.

    * BatchNorm keeps the float model's statistics: a few epochs find no better ones.
    * Ranges of weights are not learned; they follow the weights.
    * Ranges minimize the squared error; those of activations use one histogram of all pictures. Rare values at edges
      reach 20 standard deviations in the first layers, and MSE takes the widest range of all batches.
    * Maps have the range -8 to 8: beyond 8 the sigmoid is within 0.0004 of 0 or 1.
    """
    ends = {"match": {"module": "model.24.m.*"}, "value": {"fixed_range": [-8.0, 8.0]}}
    return {
        "bn_mode": "freeze",
        "extra_qconfig_dict": {"w_observer": "MSE", "w_fakequantize": "Fixed", "a_observer": "HistogramL2"},
        "overrides": [ends] if backend in MAPS_IN_INTEGERS else [],
    }


class Detector:
    """Maps images (batch, 3, height, width), 0 to 1, to boxes (batch, boxes, 5 + classes).

    Attributes:
        names: names of the classes; None if the file does not have them.
        size: the required height and width in px; None if any size works.
        num_classes: number of classes.
    """

    names: tuple[str, ...] | None
    size: int | None = None
    num_classes: int

    def __call__(self, images: Tensor) -> Tensor:
        """Return the boxes."""
        raise NotImplementedError


class TorchDetector(Detector):
    """A model in PyTorch, float or quantized."""

    def __init__(self, model: nn.Module, num_classes: int, names: tuple[str, ...] | None, device: torch.device) -> None:
        self.model, self.num_classes, self.names, self.device = model, num_classes, names, device

    def __call__(self, images: Tensor) -> Tensor:
        boxes: Tensor = self.model.eval()(images.to(self.device))[0]
        return boxes


class OnnxDetector(Detector):
    """An ONNX file of this example in ONNX Runtime; returns boxes also for a file that gives maps.

    Args:
        path: the file.
        optimize: whether ONNX Runtime may rewrite the graph for speed.

    Raises:
        UserError: the file is not from this example.
    """

    def __init__(self, path: Path, optimize: bool = True) -> None:
        self.session = OnnxModel(path, optimize=optimize)
        about = self.session.metadata.get(ABOUT)
        if about is None:
            raise UserError(f"--weights {path} is not an ONNX file of train_qat.py: {ABOUT!r} is not in its metadata")
        known = json.loads(about)
        self.names, self.size, self.num_classes = tuple(known["names"]), known["size"], len(known["names"])
        self.head = Detect(self.num_classes, [1, 1, 1], torch.tensor(ANCHORS, dtype=torch.float32), STRIDES)

    def __call__(self, images: Tensor) -> Tensor:
        outputs = [torch.from_numpy(output) for output in self.session.run(images.cpu().numpy())]
        return outputs[0] if len(outputs) == 1 else self.head.decode(outputs)


def open_detector(path: Path, device: torch.device, optimize: bool = True) -> Detector:
    """The detector in a file: an ONNX file, a checkpoint of a quantized training, or weights."""
    if path.suffix == ".onnx":
        return OnnxDetector(path, optimize)
    content = read_weights(path)
    model = build_for(content["state_dict"], f"--weights {path}")
    names = tuple(content["extra"].get("names") or content["names"] or ()) or None
    if content["extra"].get("quantized"):
        gm = prepared(model, content["extra"]["options"])
        load_checkpoint(gm, path)
        return TorchDetector(gm.to(device), model.num_classes, names, device)
    return TorchDetector(model.to(device), model.num_classes, names, device)


def prepared(model: Yolo, options: dict[str, Any]) -> nn.Module:
    """The model with fake-quants; `options` are the training's options by name."""
    example = torch.zeros(1, 3, options["img"], options["img"], device=next(model.parameters()).device)
    backend = options["backend"]
    config = options["quant_config"] or default_config(backend)
    return prepare_by_platform(model, backend, config, example_inputs=(example,))


def export(
    gm: nn.Module, path: Path, size: int, names: tuple[str, ...], with_decode: bool, opset_version: int | None,
    runtime: str | None = None,
) -> ExportReport:  # fmt: skip
    """Write and verify the QDQ ONNX file and its JSON; then keep either the boxes or the maps as its outputs."""
    example = torch.rand(1, 3, size, size, device=next(gm.parameters()).device)
    report = convert_export(
        gm, (example,), path, path.with_suffix(".json"), opset_version=opset_version, dynamic_batch=True,
        input_names=["images"], output_names=[BOXES, *MAPS], runtime=runtime,
    )  # fmt: skip
    partial = path.with_name(path.name + ".partial.onnx")
    try:
        onnx.utils.extract_model(str(path), str(partial), ["images"], [BOXES] if with_decode else MAPS)
        model = onnx.load(partial)
        onnx.helper.set_model_props(model, {ABOUT: json.dumps({"names": names, "size": size})})
        onnx.save(model, partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return report

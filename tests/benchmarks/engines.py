"""Exported files on the engines that they are meant for: equality step by step, operators on integers, latency.

Each row, one model of one backend on one engine, runs in a process of its own and adds a line to a file in ``results``;
rows that have a line there are skipped. ``run`` compares, ``latency`` measures time: run nothing else meanwhile;
``causes`` shows which operators take it.

    pip install -e ".[example,engines]"
    python tests/benchmarks/engines.py run --data DIR
    pip install nncf
    python tests/benchmarks/engines.py latency --data DIR
    python tests/benchmarks/engines.py causes --data DIR
    python tests/benchmarks/engines.py report

DIR is the folder of ``README.rst``; without ``--data`` all weights are random. Rows of an engine whose package is
missing are left out. QNN runs only if it is asked for, with ``--engines qnn``.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
from PIL import Image
from prettytable import PrettyTable
from torch import Tensor, fx, nn
from tqdm import tqdm

import fxqat
from fxqat.errors import FxqatError
from fxqat.fake_quantize.base import ACTIVATION, FakeQuantizeBase
from fxqat.onnx.ort_runs import open_session
from fxqat.tools import engines
from fxqat.tools.engines.onnxruntime_engine import OnnxRuntimeFile
from fxqat.tools.engines.openvino_engine import OpenVinoEngine, OpenVinoFile

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FOLDERS = (
    HERE / "zoo",
    HERE / "accuracy",
    HERE / "performance",
    ROOT / "example/yolov5_example",
    ROOT / "example/common",
)
sys.path[:0] = [str(folder) for folder in FOLDERS]

import experiments  # noqa: E402
import mobilenet_v2_imagenet as photos  # noqa: E402
import ort_latency  # noqa: E402
import parity  # noqa: E402
from detector import open_detector, prepared  # noqa: E402
from machine import processor  # noqa: E402
from model import Yolo  # noqa: E402

os.environ.setdefault("CI", "true")  # OpenVINO then reports no use of it

YOLO = "yolov5n"
NAMES = (*parity.MODELS, YOLO)
TIMED = ("resnet18", "resnet50", "mobilenet_v2", "mobilenet_v3_small", "efficientnet_b0", "vit_b_16", YOLO)
MIN_SHARE = 0.02
"""Kinds of operators whose times differ by less than this share of the float file's are not shown."""

LAYERS = ("Conv", "ConvTranspose", "Gemm", "MatMul", "CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED", "BATCH_MATMUL")
WAYS = ("in_integers", "in_float")
SIDE, YOLO_SIDE, PHOTO_SIDE = 64, 320, 224
PHOTOS = {"mobilenet_v2": 968, YOLO: 64}
"""Photos on which the classes are compared; of MobileNetV2 all that are not calibrated on."""

SIMULATED_PHOTOS = 64
"""The same for QNN's simulator, which takes a second for each."""

DETAILED = 200
"""On so many of them the fake-quant model is also compared with itself, computed in other ways."""

CALIBRATION = 32
CONFIDENT = 0.25
"""Boxes of a lower score are not compared."""

MAX_OFF_BY_ONE = 0.0005
CLASSES = f"""MobileNetV2 with real weights. *same class*: share of the photos to which the engine gives the class
of the fake-quant model (float32); *all outputs equal*: share of those to which it gives the same integers.

The next columns are the noise of the comparison, on the first {DETAILED} photos. *ONNX Runtime unoptimized* runs the
same file in float32. *in float64*: the fake-quant model, computed in float64. *one input value off*: the fake-quant
model, when a single one of the 150528 integers of the photo is one step off. Such an error is all that a tie makes, a
value exactly between two steps: an engine multiplies by the ratio of scales where the file divides, and the ratio is
rounded. In 53 layers a few of them become many. With scales of activations that are powers of two (*scales* pot) the
ratios are exact, and so are sums of products in float32: there no order of computation makes a difference. But many
sums of two values are then ties, which LiteRT, unlike the others, rounds to another side than ONNX. There sums keep
other scales (*not of sums*), and scales of weights have 5 significant bits. With 4 significant bits (*4 bits*), sums of
products are exact as well, and the ratios are not. LiteRT's table has float32 scales: the weights of this network lie
on a grid of 8 bits, which these keep, and so its fake-quant model is closer to the float model than the others.

*two largest equal*, *one step apart*: photos whose class in the fake-quant model hangs on one step of the output.

QNN runs on {SIMULATED_PHOTOS} photos only: its simulator takes seconds for each. Where *same class* is below 99 %,
compare it with *in float64* and *one input value off*: how seldom the fake-quant model agrees with itself."""

SLOWER = 1.02
"""Ratios of latencies from which a file counts as slower."""

WHERE = f"""Where fxqat's file is slower than the float file or that of the engine's own quantizer: first in words, the
operators, of every kernel and type, that take more time than in the faster file; then the operators by kind and kernel
(OpenVINO) or type of their first input (ONNX Runtime), how many there are, and their time as a share of the time of the
whole float file. Kinds that differ by less than {MIN_SHARE:.0%} are left out. By the engines' own counters on one
thread, the fastest of the turns of each operator, on a machine with other work: which operators there are is evidence,
small differences of time are not."""

RESULTS = HERE / "results" / "engines.jsonl"
LATENCY = HERE / "results" / "engines_latency.jsonl"
CAUSES = HERE / "results" / "engines_causes.jsonl"


FLOAT_SUMS = [{"match": {"function": "add"}, "output": {"scale_bits": 24}}]
SCALES: dict[str, dict[str, Any]] = {
    "": {},
    "pot": {"extra_qconfig_dict": {"a_qscheme": {"pot_scale": True}}},
    "pot, not of sums": {
        "extra_qconfig_dict": {"a_qscheme": {"pot_scale": True}, "w_qscheme": {"scale_bits": 5}},
        "overrides": FLOAT_SUMS,
    },
    "4 bits, not of sums": {
        "extra_qconfig_dict": {"a_qscheme": {"scale_bits": 4}, "w_qscheme": {"scale_bits": 5}},
        "overrides": FLOAT_SUMS,
    },
}
"""Configurations of the scales of activations, by the name of a case: powers of two, or of few significant bits."""


@dataclass(frozen=True)
class Case:
    """A backend's files on an engine.

    Args:
        engine: name of the engine.
        backend: name of the backend.
        runtime: the ``runtime`` of ``convert_export``, empty for none.
        precision: of what stays float in OpenVINO; empty for its default, which is bf16 where the processor has it.
        last: what the last layer writes: ``"16"`` bits or ``"float"``; empty for what the backend says.
        scales: a name of ``SCALES``; empty for what the backend says.
    """

    engine: str
    backend: str
    runtime: str = ""
    precision: str = ""
    last: str = ""
    scales: str = ""

    def quant_config(self) -> dict[str, Any] | None:
        """The configuration that says what the last layer writes, and which scales activations have."""
        output = {"float": None, "16": {"bit": 16}}
        config: dict[str, Any] = {"last": {"output": output[self.last]}} if self.last else {}
        return config | SCALES[self.scales] or None

    def load(self) -> engines.Engine:
        """The engine."""
        return engines.load_engine(self.engine, **({"precision": self.precision} if self.precision else {}))


CASES = (
    Case("openvino", "OpenVINO", "openvino", "f32"),
    Case("openvino", "OpenVINO", "openvino"),
    Case("onnxruntime", "ONNXRuntime"),
    Case("onnxruntime", "TSQAT", "onnxruntime"),
    Case("litert", "LiteRT"),
    Case("qnn", "QNN"),
)
FINER_OUTPUTS = (
    Case("onnxruntime", "TSQAT", "onnxruntime", last="16"),
    Case("onnxruntime", "TSQAT", "onnxruntime", last="float"),
    Case("litert", "LiteRT", last="float"),
    Case("qnn", "QNN", last="16"),
    Case("qnn", "QNN", last="float"),
)
"""Finer outputs of the last layer, for models with real weights and labels only."""

EXACT_RATIOS = (
    Case("openvino", "OpenVINO", "openvino", "f32", scales="pot"),
    Case("onnxruntime", "ONNXRuntime", scales="pot"),
    Case("onnxruntime", "TSQAT", "onnxruntime", scales="pot"),
    Case("litert", "LiteRT", scales="pot"),
    Case("litert", "LiteRT", scales="pot, not of sums"),
    Case("litert", "LiteRT", scales="4 bits, not of sums"),
)
"""Scales with which sums are exact in float32, for models with real weights and labels only."""

BACKENDS = tuple(dict.fromkeys(case.backend for case in CASES))
DEFAULT_ENGINES = ("openvino", "onnxruntime", "litert")


@dataclass(frozen=True)
class Material:
    """A model, its data, and how to compare its classes.

    Args:
        model: in float.
        prepare: gives the prepared model for a backend and a configuration.
        calibration: batches.
        example: the input of the step-by-step comparison, one image.
        tests: images to compare classes on; None with random weights.
        classes: the classes in an output, and which of them count.
        labels: the right classes of ``tests``, where there are some.
    """

    model: nn.Module
    prepare: Callable[[str, dict[str, Any] | None], nn.Module]
    calibration: list[Tensor]
    example: Tensor
    tests: Tensor | None
    classes: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
    labels: Tensor | None = None


def material(name: str, data: Path | None, side: int | None = None) -> Material:
    """A model with its real weights and photos where there are some, else with random ones."""
    if name == YOLO:
        return yolo(data, side or YOLO_SIDE)
    if name == "mobilenet_v2" and data is not None:
        images, labels = photos.load_photos(data)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        order = order[: CALIBRATION + PHOTOS[name]]
        images, right = photos.normalised(images[order]), labels[order[CALIBRATION:]]
        model, tests = photos.load_model(data), images[CALIBRATION:]
        calibration, example = list(images[:CALIBRATION].split(16)), tests[:1]
    else:
        side = side or SIDE
        model, tests, right = parity.build(name, side).eval(), None, None
        torch.manual_seed(1)
        calibration = [torch.randn(4, 3, side, side) for _ in range(2)]
        example = torch.randn(1, 3, side, side)

    def prepare(backend: str, config: dict[str, Any] | None) -> nn.Module:
        options = {"example_inputs": (example,), "check": "off", "is_qat": False}
        return fxqat.prepare_by_platform(model, backend, config, **options)  # type: ignore[arg-type]

    return Material(
        model,
        prepare,
        calibration,
        example,
        tests,
        lambda output: (output.argmax(-1), np.ones(output.shape[:-1], bool)),
        right,
    )


def yolo(data: Path | None, side: int) -> Material:
    """YOLOv5n of the example, with boxes as its first output."""
    torch.manual_seed(0)
    tests = None
    if data is None:
        model: nn.Module = Yolo("n").eval()
        calibration, example = [torch.rand(4, 3, side, side)], torch.rand(1, 3, side, side)
    else:
        weights = data / "yolov5n" / "yolov5n_state_dict_fp16.pt"
        model = open_detector(weights, torch.device("cpu")).model.eval()  # type: ignore[attr-defined]
        calibration = list(coco(data, "train2017", CALIBRATION, side).split(16))
        tests = coco(data, "val2017", PHOTOS[YOLO], side)
        example = tests[:1]

    def prepare(backend: str, config: dict[str, Any] | None) -> nn.Module:
        return prepared(model, {"img": side, "backend": backend, "quant_config": config})

    def classes(boxes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        scores = boxes[..., 4:5] * boxes[..., 5:]
        return scores.argmax(-1), scores.max(-1) >= CONFIDENT

    return Material(model, prepare, calibration, example, tests, classes)


def coco(data: Path, part: str, count: int, side: int) -> Tensor:
    """Photos of COCO on a gray square, 0 to 1."""
    found = []
    with zipfile.ZipFile(data / "coco128" / f"{part}_128.zip") as archive:
        for name in [name for name in sorted(archive.namelist()) if name.endswith(".jpg")][:count]:
            photo = Image.open(io.BytesIO(archive.read(name))).convert("RGB")
            photo.thumbnail((side, side))
            square = Image.new("RGB", (side, side), (114, 114, 114))
            square.paste(photo, ((side - photo.width) // 2, (side - photo.height) // 2))
            found.append(torch.from_numpy(np.array(square)).permute(2, 0, 1) / 255)
    return torch.stack(found)


def quantized(case: Case, found: Material, path: Path) -> nn.Module:
    """Calibrate, export without a certificate, and return the fake-quant model."""
    gm = found.prepare(case.backend, case.quant_config())
    fxqat.calibrate(gm, found.calibration, progress=False)
    fxqat.enable_quantization(gm)
    runtime = case.runtime or None
    fxqat.convert_export(gm.eval(), (found.example,), path, verify=False, input_names=["x"], runtime=runtime)
    return gm


def compare(name: str, case: Case, data: Path | None) -> dict[str, Any]:
    """The figures of one row."""
    torch.set_num_threads(1)
    found = material(name, data)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        gm = quantized(case, found, path)
        engine, content = case.load(), path.read_bytes()
        if case.engine == "litert":
            certificate = fxqat.export_tflite(gm, (found.example,), path.with_suffix(".tflite")).certificate
            assert certificate is not None
            compiled = engine.compile(path.with_suffix(".tflite").read_bytes())
            result, output = tflite_figures(certificate, compiled, found.model), ""
        else:
            result = figures(engines.verify(path, found.example.numpy(), engine))
            compiled, output = engine.compile(content), onnx.load(path).graph.output[0].name
        if found.labels is not None:
            count = SIMULATED_PHOTOS if case.engine == "qnn" else len(found.labels)
            result |= logits(gm, found, compiled, output, content, count)
        elif found.tests is not None:
            result |= agreement(gm, found, compiled, output)
    return result | {"version": engine.version}


def tflite_figures(certificate: Any, compiled: engines.CompiledFile, model: nn.Module) -> dict[str, Any]:
    """What the page shows of LiteRT's certificate, default kernels; it compares *alone* only."""
    tensors = certificate.kernels["default"].tensors
    layers = {name: type(layer).__name__ for name, layer in model.named_modules()}
    result = shares_of([(t.step, t.name, (layers.get(t.name, t.name),), t.size) for t in tensors])
    kinds = {
        way: Counter(op.kind for op in compiled.operators() if op.integers == (way == "in_integers")) for way in WAYS
    }
    cosine = min(output.cosine for output in certificate.kernels["default"].outputs)
    return {"tensors": len(tensors), "alone": result, "together": result, "cosine": cosine} | kinds


def figures(report: engines.EngineReport) -> dict[str, Any]:
    """What the page shows of a report."""
    result: dict[str, Any] = {"tensors": len(report.tensors), "first_diverging": report.first_diverging}
    for way in ("alone", "together"):
        result[way] = shares_of([(getattr(t, way), t.name, t.operators, t.size) for t in report.tensors])
    result |= {way: dict(Counter(node.partition(" ")[0] for node in getattr(report, way))) for way in WAYS}
    return result | {"cosine": min(output.end_to_end.cosine for output in report.outputs)}


def shares_of(tensors: list[tuple[Any, str, tuple[str, ...], int]]) -> dict[str, Any]:
    """Of shares, names, operators and sizes: the share of all values, and how many tensors are over the limit."""
    values = sum(size for *_, size in tensors)

    def total(what: str) -> float:
        return sum(getattr(shares, what) * size for shares, _, _, size in tensors) / values

    def over(shares: Any, size: int, ties: float = 0.0) -> bool:
        return shares.off_by_1 - ties > max(MAX_OFF_BY_ONE, 1 / size) or shares.off_by_2_plus > 0

    worst, name, operators, _ = max(tensors, key=lambda t: (t[0].off_by_2_plus, t[0].off_by_1))
    wrong = [operators for shares, _, operators, size in tensors if over(shares, size)]
    return {
        "share": total("off_by_1"),
        "ties": total("ties"),
        "off_by_2_plus": total("off_by_2_plus"),
        "tensors": len(wrong),
        "beside_ties": sum(over(shares, size, shares.ties) for shares, _, _, size in tensors),
        "worst": [name, *operators, worst.off_by_1, worst.off_by_2_plus],
        "kinds": dict(Counter(" ".join(sorted({text.partition(" ")[0] for text in texts})) for texts in wrong)),
    }


@torch.no_grad()
def agreement(gm: nn.Module, found: Material, compiled: engines.CompiledFile, output: str) -> dict[str, Any]:
    """The share of classes that the engine has in common with the fake-quant model, and with the float model."""
    counts = Counter[str]()
    for image in found.tests.split(1):  # type: ignore[union-attr]
        outputs = compiled.run(dict.fromkeys(compiled.input_names(), image.numpy()))
        ours, _ = found.classes(outputs[output] if output else next(iter(outputs.values())))
        for name, model in (("fake_quant", gm), ("float", found.model)):
            result = model(image)
            theirs, there = found.classes((result if isinstance(result, Tensor) else result[0]).numpy())
            counts[name] += int((ours[there] == theirs[there]).sum())
            counts[f"{name} of"] += int(there.sum())
    return {
        "agreement": counts["fake_quant"] / counts["fake_quant of"],
        "agreement_float": counts["float"] / counts["float of"],
        "compared": counts["fake_quant of"],
    }


@torch.no_grad()
def logits(
    gm: nn.Module, found: Material, compiled: engines.CompiledFile, output: str, content: bytes, count: int
) -> dict[str, Any]:
    """As :func:`agreement`; and how well the fake-quant model agrees with itself, and who is right.

    The classes of the engine and of the float model are compared with those of the fake-quant model in float32, which
    are near ties where the two largest outputs are at most one step of the output's quantizer apart; so are, on fewer
    photos, those of the ONNX file in ONNX Runtime without optimizations, and of the fake-quant model in float64 and
    with one value of its input one step off.
    """
    session = open_session(content, ort.GraphOptimizationLevel.ORT_DISABLE_ALL, 1)
    in_double, rows, details = copy.deepcopy(gm).double(), [], []
    gaps, equal = [], []
    for place, image in enumerate(found.tests[:count].split(1)):  # type: ignore[index]
        outputs = compiled.run(dict.fromkeys(compiled.input_names(), image.numpy()))
        values = {
            "fake_quant": gm(image).numpy(),
            "engine": outputs[output] if output else next(iter(outputs.values())),
            "float": found.model(image).numpy(),
        }
        rows.append({kind: int(value.argmax()) for kind, value in values.items()})
        below, largest = np.sort(values["fake_quant"].ravel())[-2:]
        gaps.append(largest - below)
        equal.append(np.array_equal(values["fake_quant"], values["engine"]))
        if place < DETAILED:
            other = {
                "unoptimized": session.run(None, {session.get_inputs()[0].name: image.numpy()})[0],
                "float64": in_double(image.double()).numpy(),
                "nudged": gm(nudged(gm, image)).numpy(),
            }
            details.append({kind: int(value.argmax()) for kind, value in other.items()})
    ours = {kind: np.array([row[kind] for row in rows]) for kind in rows[0]}
    others = {kind: np.array([row[kind] for row in details]) for kind in details[0]}
    step, right = output_step(gm), found.labels.numpy()[:count]  # type: ignore[union-attr]
    steps = None if step is None else np.round(np.array(gaps) / step)
    agrees = {kind: float((ours[kind] == ours["fake_quant"]).mean()) for kind in ("engine", "float")}
    agrees |= {kind: float((found == ours["fake_quant"][: len(found)]).mean()) for kind, found in others.items()}
    return {
        "agreement": agrees["engine"],
        "agreement_float": float((ours["engine"] == ours["float"]).mean()),
        "compared": len(rows),
        "photos": len(rows),
        "detailed": len(details),
        "agrees": agrees,
        "equal_outputs": float(np.mean(equal)),
        "engine_with_float64": float((ours["engine"][: len(details)] == others["float64"]).mean()),
        "top1": {kind: float((ours[kind] == right).mean()) for kind in ("float", "fake_quant", "engine")},
        "step": step,
        "equal": None if steps is None else int((steps == 0).sum()),
        "one_step": None if steps is None else int((steps == 1).sum()),
    }


def nudged(gm: nn.Module, image: Tensor) -> Tensor:
    """An image whose middle value is one step of the input's quantizer off."""
    quant = next(m for m in gm.modules() if isinstance(m, FakeQuantizeBase) and m.kind == ACTIVATION)
    result = image.clone()
    middle = (0, *(size // 2 for size in image.shape[1:]))
    result[middle] -= quant.used_scale() * result[middle].sign()
    return result


def output_step(gm: nn.Module) -> float | None:
    """The scale of the quantizer that writes the output; None if the output is float."""
    assert isinstance(gm, fx.GraphModule)
    [last] = next(node for node in gm.graph.nodes if node.op == "output").all_input_nodes
    writer = gm.get_submodule(last.target) if last.op == "call_module" else None
    return float(writer.scale) if isinstance(writer, FakeQuantizeBase) else None


# Latency


def files_of(
    name: str, made: engines.Engine, data: Path | None
) -> tuple[dict[str, engines.CompiledFile], dict[str, np.ndarray]]:
    """The float file, that of the engine's own quantizer and those of the backends, compiled; and an input."""
    found = material(name, data, {YOLO: YOLO_SIDE}.get(name, PHOTO_SIDE))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "float.onnx"
        export = {"input_names": ["x"], "dynamo": True, "external_data": False, "verbose": False}
        torch.onnx.export(found.model, (found.example,), path, **export)
        compiled = {"float": made.compile(path.read_bytes()), "peer": peer(made, path, found, Path(folder))}
        for case in {case.backend: case for case in CASES if case.engine == made.name}.values():
            quantized(case, found, path)
            compiled[case.backend] = made.compile(path.read_bytes())
    return compiled, {"x": found.example.numpy()}


def times(name: str, engine: str, data: Path | None, turns: int, runs: int) -> dict[str, Any]:
    """Ratios of the latency of each file to that of the float file, on one thread, in turns."""
    torch.set_num_threads(1)
    made = engines.load_engine(engine)
    compiled, feeds = files_of(name, made, data)
    counts = {kind: Counter(op.integers for op in file.operators()) for kind, file in compiled.items()}
    milliseconds: dict[str, list[float]] = {kind: [] for kind in compiled}
    order = list(compiled)
    for turn in range(turns + 1):
        for kind in order:
            taken = []
            for _ in range(runs):
                start = time.perf_counter()
                compiled[kind].run(feeds)
                taken.append(1e3 * (time.perf_counter() - start))
            if turn:  # the first warms up
                milliseconds[kind].append(statistics.median(taken))
        order.append(order.pop(0))

    def ratio(kind: str, other: str) -> float:
        return statistics.median(a / b for a, b in zip(milliseconds[kind], milliseconds[other], strict=True))

    ours = [kind for kind in compiled if kind not in ("float", "peer")]
    return {
        "version": made.version,
        "milliseconds": {kind: statistics.median(found) for kind, found in milliseconds.items()},
        "to_float": {kind: ratio(kind, "float") for kind in (*ours, "peer")},
        "to_peer": {kind: ratio(kind, "peer") for kind in ours},
        "processor": processor(),
        "in_float": {kind: count[False] for kind, count in counts.items()},
    }


def peer(engine: engines.Engine, path: Path, found: Material, folder: Path) -> engines.CompiledFile:
    """The float file quantized by the engine's own quantizer: NNCF for OpenVINO, quantize_static for ONNX Runtime."""
    batches = [image for batch in found.calibration for image in batch.split(1)]
    if engine.name == "onnxruntime":
        ort_latency.write_static(path, folder / "static.onnx", batches)
        return engine.compile((folder / "static.onnx").read_bytes())
    import nncf  # noqa: PLC0415
    import openvino  # noqa: PLC0415

    assert isinstance(engine, OpenVinoEngine)
    transformer = any(isinstance(module, nn.MultiheadAttention) for module in found.model.modules())
    model = nncf.quantize(
        openvino.Core().read_model(path),
        nncf.Dataset([{"x": batch.numpy()} for batch in batches]),
        preset=nncf.QuantizationPreset.MIXED,
        model_type=nncf.ModelType.TRANSFORMER if transformer else None,
        subset_size=len(batches),
    )
    return OpenVinoFile(openvino.Core().compile_model(model, "CPU", engine.settings), path.read_bytes())


# Causes of latency


def node_times(name: str, engine: str, data: Path | None, turns: int) -> dict[str, Any]:
    """By kind of operator of each file: how many there are, and the sum of their fastest times in microseconds."""
    torch.set_num_threads(1)
    made = engines.load_engine(engine)
    if isinstance(made, OpenVinoEngine):
        made.settings["PERF_COUNT"] = True
    compiled, feeds = files_of(name, made, data)
    with tempfile.TemporaryDirectory() as folder:
        if engine == "openvino":
            runs = [openvino_times(file, feeds, turns) for file in compiled.values()]
        else:
            runs = [onnxruntime_times(file, feeds, turns, Path(folder) / f"{kind}_") for kind, file in compiled.items()]
    result: dict[str, Any] = {}
    for file, nodes in zip(compiled, runs, strict=True):
        kinds: dict[str, list[float]] = {}
        for (_, kind), taken in nodes.items():
            count, total = kinds.get(kind, (0, 0.0))
            kinds[kind] = [count + 1, total + min(taken)]
        result[file] = kinds
    return {"version": made.version, "processor": processor(), "nodes": result}


NodeTimes = dict[tuple[str, str], list[float]]
"""Microseconds of each turn, by name and kind of the node."""


def openvino_times(file: engines.CompiledFile, feeds: dict[str, np.ndarray], turns: int) -> NodeTimes:
    """By OpenVINO's performance counters."""
    assert isinstance(file, OpenVinoFile)
    request, nodes = file.compiled.create_infer_request(), NodeTimes()
    for turn in range(turns + 1):
        request.infer(feeds)
        for node in request.profiling_info if turn else ():  # the first warms up
            taken = node.real_time.total_seconds() * 1e6
            if taken:
                nodes.setdefault((node.node_name, f"{node.node_type} {node.exec_type}"), []).append(taken)
    return nodes


def onnxruntime_times(file: engines.CompiledFile, feeds: dict[str, np.ndarray], turns: int, path: Path) -> NodeTimes:
    """By ONNX Runtime's profile."""
    assert isinstance(file, OnnxRuntimeFile)
    options, nodes = ort.SessionOptions(), NodeTimes()
    options.intra_op_num_threads, options.enable_profiling, options.profile_file_prefix = 1, True, str(path)
    session = ort.InferenceSession(file.content, options, providers=["CPUExecutionProvider"])
    for _ in range(turns + 1):
        session.run(None, feeds)
    for event in json.loads(Path(session.end_profiling()).read_text(encoding="utf-8")):
        if event["cat"] == "Node" and event["name"].endswith("_kernel_time"):
            read = event["args"]["input_type_shape"]
            kind = f"{event['args']['op_name']} {next(iter(read[0])) if read else ''}".strip()
            nodes.setdefault((event["name"], kind), []).append(event["dur"])
    return {node: taken[1:] for node, taken in nodes.items()}


# Rows in processes of their own


def in_a_process(arguments: list[str]) -> dict[str, Any]:
    """Run this script on one row; its figures, or the error."""
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])  # type: ignore[no-any-return]
    return {"error": (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1][:300]}


def row(arguments: argparse.Namespace) -> None:
    """Print the figures of one row, or its error."""
    logging.getLogger("fxqat").setLevel(logging.ERROR)
    start = time.perf_counter()
    data = arguments.data
    try:
        if arguments.latency:
            result = times(arguments.model, arguments.engine, data, arguments.turns, arguments.runs)
        elif arguments.causes:
            result = node_times(arguments.model, arguments.engine, data, arguments.turns)
        else:
            case = Case(**{key: getattr(arguments, key) for key in asdict(CASES[0])})
            result = compare(arguments.model, case, data)
    except Exception as error:  # noqa: BLE001  (its own words: the last lines of stderr may be a hint of a library)
        result = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]}
    print(json.dumps(result | {"seconds": time.perf_counter() - start}))


def missing(path: Path, keys: list[dict[str, str]]) -> Iterator[dict[str, str]]:
    """The rows without a line in a file of results."""
    there = [{key: line.get(key, "") for key in keys[0]} for line in experiments.read(path)] if keys else []
    yield from tqdm([key for key in keys if key not in there])


def run(arguments: argparse.Namespace) -> None:
    """Compare the rows that have no result yet."""
    cases = [case for case in CASES if case.engine in arguments.engines and available(case.engine)]
    keys = [{"model": name} | asdict(case) for name in arguments.models for case in cases]
    if arguments.data and "mobilenet_v2" in arguments.models:
        more = [c for c in (*FINER_OUTPUTS, *EXACT_RATIOS) if c.engine in {case.engine for case in cases}]
        keys += [{"model": "mobilenet_v2"} | asdict(case) for case in more]
    for key in missing(arguments.results, keys):
        flags = [part for name, value in key.items() for part in (f"--{name}", value)]
        add(arguments, arguments.results, key, in_a_process(["row", *flags, *data_flags(arguments)]))


def latency(arguments: argparse.Namespace) -> None:
    """Measure the latencies that have no result yet."""
    kept = [name for name in arguments.engines if name not in ("qnn", "litert") and available(name)]
    keys = [{"model": name, "engine": engine} for name in arguments.models for engine in kept]
    for key in missing(arguments.results, keys):
        flags = ["--model", key["model"], "--engine", key["engine"], "--latency"]
        flags += ["--turns", str(arguments.turns), "--runs", str(arguments.runs)]
        add(arguments, arguments.results, key, in_a_process(["row", *flags, *data_flags(arguments)]))


def causes(arguments: argparse.Namespace) -> None:
    """Measure the time of each operator where fxqat's file was slower than another one."""
    keys = [
        {"model": line["model"], "engine": line["engine"]}
        for line in experiments.read(arguments.latencies)
        if line["model"] in arguments.models
        and line["engine"] in arguments.engines
        and available(line["engine"])
        and slower(line)
    ]
    for key in missing(arguments.results, keys):
        flags = ["--model", key["model"], "--engine", key["engine"], "--causes", "--turns", str(arguments.turns)]
        add(arguments, arguments.results, key, in_a_process(["row", *flags, *data_flags(arguments)]))


def slower(line: dict[str, Any]) -> list[str]:
    """The backends whose file was slower than the float file or that of the engine's own quantizer."""
    return [kind for kind in line.get("to_peer", ()) if max(line["to_float"][kind], line["to_peer"][kind]) > SLOWER]


def add(arguments: argparse.Namespace, path: Path, key: dict[str, str], found: dict[str, Any]) -> None:
    """Add the line of a row."""
    experiments.add(path, key | {"real": bool(arguments.data) and key["model"] in PHOTOS} | found)


def data_flags(arguments: argparse.Namespace) -> list[str]:
    """The option ``--data`` for a row."""
    return ["--data", str(arguments.data)] if arguments.data else []


def available(engine: str) -> bool:
    """Whether the engine's package is installed."""
    try:
        engines.load_engine(engine)
    except FxqatError as error:
        tqdm.write(str(error))
        return False
    return True


def report(arguments: argparse.Namespace) -> None:
    """Write the page."""
    found = [experiments.read(path) for path in (arguments.results, arguments.latencies, arguments.causes)]
    arguments.output.write_text(page(*found), encoding="utf-8")
    print(arguments.output)


# The page


def percent(share: float) -> str:
    """A share with enough digits for small ones."""
    return "0" if share == 0 else f"{share:.3%}"


def settings_of(line: dict[str, Any]) -> list[str]:
    """What a row sets beside its backend."""
    return [f"{key} {line[key]}" for key in ("runtime", "precision", "last", "scales") if line.get(key)]


def compared_table(results: list[dict[str, Any]]) -> str:
    """The comparisons as a table."""
    header = ["model", "backend", "tensors", "alone: off by 1", "of these ties", "2+", "together: off by 1", "2+ "]
    header += ["tensors over the limit", "layers on integers", "other operators in float", "cosine", "same class"]
    table = PrettyTable(header, align="l", hrules=1)
    for line in results:
        name = line["model"] + (" (real)" if line["real"] else "")
        settings = settings_of(line)
        backend = ", ".join([line["backend"], *settings])
        if "error" in line:
            table.add_row([name, backend, line["error"], *[""] * (len(header) - 3)])
            continue
        alone, together = line["alone"], line["together"]
        layers = [sum(line[way].get(kind, 0) for kind in LAYERS) for way in ("in_integers", "in_float")]
        floats = [f"{count} {kind}" for kind, count in sorted(line["in_float"].items()) if kind not in LAYERS]
        over = f"{alone['tensors']}, {together['tensors']}" + (
            f" ({alone['beside_ties']} beside ties)" if alone["tensors"] else ""
        )
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted((alone["kinds"]).items()))
        shares = [percent(alone[key]) for key in ("share", "ties", "off_by_2_plus")]
        shares += [percent(together[key]) for key in ("share", "off_by_2_plus")]
        same = f"{line['agreement']:.1%} of {line['compared']}" if "agreement" in line else ""
        table.add_row(
            [name, backend, line["tensors"], *shares, f"{over} {kinds}".strip(), f"{layers[0]} of {sum(layers)}"]
            + [", ".join(floats), f"{line['cosine']:.5f}", same]
        )
    return table.get_string()


def classes_table(results: list[dict[str, Any]]) -> str:
    """Who agrees with the fake-quant model, and who is right, as a table."""
    header = ["run by", "backend", "photos", "same class", "differ", "all outputs equal"]
    header += ["ONNX Runtime unoptimized", "in float64", "one input value off", "float model"]
    header += ["two largest equal", "one step apart", "top-1: float", "fake-quant", "engine"]
    table = PrettyTable(header, align="l", hrules=1)
    for line in results:
        near = ["float output" if line[key] is None else line[key] for key in ("equal", "one_step")]
        agrees = line["agrees"]
        same = [f"{agrees['engine']:.2%}", round((1 - agrees["engine"]) * line["photos"])]
        noise = [
            f"{agrees[kind]:.2%}" if kind in agrees else "" for kind in ("unoptimized", "float64", "nudged", "float")
        ]
        right = [f"{line['top1'][kind]:.2%}" for kind in ("float", "fake_quant", "engine")]
        table.add_row(
            [line["engine"], ", ".join([line["backend"], *settings_of(line)]), line["photos"], *same]
            + [f"{line['equal_outputs']:.2%}" if "equal_outputs" in line else "", *noise, *near, *right]
        )
    return table.get_string()


def latency_table(results: list[dict[str, Any]]) -> str:
    """The latencies as a table."""
    header = ["model", "backend", "float ms", "own quantizer ms", "ms", "to float", "to own quantizer"]
    header += ["operators in float: backend", "own quantizer"]
    table = PrettyTable(header, align="l", hrules=1)
    for line in results:
        if "error" in line:
            table.add_row([line["model"], line["error"], *[""] * (len(header) - 2)])
            continue
        plain, own = (f"{line['milliseconds'][kind]:.1f}" for kind in ("float", "peer"))
        for backend, ratio in line["to_peer"].items():
            figures = [f"{line['milliseconds'][backend]:.1f}", f"{line['to_float'][backend]:.3f}", f"{ratio:.3f}"]
            floats = [line["in_float"][kind] for kind in (backend, "peer")]
            table.add_row([line["model"], backend, plain, own, *figures, *floats])
    return table.get_string()


KindTimes = dict[str, list[float]]
"""Number and time of the operators of a file, by kind."""


def kind_shares(line: dict[str, Any], backend: str) -> dict[str, list[tuple[int, float]]]:
    """By kind of operator: number and share of the time of the float file in that, the peer's and the backend's."""
    files: list[KindTimes] = [line["nodes"][kind] for kind in ("float", "peer", backend)]
    whole = sum(total for _, total in files[0].values())
    found = {"all": [(int(sum(n for n, _ in f.values())), sum(t for _, t in f.values()) / whole) for f in files]}
    for kind in dict.fromkeys(kind for file in files for kind in file):
        found[kind] = [(int(file.get(kind, [0, 0.0])[0]), file.get(kind, [0, 0.0])[1] / whole) for file in files]
    return found


def cause(line: dict[str, Any], timed: dict[str, Any], backend: str) -> str:
    """The operators that take more time than in the faster one of the other two files, in words."""
    shares = kind_shares(line, backend)
    other = int(timed["to_float"][backend] < timed["to_peer"][backend])
    name = ("the float file", "the own quantizer's")[other]
    more: Counter[str] = Counter()
    counts: Counter[tuple[str, bool]] = Counter()
    for kind, row in shares.items():
        if kind != "all":
            operator = kind.partition(" ")[0].removeprefix("QLinear")  # of every kernel and type
            more[operator] += row[2][1] - row[other][1]  # type: ignore[assignment]
            counts[operator, True] += row[2][0]
            counts[operator, False] += row[other][0]
    most = more.most_common(4)
    words = [
        f"{operator} ({counts[operator, True]} against {counts[operator, False]}, {share:+.1%})"
        for operator, share in [each for each in most if each[1] >= MIN_SHARE] or most[:1]
    ]
    ratios = f"{timed['to_float'][backend]:.3f} of float, {timed['to_peer'][backend]:.3f} of the own quantizer"
    return f"* {line['model']}, {backend} on {line['engine']}: {ratios}; more time than {name} in {', '.join(words)}."


def causes_table(results: list[tuple[dict[str, Any], str]]) -> str:
    """The kinds of operators that take different times in the files, as a table."""
    header = ["model", "engine", "backend", "operator", "float file", "own quantizer", "fxqat", "fxqat - own quantizer"]
    table = PrettyTable(header, align="l", hrules=1)
    for line, backend in results:
        shares = kind_shares(line, backend)
        for kind, row in sorted(shares.items(), key=lambda item: (item[0] != "all", item[1][1][1] - item[1][2][1])):
            times = [share for _, share in row]
            if max(times) - min(times) < MIN_SHARE and kind != "all":
                continue
            cells = [f"{count}: {share:.1%}" if count else "" for count, share in row]
            table.add_row([line["model"], line["engine"], backend, kind, *cells, f"{times[2] - times[1]:+.1%}"])
    return table.get_string()


def causes_section(slow: list[dict[str, Any]], timed: list[dict[str, Any]]) -> str:
    """Why files are slow: in words and as a table; and which are not explained."""
    clocks = {(line["model"], line["engine"]): line for line in timed}
    measured = {(line["model"], line["engine"]): line for line in slow if "error" not in line}
    rows, words = [], []
    for key, clock in clocks.items():
        for backend in slower(clock):
            if key in measured:
                rows.append((measured[key], backend))
                words.append(cause(measured[key], clock, backend))
            else:
                words.append(f"* {key[0]}, {backend} on {key[1]}: not measured.")
    processors = sorted({line.get("processor", "another one, not recorded") for line in measured.values()})
    return f"{WHERE}\n\nProcessor: {'; '.join(processors)}.\n\n{chr(10).join(words)}\n\n{causes_table(rows)}\n"


def page(compared: list[dict[str, Any]], timed: list[dict[str, Any]], slow: list[dict[str, Any]]) -> str:
    """The documentation page."""
    names = {
        "openvino": "OpenVINO",
        "onnxruntime": "ONNX Runtime",
        "litert": "LiteRT",
        "qnn": "QNN on its x86 simulator",
    }
    parts = []
    with_labels = [line for line in compared if "agrees" in line]
    if with_labels:
        title = "Classes of photos"
        parts.append(f"{title}\n{'-' * len(title)}\n\n{CLASSES}\n\n{classes_table(with_labels)}\n")
    for engine, title in names.items():
        rows = [line for line in compared if line["engine"] == engine]
        order = {name: place for place, name in enumerate(NAMES)}
        rows.sort(key=lambda line: (order[line["model"]], line["backend"], line["precision"]))
        clocks = [line for line in timed if line["engine"] == engine]
        clocks.sort(key=lambda line: order[line["model"]])
        if not rows:
            continue
        version = next((line["version"] for line in rows if "version" in line), "")
        good = [line for line in rows if "error" not in line]
        held = sum(not line["alone"]["tensors"] and not line["together"]["tensors"] for line in good)
        beside = sum(not line["alone"]["beside_ties"] and not line["together"]["beside_ties"] for line in good)
        layers = sum(not any(line["in_float"].get(kind) for kind in LAYERS) for line in good)
        parts.append(
            f"{title}\n{'-' * len(title)}\n\n{title} {version}. {len(good)} of {len(rows)} rows compile and run; in "
            f"{layers} of them every layer runs on integers. {held} are within the limit in every tensor, {beside} if "
            f"ties are not counted.\n\n{compared_table(rows)}\n"
        )
        if clocks:
            processors = sorted({line.get("processor", "another one, not recorded") for line in clocks})
            parts.append(
                f"Milliseconds on one thread. Processor: {'; '.join(processors)}.\n\n{latency_table(clocks)}\n"
            )
    if slow:
        title = "Where the time goes"
        parts.append(f"{title}\n{'-' * len(title)}\n\n{causes_section(slow, timed)}")
    return f"""Exported files on real engines
==============================

Each file of a backend, on the engine that the backend is meant for: {len(parity.MODELS)} models of torchvision with
random weights at {SIDE} px, MobileNetV2 with real weights at {PHOTO_SIDE} px, and YOLOv5n of the example at
{YOLO_SIDE} px, calibrated and not trained. :doc:`/howto/engines` has the function that compares.

* *precision* f32: what stays float in OpenVINO is float32; without it, OpenVINO's default, bfloat16 where the processor
  has it, as here. LiteRT's figures are those of the certificate of ``export_tflite``, *alone* only.
* *alone*, *together*: the share of all quantized values that the engine computes differently from the file, by one step
  and by two or more: each tensor from the right integers of the tensors before it; and with the operators that compute
  these inside. *ties*: values that lie exactly between two steps.
* *tensors over the limit*: how many, alone and together, have more than {MAX_OFF_BY_ONE:.2%} and more than one of their
  values off by one, or any by two; and which operators compute them.
* *layers on integers*: convolutions, linear layers and products of matrices that read quantized values only, and run on
  integers. *other operators in float*: those that the file lets the engine run on integers, too.
* *cosine*: end to end, to ONNX Runtime without optimizations. *same class*: share of photos, of YOLOv5n of the boxes
  with a score of {CONFIDENT} on {PHOTOS[YOLO]} photos, to which the engine gives the class of the fake-quant model.
* *to float*, *to own quantizer*: latency over that of the float file, and over that of the file of NNCF (OpenVINO,
  preset mixed) or ``quantize_static`` (ONNX Runtime): medians of the ratios of turns, below 1 is faster. *operators in
  float* count what the engine runs in float, in fxqat's file and in the other one.

Written by ``tests/benchmarks/engines.py`` with torch {experiments.torch_versions(compared)} on {date.today()}; do not
edit.

{chr(10).join(parts)}"""


def main() -> None:
    """Run a command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, function, models, results in (
        ("run", run, NAMES, RESULTS),
        ("latency", latency, TIMED, LATENCY),
        ("causes", causes, TIMED, CAUSES),
    ):
        command = commands.add_parser(name, help=str(function.__doc__))
        command.add_argument("--models", nargs="*", default=models, choices=NAMES)
        command.add_argument("--engines", nargs="*", default=DEFAULT_ENGINES, choices=[case.engine for case in CASES])
        command.add_argument("--results", type=Path, default=results)
        command.set_defaults(function=function)
    single = commands.add_parser("row", help="print the figures of one row")
    for option in ("model", *asdict(CASES[0])):
        single.add_argument(f"--{option}", default="")
    single.add_argument("--latency", action="store_true")
    single.add_argument("--causes", action="store_true")
    single.set_defaults(function=row)
    for command in commands.choices.values():
        command.add_argument("--data", type=Path, help="folder with real weights and photos")
        command.add_argument("--turns", type=int, default=30)
        command.add_argument("--runs", type=int, default=5)
        command.add_argument("--latencies", type=Path, default=LATENCY, help="results of ``latency``")
    reports = commands.add_parser("report", help=str(report.__doc__))
    reports.add_argument("--results", type=Path, default=RESULTS)
    reports.add_argument("--latencies", type=Path, default=LATENCY)
    reports.add_argument("--causes", type=Path, default=CAUSES)
    reports.add_argument("--output", type=Path, default=experiments.EVIDENCE / "engines_measured.rst")
    reports.set_defaults(function=report)
    arguments = parser.parse_args()
    arguments.function(arguments)


if __name__ == "__main__":
    main()

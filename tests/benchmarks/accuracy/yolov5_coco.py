"""Accuracy and latency of ``example/yolov5_example`` with the published YOLOv5n weights on COCO images.

DIR holds ``yolov5n/yolov5n_state_dict_fp16.pt`` and ``coco128/`` (``config.yaml``, ``train2017_128.zip``,
``val2017_128.zip``). Each row adds a line to ``results/yolov5_coco.jsonl``; rows that have a line there are skipped.

    python tests/benchmarks/accuracy/yolov5_coco.py run --data DIR
    python tests/benchmarks/accuracy/yolov5_coco.py report
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import experiments
import torch
import yaml
from prettytable import PrettyTable
from torch import nn

EXAMPLES = Path(__file__).resolve().parents[3] / "example"
sys.path[:0] = [str(EXAMPLES / "yolov5_example"), str(EXAMPLES / "common")]

import dataset  # noqa: E402
import detector  # noqa: E402
import task  # noqa: E402
import train_qat  # noqa: E402
from onnx_files import EXPORTER_OPSET, export_float, measure_latency  # noqa: E402

SIZE, BATCH = 640, 32


@dataclass(frozen=True)
class Row:
    """One way to quantize.

    Args:
        backend: empty for the float model.
        epochs: of quantization-aware training; 0: calibration alone.
        allowed: how far mAP50-95 may be below the float model's.
    """

    backend: str = ""
    epochs: int = 0
    allowed: float = 0.0


ROWS = (
    Row(),
    Row("TSQAT", allowed=0.012),
    Row("ONNXRuntime", allowed=0.008),
    Row("TSQAT", 4, allowed=0.006),
    Row("ONNXRuntime", 4, allowed=0.006),
)


def description_of(data: Path, folder: Path) -> Path:
    """Write a ``data.yaml`` for the zip files."""
    content = yaml.safe_load((data / "coco128" / "config.yaml").read_text())
    zips = {part: f"{part}2017_128.zip" for part in ("train", "val")}
    file = folder / "data.yaml"
    file.write_text(yaml.safe_dump(content | zips | {"path": str((data / "coco128").resolve())}))
    return file


def run_row(row: Row, data: Path, folder: Path) -> dict[str, float]:
    """The mAP of a row on rectangular images, and on square ones of the model and of its file."""
    weights, cpu = data / "yolov5n" / "yolov5n_state_dict_fp16.pt", torch.device("cpu")
    described = description_of(data, folder)
    pictures = dataset.read_description(described).pictures("val")
    if not row.backend:
        found = detector.open_detector(weights, cpu)
        rectangular = task.evaluate(found, pictures, SIZE, BATCH, 0)
        square = task.evaluate(found, pictures, SIZE, BATCH, 0, rectangular=False)
        return {"map50": rectangular.map50, "map": rectangular.map, "square": square.map}
    flags = ["--quantize", "--weights", str(weights), "--data", str(described), "--backend", row.backend]
    flags += ["--output_dir", str(folder), "--workers", "0", "--seed", "0", "--with-decode", "--runtime", "none"]
    flags += ["--epochs", str(row.epochs), *(["--distill"] if row.epochs else [])]
    train_qat.main(flags)
    quantized = detector.open_detector(folder / "yolov5n_model_best.pth", cpu)
    rectangular = task.evaluate(quantized, pictures, SIZE, BATCH, 0)
    square = task.evaluate(quantized, pictures, SIZE, BATCH, 0, rectangular=False)
    path = folder / "yolov5n_bestonnx_quantization.onnx"
    file = task.evaluate(detector.OnnxDetector(path, optimize=False), pictures, SIZE, BATCH, 0, rectangular=False)
    return {"map50": rectangular.map50, "map": rectangular.map, "square": square.map, "file": file.map}


def latency_of(folder: Path, data: Path) -> list[float]:
    """Milliseconds of the float model's file and of the exported one, run in turn, both with decoding."""
    model = detector.open_detector(data / "yolov5n" / "yolov5n_state_dict_fp16.pt", torch.device("cpu")).model
    example, float_file = torch.rand(1, 3, SIZE, SIZE), folder / "float.onnx"
    export_float(Boxes(model).eval(), example, float_file, EXPORTER_OPSET)
    return measure_latency([float_file, folder / "yolov5n_bestonnx_quantization.onnx"], example)


class Boxes(nn.Module):
    """A model that returns its boxes only."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The boxes in images."""
        boxes: torch.Tensor = self.model(x)[0]
        return boxes


def run(arguments: argparse.Namespace) -> None:
    """Measure the rows that have no result yet."""
    torch.set_num_threads(arguments.threads)
    for row in ROWS:
        if any(Row(**result["row"]) == row for result in experiments.read(arguments.results)):
            continue
        if (row.backend or "float") not in arguments.backends:
            continue
        with tempfile.TemporaryDirectory() as folder:
            figures = run_row(row, arguments.data, Path(folder))
            if row.backend and not row.epochs:  # training changes no time
                figures["ms_float"], figures["ms"] = latency_of(Path(folder), arguments.data)
        experiments.add(arguments.results, {"row": asdict(row), "threads": arguments.threads, **figures})


def report(arguments: argparse.Namespace) -> None:
    """Write the documentation page."""
    results = experiments.read(arguments.results)
    reference = next(result for result in results if not result["row"]["backend"])
    header = ["backend", "epochs", "mAP50", "mAP50-95", "loss", "allowed loss", "square", "ONNX file", "ms"]
    table = PrettyTable([*header, "float ms"], align="l", hrules=1)
    for result in sorted(results, key=lambda result: (result["row"]["epochs"], result["row"]["backend"])):
        row = Row(**result["row"])
        figures = [f"{result[key]:.4f}" if key in result else "" for key in ("map50", "map", "square", "file")]
        times = [f"{result[key]:.1f}" if key in result else "" for key in ("ms", "ms_float")]
        loss = f"{reference['map'] - result['map']:.4f}" if row.backend else ""
        cells = [row.backend or "float", row.epochs or "", *figures[:2], loss, row.allowed or "", *figures[2:], *times]
        table.add_row(cells)
    text = f"""Accuracy of YOLOv5
==================

COCO's mean average precision (mAP) of YOLOv5n with the published weights, quantized by ``example/yolov5_example``
(:doc:`/recipes/yolov5`), on the first 128 images of COCO val2017 (lightly-ai/coco128_yolo) at {SIZE} px, in batches of
{BATCH}.

* *epochs*: of finetuning; empty: calibration alone. Calibration uses 64 of the first 128 images of train2017,
  finetuning all 128 and the float model as teacher. The best of the calibrated model and of those after each epoch is
  kept.
* *loss*: mAP50-95 below the float model.
* *mAP50*, *mAP50-95*: on rectangular images with as little padding as possible. *square*: mAP50-95 on square images, as
  the ONNX file takes them. *ONNX file*: mAP50-95 of the file in ONNX Runtime without graph optimizations.
* *ms*, *float ms*: milliseconds of one call of the exported file and of the float one, with batch 1 and decoding, run
  in turn with {results[0]["threads"]} threads at ONNX Runtime's default optimization.

Written by ``tests/benchmarks/accuracy/yolov5_coco.py`` with torch {experiments.torch_versions(results)}; do not edit.

{table.get_string()}
"""
    arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    CHOICES = {"backends": ["float", "TSQAT", "ONNXRuntime"]}
    experiments.command_line(__file__, str(__doc__), "accuracy_yolov5.rst", run, report, CHOICES)

"""Every size of both generations of ``example/yolov5_example``, with random weights: prepared, exported, compared.

Each row adds a line to ``results/yolov5_sizes.jsonl``; rows that have a line there are skipped.

    python tests/benchmarks/zoo/yolov5_sizes.py run
    python tests/benchmarks/zoo/yolov5_sizes.py report
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch
from prettytable import PrettyTable

import fxqat

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("tests/benchmarks/accuracy", "example/yolov5_example", "example/common")
sys.path[:0] = [str(ROOT / folder) for folder in FOLDERS]

import experiments  # noqa: E402
from detector import OnnxDetector, export, prepared  # noqa: E402
from model import GENERATIONS, SIZES, Yolo  # noqa: E402

SIDE = 64
FLOAT_AS_INTENDED = ("post-processing", "gives sizes", "tensor of the model")
"""How the reasons begin of nodes that are float in every quantized model."""
CLASSES = tuple(str(number) for number in range(80))


def measure(generation: str, size: str, backend: str) -> dict[str, Any]:
    """Prepare a model, export it, and run its file on another number of images."""
    torch.manual_seed(0)
    began = time.perf_counter()
    gm = prepared(Yolo(size, len(CLASSES), generation).eval(), {"img": SIDE, "backend": backend, "quant_config": None})
    report = gm.eval().quant_report
    fxqat.calibrate(gm, [torch.rand(4, 3, SIDE, SIDE)], progress=False)
    fxqat.enable_quantization(gm)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "yolo.onnx"
        certificate = export(gm, path, SIDE, CLASSES, True, None).certificate
        megabytes = path.stat().st_size / 1e6
        images = torch.rand(3, 3, SIDE, SIDE)
        boxes = OnnxDetector(path, optimize=False)(images)
        with torch.no_grad():
            same_shape = boxes.shape == gm(images)[0].shape
    no_loss = ("post-processing", "gives sizes", "tensor of the model")
    left = {row.op for row in report if row.status == "float" and not row.reason.startswith(no_loss)}
    return {
        "leaves": len(report.leaves), "float": sorted(left), "passed": bool(certificate.passed),
        "off_share": certificate.off_share, "dynamic": bool(same_shape), "megabytes": megabytes,
        "million_parameters": sum(p.numel() for p in gm.parameters()) / 1e6, "seconds": time.perf_counter() - began,
    }  # fmt: skip


def run(arguments: argparse.Namespace) -> None:
    """Measure the rows that have no result yet."""
    torch.set_num_threads(arguments.threads)
    for generation, size, backend in product(GENERATIONS, SIZES, arguments.backends):
        row = {"generation": generation, "size": size, "backend": backend}
        if any(result.items() >= row.items() for result in experiments.read(arguments.results)):
            continue
        experiments.add(arguments.results, row | measure(generation, size, backend))


def report(arguments: argparse.Namespace) -> None:
    """Write the documentation page."""
    results = experiments.read(arguments.results)
    header = ["generation", "size", "backend", "million parameters", "float leaves", "float before post-processing"]
    table = PrettyTable([*header, "certificate", "off, end to end", "batch of 3", "MB"], align="l", hrules=1)
    for r in sorted(results, key=lambda r: (r["generation"], r["million_parameters"], r["backend"])):
        cells = [r["generation"], r["size"], r["backend"], f"{r['million_parameters']:.1f}", r["leaves"]]
        cells += [", ".join(r["float"]) or "nothing", "passed" if r["passed"] else "FAILED", f"{r['off_share']:.3%}"]
        table.add_row([*cells, "runs" if r["dynamic"] else "FAILS", f"{r['megabytes']:.1f}"])
    text = f"""YOLOv5 in all sizes
===================

Whether every model of ``example/yolov5_example`` (:doc:`/recipes/yolov5`) is quantized and exported: both generations
in all sizes, with random weights and {len(CLASSES)} classes, are prepared as a whole, calibrated, exported at {SIDE} px
with decoding, and compared with ONNX Runtime.

* *float leaves*: modules or functions that could not be traced.
* *float before post-processing*: operations of which at least one is float. ONNXRuntime keeps layers with little work
  for each value float, and the operations between them, because int8 would make them slower (``least_work`` in
  :doc:`/reference/configuration`).
* *certificate*: the parity certificate (:doc:`/concepts/verify`). *off, end to end*: share of values that differ, end
  to end.
* *batch of 3*: the file, exported with batch 1, runs on 3 images. *MB*: its size.

Written by ``tests/benchmarks/zoo/yolov5_sizes.py`` with torch {experiments.torch_versions(results)}; do not edit.

{table.get_string()}
"""
    arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    CHOICES = {"backends": ["TSQAT", "ONNXRuntime"]}
    experiments.command_line(__file__, str(__doc__), "zoo_yolov5.rst", run, report, CHOICES, needs_data=False)

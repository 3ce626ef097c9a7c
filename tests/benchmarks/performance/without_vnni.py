"""What 8-bit files compute, and how fast, in ONNX Runtime on an x86 processor without VNNI.

Each file runs in its own process with thread spinning off; the processes take turns. Run nothing else meanwhile.

    python tests/benchmarks/performance/without_vnni.py --output docs/evidence/without_vnni.rst
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from datetime import date
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import torch
from machine import processor
from ort_latency import SIZE, latencies
from prettytable import PrettyTable
from runtime_latency import parse_arguments, write_files
from tqdm import tqdm

from fxqat.onnx.ort_runs import run, sums_saturate

KINDS = {
    "TSQAT": ("TSQAT", "onnxruntime"),
    "TSQAT, avx2": ("TSQAT", "onnxruntime_avx2"),
    "ONNXRuntime": ("ONNXRuntime", "onnxruntime"),
    "ONNXRuntime, avx2": ("ONNXRuntime", "onnxruntime_avx2"),
    "ONNXRuntime_AVX2": ("ONNXRuntime_AVX2", "onnxruntime"),
}
"""The backend and the runtime of each file."""


def error(path: Path) -> float:
    """How much the optimizer changes the outputs on noise: the norm of the difference, relative to the outputs."""
    feeds = {"x": np.random.default_rng(0).standard_normal((1, 3, SIZE, SIZE), dtype=np.float32)}
    levels = (ort.GraphOptimizationLevel.ORT_DISABLE_ALL, ort.GraphOptimizationLevel.ORT_ENABLE_ALL)
    (plain,), (optimized,) = (run(onnx.load(path), feeds, level).values() for level in levels)
    return float(np.linalg.norm(optimized - plain) / np.linalg.norm(plain))


def page(table: PrettyTable, arguments: argparse.Namespace) -> str:
    """The documentation page."""
    table.hrules = 1
    return f"""Processors without VNNI
=======================

On an x86 processor without VNNI, ONNX Runtime adds two products of uint8 and int8 in 16 bits, where they saturate. A
file with weights in uint8 (``runtime="onnxruntime_avx2"``, see :doc:`/reference/export`) has the same integers and
exact sums; weights of 7 bits (the backend ``ONNXRuntime_AVX2``) do not saturate.

For each file: its latency on the CPU for one {SIZE}x{SIZE} image, relative to the float model (1 = as fast as float,
less is faster), the median over {arguments.turns} turns of the ratio; and in brackets how much ONNX Runtime's outputs
change at its default optimization level, on noise: the norm of the difference, relative to that of the outputs. Models
of torchvision with random weights, where a value off by a step grows more than in trained ones.

* *TSQAT*, *ONNXRuntime*: these backends with ``runtime="onnxruntime"``; *avx2*: with ``runtime="onnxruntime_avx2"``.
* *ONNXRuntime_AVX2*: this backend with ``runtime="onnxruntime"``.

Each file runs in its own process with {arguments.threads} threads without spinning; the processes take turns.
Processor: {processor()}

Written by ``tests/benchmarks/performance/without_vnni.py`` with onnxruntime {ort.__version__} and torch
{torch.__version__} on {date.today()}; do not edit.{arguments.note and " " + arguments.note}

{table.get_string()}
"""


def main() -> None:
    """Measure, print the table, write the page."""
    arguments = parse_arguments(__doc__ or "")
    if not sums_saturate():
        sys.exit("the sums of this processor do not saturate: runtime_latency.py measures such processors")
    table = PrettyTable(["model", *KINDS], align="l")
    for name in tqdm(arguments.models):
        with tempfile.TemporaryDirectory() as temporary:
            paths = write_files(name, arguments.files or Path(temporary), arguments.threads, KINDS)
            times = latencies(paths, arguments)
            errors = {kind: error(paths[kind]) for kind in KINDS}
        ratios = {kind: np.median(np.divide(times[kind], times["float"])) for kind in KINDS}
        table.add_row([name, *(f"{ratios[kind]:.3f} ({errors[kind]:.1%})" for kind in KINDS)])
        tqdm.write(str(table))
    if arguments.output:
        arguments.output.write_text(page(table, arguments), encoding="utf-8")


if __name__ == "__main__":
    main()

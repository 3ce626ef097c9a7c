"""What ``convert_export(runtime="onnxruntime")`` makes of TSQAT's files: latency in ONNX Runtime on the CPU.

Each file runs in its own process with thread spinning off; the processes take turns. Run nothing else meanwhile.

    python tests/benchmarks/performance/runtime_latency.py --output docs/evidence/runtime_latency.rst
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from datetime import date
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import torch
import torchvision
from machine import processor
from ort_latency import SIZE, Measured, integer_share, latencies, ratio
from prettytable import PrettyTable
from torch import nn
from tqdm import tqdm

import fxqat
from fxqat.onnx.ort_runs import run

MODELS = ("resnet18", "resnet50", "mobilenet_v2", "regnet_x_400mf", "vit_b_16")
KINDS = {"TSQAT": ("TSQAT", None), "rewritten": ("TSQAT", "onnxruntime"), "ONNXRuntime": ("ONNXRuntime", None)}
"""The backend and the runtime of each file."""


def write_files(
    name: str, folder: Path, threads: int, kinds: Mapping[str, tuple[str, str | None]] = KINDS
) -> dict[str, Path]:
    """The float file and those of ``kinds``, of a model with random weights, calibrated on noise; unless they exist."""
    paths = {kind: folder / f"{name}_{number}.onnx" for number, kind in enumerate(("float", *kinds))}
    if all(path.exists() for path in paths.values()):
        return paths
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    model: nn.Module = torchvision.models.get_model(name, weights=None).eval()
    for parameter in (each for each in model.parameters() if each.dim() > 1 and not each.any()):
        nn.init.normal_(parameter, std=0.02)  # vit_b_16 begins with outputs of 0
    batches = [torch.randn(1, 3, SIZE, SIZE) for _ in range(4)]
    export = {"input_names": ["x"], "dynamo": True, "external_data": False, "verbose": False}
    torch.onnx.export(model, (batches[0],), paths["float"], **export)
    for backend in dict.fromkeys(backend for backend, _ in kinds.values()):
        gm = fxqat.prepare_by_platform(model, backend, example_inputs=(batches[0],)).eval()
        fxqat.calibrate(gm, batches, progress=False)
        fxqat.enable_quantization(gm)
        for kind, (_, runtime) in ((kind, value) for kind, value in kinds.items() if value[0] == backend):
            fxqat.convert_export(gm, (batches[0],), paths[kind], input_names=["x"], runtime=runtime)
    return paths


def same_outputs(first: Path, second: Path) -> bool:
    """Whether two files compute the same bits on noise, without optimizations."""
    feeds = {"x": np.random.default_rng(0).standard_normal((1, 3, SIZE, SIZE), dtype=np.float32)}
    plain = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    one, other = (run(onnx.load(path), feeds, plain) for path in (first, second))
    return all(np.array_equal(one[name], other[name]) for name in one)


def page(table: PrettyTable, arguments: argparse.Namespace) -> str:
    """The documentation page."""
    table.hrules = 1
    return f"""Latency of files for a runtime
==============================

``convert_export(..., runtime="onnxruntime")`` writes the integers of a model in the form that ONNX Runtime runs fast,
see :doc:`/reference/export`. Latency on the CPU for one {SIZE}x{SIZE} image, relative to the float model (1 = as fast
as float, less is faster). Models of torchvision with random weights.

* *TSQAT*, *rewritten*: the same model of the backend TSQAT, without and with ``runtime="onnxruntime"``; *ONNXRuntime*:
  that of the backend ONNXRuntime. Each is the median over {arguments.turns} turns of the ratio to the float model.
* *rewritten / ONNXRuntime*: the same ratio of these two files.
* *on integers*: share of the multiply-accumulates that run in an integer kernel, from ONNX Runtime's profile.
* *same bits*: whether both TSQAT files compute the same outputs without optimizations.

Each file runs in its own process with {arguments.threads} threads without spinning, at the default optimization level;
the processes take turns. Processor: {processor()}

Written by ``tests/benchmarks/performance/runtime_latency.py`` with onnxruntime {ort.__version__} and torch
{torch.__version__} on {date.today()}; do not edit.{arguments.note and " " + arguments.note}

{table.get_string()}
"""


def parse_arguments(about: str) -> argparse.Namespace:
    """The arguments of a script that measures files of models in turns."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=30, help="turns of each file")
    parser.add_argument("--runs", type=int, default=6, help="runs in a turn")
    parser.add_argument("--files", type=Path, help="keep the files in this folder, and measure those that are there")
    parser.add_argument("--note", default="", help="a sentence about the machine for the page")
    parser.add_argument("--output", type=Path, help="write the documentation page here")
    return parser.parse_args()


def main() -> None:
    """Measure, print the table, write the page."""
    arguments = parse_arguments(__doc__ or "")
    header = ["model", *KINDS, "rewritten / ONNXRuntime", "on integers: TSQAT", "on integers: rewritten", "same bits"]
    table = PrettyTable(header, align="l")
    for name in tqdm(arguments.models):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            paths = write_files(name, arguments.files or folder, arguments.threads)
            shares = {kind: integer_share(path, arguments.threads, folder) for kind, path in paths.items()}
            found = {k: Measured(times, *shares[k]) for k, times in latencies(paths, arguments).items()}
            is_same = same_outputs(paths["TSQAT"], paths["rewritten"])
        ratios = [f"{ratio(found[kind], found['float']):.3f}" for kind in KINDS]
        ratios.append(f"{ratio(found['rewritten'], found['ONNXRuntime']):.3f}")
        integers = [f"{found[kind].integer_share:.0%}" for kind in ("TSQAT", "rewritten")]
        table.add_row([name, *ratios, *integers, "yes" if is_same else "NO"])
        tqdm.write(str(table))
    if arguments.output:
        arguments.output.write_text(page(table, arguments), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Memory that an export adds, against the float weights of the model.

::

    python tests/benchmarks/performance/export_memory.py run --output /tmp/memory.jsonl    # a child process per row
    python tests/benchmarks/performance/export_memory.py page --results /tmp/memory.jsonl --output docs/m.rst

Linux only: the peak of the resident set is reset before the export and read after it. To compare with another version
of the package, run with that one on PYTHONPATH, and ``--version`` to name it.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torchvision
from prettytable import PrettyTable
from torch import nn
from torchvision.models.vision_transformer import VisionTransformer

import fxqat

SIZE = 64
MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": torchvision.models.resnet18,
    "resnet50": torchvision.models.resnet50,
    "vit_b_16": lambda: VisionTransformer(SIZE, 16, 12, 12, 768, 3072),
    "20 Linear layers, 105M": lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE**2, 2048, bias=False), *layers()),
    "ViT of width 1280, 15 blocks, 300M": lambda: VisionTransformer(SIZE, 16, 15, 16, 1280, 5120),
    "ViT of width 1280, 28 blocks, 552M": lambda: VisionTransformer(SIZE, 16, 28, 16, 1280, 5120),
}


def layers() -> list[nn.Module]:
    """Linear layers with ReLU."""
    return [layer for _ in range(19) for layer in (nn.Linear(2048, 2048), nn.ReLU())]


def resident(key: str) -> int:
    """``VmRSS`` or ``VmHWM`` of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def ready(model: nn.Module, x: torch.Tensor) -> nn.Module:
    """Prepare and calibrate."""
    gm = fxqat.prepare_by_platform(model.eval(), "TSQAT", example_inputs=x, check="quick")
    fxqat.enable_calibration(gm)
    with torch.no_grad():
        gm(x)
    fxqat.enable_quantization(gm)
    return gm


def measure(arguments: argparse.Namespace) -> dict[str, object]:
    """One row, in this process."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    x = torch.randn(1, 3, SIZE, SIZE)
    model = MODELS[arguments.model]()
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    gm = ready(model, x)
    del model
    with tempfile.TemporaryDirectory() as folder:
        fxqat.convert_export(ready(nn.Conv2d(3, 4, 3), x), x, Path(folder) / "first.onnx")  # loads what comes late
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before, start = resident("VmRSS"), time.process_time()
        report = fxqat.convert_export(gm, x, Path(folder) / "model.onnx", weights=arguments.weights)
        seconds = time.process_time() - start
        return {
            "version": arguments.version,
            "model": arguments.model,
            "weights": arguments.weights,
            "float_bytes": weights,
            "added_bytes": resident("VmHWM") - before,
            "cpu_seconds": seconds,
            "file_bytes": report.onnx_path.stat().st_size,
        }


def run(arguments: argparse.Namespace) -> None:
    """Measure each model in a process of its own, and append the rows."""
    for model in arguments.models:
        command = [sys.executable, __file__, "measure", model, arguments.weights, arguments.version]
        row = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
        print(row, flush=True)
        with arguments.output.open("a", encoding="utf-8") as file:
            file.write(row + "\n")


def page(arguments: argparse.Namespace) -> None:
    """Write the documentation page."""
    table = PrettyTable(
        ["model", "weights", "float, MB", "version", "added, MB", "of float", "CPU s"], align="l", hrules=1
    )
    rows = [json.loads(line) for line in arguments.results.read_text().splitlines()]
    for row in sorted(rows, key=lambda row: row["float_bytes"]):
        added, held = row["added_bytes"], row["float_bytes"]
        cells = [f"{held / 1e6:.0f}", row["version"], f"{added / 1e6:.0f}", f"{added / held:.2f}"]
        table.add_row([row["model"], row["weights"], *cells, f"{row['cpu_seconds']:.1f}"])
    arguments.output.write_text(
        f"""Memory of an export
===================

The most memory that ``convert_export`` adds to the process, with its certificate, against the float weights of the
model; the prepared model itself, which is once the float weights, is not counted. Backend TSQAT, one image of
{SIZE}x{SIZE} pixels, one thread, each row in a process of its own.

{table.get_string()}

Where it goes: the float weights of the prepared model are not copied; their integers are made layer by layer, and are
in a file while the model is checked and compared. Most of the rest is ONNX Runtime, which runs the file four times,
each time without an arena, so that what a node has freed goes back to the system. The order in which it runs the nodes
of some models (here the Linear layers) computes the float values of all weights before the first one is read. In models
with more than 2\\ :sup:`25` numbers in constants that are transposed, its optimized run does without constant folding,
which alone takes twice the float weights of vit_b_16. A row is one run; repeated runs differ, most for small models.

Written by ``tests/benchmarks/performance/export_memory.py`` with torch {torch.__version__}; do not edit.
""",
        encoding="utf-8",
    )
    print(table)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="measure all models")
    running.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    running.add_argument("--weights", default="integer", choices=["integer", "float"])
    running.add_argument("--version", default=fxqat.__version__)
    running.add_argument("--output", type=Path, required=True)
    measuring = commands.add_parser("measure", help="measure one model in this process")
    for name in ("model", "weights", "version"):
        measuring.add_argument(name)
    writing = commands.add_parser("page", help="write the page")
    writing.add_argument("--results", type=Path, required=True)
    writing.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.command == "measure":
        print(json.dumps(measure(arguments)))
    else:
        {"run": run, "page": page}[arguments.command](arguments)


if __name__ == "__main__":
    main()

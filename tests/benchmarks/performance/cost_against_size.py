"""What prepare, calibration, a training step and export cost against the number of layers.

::

    python tests/benchmarks/performance/cost_against_size.py run --output /tmp/cost.jsonl    # a child process per row
    python tests/benchmarks/performance/cost_against_size.py page --results /tmp/cost.jsonl --output docs/cost.rst

A model is a chain of blocks: 1x1 convolution of 4 channels, BatchNorm, ReLU. *Layers* are its modules. CPU seconds of
one thread, so that other work on the machine counts little.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import torch
from prettytable import PrettyTable
from torch import Tensor, nn

import fxqat

LAYERS = (10, 100, 1000, 5000)
COLUMNS = {
    "prepare": "prepare",
    "calibrate": "calibrate",
    "float step": "float_step",
    "step": "step",
    "export": "export",
}


def conv() -> nn.Conv2d:
    """A convolution that keeps the size of the values."""
    layer = nn.Conv2d(4, 4, 1, bias=False)
    nn.init.orthogonal_(layer.weight)
    return layer


def norm() -> nn.BatchNorm2d:
    """A BatchNorm whose bias keeps some values above 0, through any number of ReLUs."""
    layer = nn.BatchNorm2d(4)
    nn.init.constant_(layer.bias, 0.5)
    return layer


def chain(layers: int) -> nn.Sequential:
    """A chain of so many layers."""
    kinds: tuple[Callable[[], nn.Module], ...] = (conv, norm, nn.ReLU)
    return nn.Sequential(OrderedDict((f"layer{number}", kinds[number % 3]()) for number in range(layers)))


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU seconds of the process."""
    start = time.process_time()
    work()
    return time.process_time() - start


def train_step(model: nn.Module, x: Tensor) -> float:
    """Median CPU seconds of a forward and backward pass."""
    model.train()
    times = sorted(cpu_seconds(lambda: model(x).sum().backward()) for _ in range(5))
    return times[2]


def peak_bytes() -> int:
    """The largest resident set since it was reset (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def reset_peak() -> int:
    """Forget the largest resident set so far; the present one."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def measure(layers: int) -> dict[str, float]:
    """One row, in this process."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    x = torch.randn(2, 4, 8, 8)
    with tempfile.TemporaryDirectory() as folder:
        for size in (3, layers):  # the first one loads what is imported late
            model = chain(size).eval()
            row = {"layers": layers, "float_step": train_step(chain(size), x)}
            start = reset_peak()
            made = []
            row["prepare"] = cpu_seconds(
                lambda model=model, made=made: made.append(fxqat.prepare_by_platform(model, example_inputs=x))
            )
            row["prepare_bytes"] = peak_bytes() - start
            gm = made[0]
            row["calibrate"] = cpu_seconds(lambda gm=gm: fxqat.calibrate(gm, [x], progress=False))
            fxqat.enable_quantization(gm)
            row["step"] = train_step(gm, x)
            start = reset_peak()
            path = Path(folder) / "model.onnx"
            row["export"] = cpu_seconds(lambda gm=gm, path=path: fxqat.convert_export(gm, x, path))
            row["export_bytes"] = peak_bytes() - start
    return row


def run(arguments: argparse.Namespace) -> None:
    """Measure each size in a process of its own, and append the rows."""
    for layers in arguments.layers:
        command = [sys.executable, __file__, "measure", str(layers)]
        row = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
        print(row, flush=True)
        with arguments.output.open("a", encoding="utf-8") as file:
            file.write(row + "\n")


def page(arguments: argparse.Namespace) -> None:
    """Write the page."""
    rows = {row["layers"]: row for row in map(json.loads, arguments.results.read_text().splitlines())}
    per_layer = PrettyTable(
        ["layers", *(f"{name}, ms a layer" for name in COLUMNS), "step / float", "memory, KB a layer"],
        align="r",
        hrules=1,
    )
    totals = PrettyTable(["layers", *(f"{name}, s" for name in COLUMNS), "memory, MB"], align="r", hrules=1)
    for layers, row in sorted(rows.items()):
        memory = max(row["prepare_bytes"], row["export_bytes"])
        each = [f"{1e3 * row[key] / layers:.3f}" for key in COLUMNS.values()]
        ratio = f"{row['step'] / row['float_step']:.2f}"
        per_layer.add_row([layers, *each, ratio, f"{memory / layers / 1e3:.0f}"])
        totals.add_row([layers, *(f"{row[key]:.3f}" for key in COLUMNS.values()), f"{memory / 1e6:.0f}"])
    arguments.output.write_text(
        f"""Cost against size
=================

What ``prepare_by_platform`` (with example inputs), ``calibrate`` (one batch), one training step and ``convert_export``
(with its certificate) cost against the number of layers: where a cost is linear, its figures for one layer are the same
in all rows. The models are chains of 1x1 convolution (4 channels), BatchNorm and ReLU, backend TSQAT, on a batch of 2
images of 8x8 pixels: the layers compute next to nothing, so that the ratio of the steps is that of the work around
them. CPU seconds of one thread; *memory* is the most that prepare or export add.

{per_layer.get_string()}

In all:

{totals.get_string()}

Written by ``tests/benchmarks/performance/cost_against_size.py`` with torch {torch.__version__}; do not edit.
""",
        encoding="utf-8",
    )
    print(per_layer)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="measure all sizes")
    running.add_argument("--layers", type=int, nargs="+", default=LAYERS)
    running.add_argument("--output", type=Path, required=True)
    measuring = commands.add_parser("measure", help="measure one size in this process")
    measuring.add_argument("layers", type=int)
    writing = commands.add_parser("page", help="write the page")
    writing.add_argument("--results", type=Path, required=True)
    writing.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.command == "measure":
        print(json.dumps(measure(arguments.layers)))
    else:
        {"run": run, "page": page}[arguments.command](arguments)


if __name__ == "__main__":
    main()

"""Time of ``prepare_by_platform``, against ``torch.fx.symbolic_trace``, which every quantizer of fx graphs needs.

python tests/benchmarks/performance/prepare_time.py --output docs/evidence/prepare_time.rst
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
import torchvision
from prettytable import PrettyTable
from torch import Tensor, fx, nn
from tqdm import tqdm

import fxqat


def chain(blocks: int) -> nn.Sequential:
    """A chain of blocks: 1x1 convolution, BatchNorm, ReLU."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for number in range(blocks):
        layers[f"conv{number}"] = nn.Conv2d(4, 4, 1, bias=False)
        layers[f"bn{number}"] = nn.BatchNorm2d(4)
        layers[f"relu{number}"] = nn.ReLU()
    return nn.Sequential(layers)


def real(name: str) -> Callable[[], nn.Module]:
    """A torchvision model with random weights."""
    return lambda: torchvision.models.get_model(name, weights=None)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "500 blocks": (lambda: chain(500), (1, 4, 8, 8)),
    "2000 blocks": (lambda: chain(2000), (1, 4, 8, 8)),
    "resnet18": (real("resnet18"), (1, 3, 224, 224)),
    "resnet50": (real("resnet50"), (1, 3, 224, 224)),
    "vit_b_16": (real("vit_b_16"), (1, 3, 224, 224)),
}


def seconds_of(work: Callable[[], object], rounds: int) -> float:
    """Median seconds of a few runs."""
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def measure(name: str, arguments: argparse.Namespace) -> list[object]:
    """One row: seconds of tracing alone, of one forward, and of preparing without and with example inputs."""
    build, shape = CASES[name]
    torch.manual_seed(0)
    model, x = build().eval(), torch.randn(shape)

    def prepare(example: Tensor | None) -> nn.Module:
        return fxqat.prepare_by_platform(model, arguments.backend, example_inputs=example)

    nodes = len(fx.symbolic_trace(model).graph.nodes)
    traced = seconds_of(lambda: fx.symbolic_trace(model), arguments.rounds)
    with torch.no_grad():
        forward = seconds_of(lambda: model(x), arguments.rounds)
    plain = seconds_of(lambda: prepare(None), arguments.rounds)
    checked = seconds_of(lambda: prepare(x), arguments.rounds)
    times = [f"{value:.2f}" for value in (traced, forward, plain, checked)]
    return [name, nodes, *times, f"{plain / traced:.1f}", f"{checked / traced:.1f}", f"{1e3 * checked / nodes:.2f}"]


def profile(name: str, backend: str) -> None:
    """Print a profile of preparing a model."""
    build, shape = CASES[name]
    model, x = build().eval(), torch.randn(shape)
    profiler = cProfile.Profile()
    profiler.runcall(fxqat.prepare_by_platform, model, backend, example_inputs=x)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(30)
    pstats.Stats(profiler).sort_stats("cumtime").print_stats("fxqat", 40)


def page(table: PrettyTable, arguments: argparse.Namespace) -> str:
    """The documentation page."""
    table.hrules = 1
    return f"""Time to prepare a model
=======================

Seconds that ``prepare_by_platform`` takes for a model (backend {arguments.backend}), against
``torch.fx.symbolic_trace`` alone: medians of {arguments.rounds} runs on {torch.get_num_threads()} CPU threads.

* *nodes*: of the traced graph. The first two models are chains of blocks of 1x1 convolution (4 channels), BatchNorm and
  ReLU on 8x8 pixels; the others are torchvision's.
* *trace*: ``torch.fx.symbolic_trace``. *forward*: one run of the float model.
* *prepare*: without example inputs. *with inputs*: with them; then every node is computed while tracing, and the result
  is compared with the model.
* *over trace*: *prepare* and *with inputs*, divided by *trace*. *ms a node*: *with inputs* divided by *nodes*.

Written by ``tests/benchmarks/performance/prepare_time.py`` with torch {torch.__version__} on {date.today()}; do not
edit.

{table.get_string()}
"""


def main() -> None:
    """Measure, print the table, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--backend", default="TSQAT")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="print a profile of each model instead")
    parser.add_argument("--output", type=Path, help="write the documentation page here")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.profile:
        for name in arguments.models:
            profile(name, arguments.backend)
        return
    header = ["model", "nodes", "trace", "forward", "prepare", "with inputs", "over trace", "with inputs, over trace"]
    table = PrettyTable([*header, "ms a node"], align="l")
    for name in tqdm(arguments.models):
        table.add_row(measure(name, arguments))
    print(table)
    if arguments.output:
        arguments.output.write_text(page(table, arguments), encoding="utf-8")


if __name__ == "__main__":
    main()

"""The ladder: whether ``fxqat.quantize`` meets an accuracy budget, and what each of its steps gives and takes.

DIR holds ``cifar10/`` (see ``resnet20_cifar10.py``), ``mobilenet_v2/`` and ``imagenet_sample/`` (see
``mobilenet_v2_imagenet.py``). Each row adds a line to ``results/ladder.jsonl``; those that have one are skipped.

    python tests/benchmarks/accuracy/ladder.py run --data DIR
    python tests/benchmarks/accuracy/ladder.py report
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import experiments
import ptq as tasks
import torch
from prettytable import PrettyTable
from torch import Tensor, nn

import fxqat

CALIBRATION = {"ResNet20": 256, "MobileNetV2": 64}
BITS = {"ResNet20": ((8, 8), (4, 8), (4, 4)), "MobileNetV2": ((8, 8), (4, 8))}
DROPS = (0.5, 1.0)
BACKEND = "Experimental"


def config_of(weight_bits: int, activation_bits: int) -> dict[str, Any]:
    """The ``prepare_custom_config_dict``: only the bit widths."""
    return {"extra_qconfig_dict": {"w_qscheme": {"bit": weight_bits}, "a_qscheme": {"bit": activation_bits}}}


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Top-1 in percent."""
    found = torch.cat([model(x).argmax(1) for x in images.split(50)])
    return 100 * float((found == labels).float().mean())


def run(arguments: argparse.Namespace) -> None:
    """Climb the ladder for the rows that have no result yet."""
    torch.set_num_threads(arguments.threads)
    known = [[result[key] for key in ("model", "bits", "drop")] for result in experiments.read(arguments.results)]
    for name in arguments.models:
        task = tasks.load(name, CALIBRATION[name], arguments.data)
        order = torch.randperm(len(task.images), generator=torch.Generator().manual_seed(1))
        search, held_back = [(task.images[half], task.labels[half]) for half in order.chunk(2)]
        for bits in BITS[name]:
            for drop in arguments.drops:
                if [name, list(bits), drop] in known:
                    continue
                began = time.perf_counter()
                result = fxqat.quantize(
                    task.model, task.batches, BACKEND, lambda m, half=search: accuracy(m, *half), drop,
                    prepare_custom_config_dict=config_of(*bits),
                )  # fmt: skip
                line = {
                    "model": name, "bits": bits, "drop": drop, "reached": result.reached, "recipe": str(result.recipe),
                    "float": result.float_metric, "top1": result.metric,
                    "held_back_float": accuracy(task.model, *held_back),
                    "held_back": accuracy(result.model, *held_back),
                    "trials": [[t.step, str(t.recipe), t.metric, t.seconds, t.note] for t in result.trials],
                    "worst": result.worst, "seconds": time.perf_counter() - began,
                }  # fmt: skip
                experiments.add(arguments.results, line)


def report(arguments: argparse.Namespace) -> None:
    """Write the documentation page."""
    results = experiments.read(arguments.results)
    table = PrettyTable(
        ["model", "bits", "budget", "met", "recipe", "float", "quantized", "held back: float", "quantized ", "s"],
        align="l",
        hrules=1,
    )
    sections = []
    for r in results:
        bits = f"W{r['bits'][0]}A{r['bits'][1]}"
        figures = [f"{r[key]:.2f}" for key in ("float", "top1", "held_back_float", "held_back")]
        table.add_row(
            [r["model"], bits, r["drop"], "yes" if r["reached"] else "no", r["recipe"], *figures, f"{r['seconds']:.0f}"]
        )
        steps = PrettyTable(["step", "recipe", "top-1", "s", "note"], align="l", hrules=1, max_width=60)
        for step, recipe, metric, seconds, note in r["trials"]:
            steps.add_row([step, recipe, "" if metric != metric else f"{metric:.2f}", f"{seconds:.0f}", note])
        title = f"{r['model']} {bits}, at most {r['drop']} points"
        tail = "" if r["reached"] else f"\n\nTensors that hold it back: {', '.join(r['worst'])}."
        sections.append(f"{title}\n{'-' * len(title)}\n\n{steps.get_string()}{tail}")
    body = "\n\n".join(sections)
    text = f"""Within an accuracy budget
=========================

``fxqat.quantize`` (:doc:`/reference/cli`) on backend {BACKEND}, from uniform bit widths, with a budget of top-1 points.
The images are those of :doc:`/evidence/accuracy_ptq`: one half of the test images guides the ladder, the other half is
held back and only tested at the end. *s*: seconds on two CPU cores, other programs often running; ``seconds`` of a step
include its test.

Written by ``tests/benchmarks/accuracy/ladder.py`` with torch {experiments.torch_versions(results)}; do not edit.

{table.get_string()}

{body}
"""
    arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    experiments.command_line(
        __file__, str(__doc__), "accuracy_ladder.rst", run, report, {"models": list(BITS), "drops": list(DROPS)}
    )

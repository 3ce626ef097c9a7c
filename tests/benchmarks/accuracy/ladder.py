"""The ladder: whether ``fxqat.quantize`` meets an accuracy budget, and what each of its steps gives and takes.

DIR holds ``cifar10/`` (see ``resnet20_cifar10.py``), ``mobilenet_v2/`` and ``imagenet_sample/`` (see
``mobilenet_v2_imagenet.py``), ``yolov5n/`` and ``coco128/`` (see ``yolov5_coco.py``). Each row adds a line to
``results/ladder.jsonl``; those that have one are skipped.

    python tests/benchmarks/accuracy/ladder.py run --data DIR
    python tests/benchmarks/accuracy/ladder.py report
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import experiments
import ptq
import torch
from prettytable import PrettyTable
from torch import Tensor, nn

import fxqat
from fxqat.cli.load_data import load_batches, load_evaluation
from fxqat.cli.load_model import load_model
from fxqat.errors import ConfigError
from fxqat.quantization.graph_module import QuantGraphModule
from fxqat.tools import WidthBank, bit_operations
from fxqat.tools import ptq as ptq_of
from fxqat.tools.mixed_precision.units import find_units, quant_at

CALIBRATION = {"ResNet20": 256, "MobileNetV2": 64}
BITS = {"ResNet20": ((8, 8), (4, 8), (4, 4)), "MobileNetV2": ((8, 8), (4, 8)), "YOLOv5n": ((8, 8),)}
DROPS = (0.5, 1.0)
BACKEND = "Experimental"
FLOAT_BITS = 16

Measure = Callable[[nn.Module], float | Tensor]
"""A number, or 100 or 0 for each image."""


@dataclass
class Task:
    """A float model, batches to calibrate on, and its metric in percent on two halves of the images."""

    model: nn.Module
    batches: list[Any]
    search: Measure
    held_back: Measure
    found: list[float] = field(default_factory=list)

    def evaluate(self, model: nn.Module) -> float | Tensor:
        """The metric that guides the ladder; that of the other half is only recorded."""
        self.found.append(mean_of(self.held_back(model)))
        return self.search(model)


def mean_of(found: float | Tensor) -> float:
    """The metric in percent."""
    return float(torch.as_tensor(found).mean())


def load(name: str, data: Path) -> Task:
    """The task of a row."""
    if name == "YOLOv5n":  # as the command line gets it
        os.environ["FXQAT_DATA"] = str(data)
        file = f"{Path(__file__).parent / 'yolov5_functions.py'}"
        halves = [load_evaluation(f"{file}:{half}", None) for half in ("search", "held_back")]
        return Task(load_model(f"{file}:model").model, load_batches(f"{file}:batches", None), *halves)
    task = ptq.load(name, CALIBRATION[name], data)
    order = torch.randperm(len(task.images), generator=torch.Generator().manual_seed(1))
    halves = [accuracy_on(task.images[half], task.labels[half]) for half in order.chunk(2)]
    return Task(task.model, task.batches, *halves)


def accuracy_on(images: Tensor, labels: Tensor) -> Measure:
    """The top-1 in percent on some images."""

    @torch.no_grad()
    def accuracy(model: nn.Module) -> Tensor:
        found = torch.cat([model(x).argmax(1) for x in images.split(50)])
        return 100 * (found == labels).float()

    return accuracy


def config_of(weight_bits: int, activation_bits: int) -> dict[str, Any]:
    """The ``prepare_custom_config_dict``: only the bit widths."""
    return {"extra_qconfig_dict": {"w_qscheme": {"bit": weight_bits}, "a_qscheme": {"bit": activation_bits}}}


def cost_of(task: Task, gm: QuantGraphModule, weight_bits: int, activation_bits: int) -> float:
    """Bit operations of a model, in those of a uniform choice; a tensor that stays float counts as one of 16 bits."""
    widths = [sorted({bits, 8, FLOAT_BITS}) for bits in (weight_bits, activation_bits)]
    bank = WidthBank(task.model, task.batches[:1], *widths, BACKEND)
    cost = bit_operations(bank, task.batches[0])
    own = {name: quant_at(gm, unit.path).scheme.bit_width for name, unit in find_units(gm).items()}
    uniform = {name: weight_bits if unit.is_weight else activation_bits for name, unit in bank.units.items()}
    return cost.of({name: own.get(name, FLOAT_BITS) for name in bank.units}) / cost.of(uniform)


def uniform_choices(cost: float, bits: tuple[int, int]) -> list[tuple[int, int]]:
    """The wider uniform choices that cost at most as much, without those that another one exceeds."""
    found = [(w, a) for w in range(bits[0], 9) for a in range(bits[1], 9) if w * a <= cost * bits[0] * bits[1]]
    return [(w, a) for w, a in found if (w, a) != bits and (w + 1, a) not in found and (w, a + 1) not in found]


def run(arguments: argparse.Namespace) -> None:
    """Climb the ladder for the rows that have no result yet."""
    torch.set_num_threads(arguments.threads)
    known = [[result[key] for key in ("model", "bits", "drop")] for result in experiments.read(arguments.results)]
    rows = [(name, bits, drop) for name in arguments.models for bits in BITS[name] for drop in arguments.drops]
    for name, bits, drop in rows:
        if [name, list(bits), drop] not in known:
            experiments.add(arguments.results, measured_row(name, bits, drop, arguments.data))


def measured_row(name: str, bits: tuple[int, int], drop: float, data: Path) -> dict[str, Any]:
    """Climb the ladder, and measure the uniform choices of the same cost."""
    task = load(name, data)
    began = time.perf_counter()
    config = config_of(*bits)
    try:
        result = fxqat.quantize(
            task.model, task.batches, BACKEND, task.evaluate, drop, prepare_custom_config_dict=config
        )
    except ConfigError as error:
        return {"model": name, "bits": bits, "drop": drop, "refused": str(error)}
    seconds = time.perf_counter() - began
    held_back = iter(task.found)
    line = {
        "model": name, "bits": bits, "drop": drop, "reached": result.reached, "recipe": str(result.recipe),
        "float": result.float_metric, "top1": result.metric, "held_back_float": next(held_back), "seconds": seconds,
        "trials": [
            [t.step, str(t.recipe), t.metric, t.seconds, t.note, None if math.isnan(t.metric) else next(held_back)]
            for t in result.trials
        ],
        "worst": result.worst, "held_back": mean_of(task.held_back(result.model)),
        "margin": result.margin, "cost": 1.0, "uniform": [],
    }  # fmt: skip
    if result.recipe.overrides:
        line["cost"] = cost_of(task, result.model, *bits)
        for choice in uniform_choices(line["cost"], bits):
            observers = {key: value for key in ("w_observer", "a_observer") if (value := getattr(result.recipe, key))}
            config = {"extra_qconfig_dict": {**config_of(*choice)["extra_qconfig_dict"], **observers}}
            options = {key: getattr(result.recipe, key) for key in ("equalize", "correct_bias")}
            gm = ptq_of(
                task.model, task.batches, BACKEND, config, reconstruct=result.recipe.reconstruct or None, **options
            )
            line["uniform"].append([choice, mean_of(task.search(gm)), mean_of(task.held_back(gm))])
    return line


def best_uniform(result: dict[str, Any]) -> float:
    """The best metric of the uniform choices that cost at most as much as a result."""
    own = [metric for step, _, metric, *_ in result["trials"] if step != "wider tensors" and metric == metric]
    return max([*own, *(metric for _, metric, _ in result["uniform"])])


def report(arguments: argparse.Namespace) -> None:
    """Write the documentation page."""
    results = experiments.read(arguments.results)
    header = ["model", "bits", "budget", "met", "recipe", "cost", "float", "quantized", "best uniform"]
    table = PrettyTable([*header, "margin", "held back: float", "quantized ", "met ", "s"], align="l", hrules=1)
    sections = []
    for r in results:
        bits = f"W{r['bits'][0]}A{r['bits'][1]}"
        if "refused" in r:
            sections.append(f"{r['model']} {bits}, at most {r['drop']} points: {r['refused']}.")
            continue
        uniform = best_uniform(r)
        if not r["reached"] and r["top1"] < uniform:
            raise SystemExit(f"{r['model']} {bits} at {r['drop']}: below a uniform choice of the same cost")
        figures = [
            f"{x:.2f}"
            for x in (r["float"], r["top1"], uniform, r.get("margin", 0.0), r["held_back_float"], r["held_back"])
        ]
        met = "yes" if r["reached"] else "no"
        cost = f"{r['cost']:.2f}"
        figures.append("yes" if r["held_back_float"] - r["held_back"] <= r["drop"] else "no")
        table.add_row([r["model"], bits, r["drop"], met, r["recipe"], cost, *figures, f"{r['seconds']:.0f}"])
        steps = PrettyTable(["step", "recipe", "metric", "held back", "s", "note"], align="l", hrules=1, max_width=60)
        for step, recipe, metric, seconds, note, held_back in r["trials"]:
            both = ["" if value is None or value != value else f"{value:.2f}" for value in (metric, held_back)]
            steps.add_row([step, recipe, *both, f"{seconds:.0f}", note])
        for (w, a), metric, held_back in r["uniform"]:
            steps.add_row(["uniform, not dearer", f"W{w}A{a}", f"{metric:.2f}", f"{held_back:.2f}", "", "to compare"])
        title = f"{r['model']} {bits}, at most {r['drop']} points"
        tail = "" if r["reached"] else f"\n\nTensors that hold it back: {', '.join(r['worst'])}."
        sections.append(f"{title}\n{'-' * len(title)}\n\n{steps.get_string()}{tail}")
    body = "\n\n".join(sections)
    text = f"""Within an accuracy budget
=========================

``fxqat.quantize`` (:doc:`/reference/cli`) on backend {BACKEND}, from uniform bit widths, with a budget of points:
top-1 of ResNet20 and MobileNetV2 on the images of :doc:`/evidence/accuracy_ptq`; mAP50-95 of YOLOv5n at 320 px on
those of :doc:`/evidence/accuracy_yolov5`, as functions of a Python file. One half of the test images guides the ladder,
the other half is held back and only recorded; the last *met* is about that half. The halves are small: one point of
top-1 is five images of ResNet20, and one of MobileNetV2. A recipe is
within the budget if its loss is with the *margin* for the size of the half that guides; the mAP is one number, which
has no margin. A budget that the half is too small for is refused.

* *cost*: bit operations, in those of the uniform choice the row starts from; a float tensor counts as one of 16 bits.
* *best uniform*: the best metric of all uniform choices that cost at most as much: every recipe that was tried at the
  row's widths, and wider ones where *cost* allows them.
* *s*: seconds on two CPU cores, other programs often running; those of a step include its test on both halves.

Written by ``tests/benchmarks/accuracy/ladder.py`` with torch {experiments.torch_versions(results)}; do not edit.

{table.get_string()}

{body}
"""
    arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    experiments.command_line(
        __file__, str(__doc__), "accuracy_ladder.rst", run, report, {"models": list(BITS), "drops": list(DROPS)}
    )

"""The ladder: whether ``fxqat.quantize`` meets an accuracy budget, and what each of its steps gives and takes.

DIR holds ``cifar10/`` (``resnet20_jpegft_state_dict.pt``, and ``cifar10_train_jpeg.npz`` and ``cifar10_test_jpeg.npz``:
``jpeg``, the bytes of all images; ``offsets`` of each; ``labels``), ``mobilenet_v2/`` and ``imagenet_sample/`` (see
``mobilenet_v2_imagenet.py``), ``yolov5n/`` and ``coco128/`` (see ``yolov5_coco.py``). Each row adds a line to
``results/ladder.jsonl``; those that have one are skipped. The ladder of the smaller budget is run, and the row of the
larger one is read from it: the first recipe at which that one ends.

    python tests/benchmarks/accuracy/ladder.py run --data DIR
    python tests/benchmarks/accuracy/ladder.py report
"""

from __future__ import annotations

import argparse
import io
import math
import os
import subprocess
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import experiments
import numpy as np
import ptq
import resnet20_cifar10 as resnet
import torch
from PIL import Image
from prettytable import PrettyTable
from torch import Tensor, nn

import fxqat
from fxqat.cli.load_data import load_batches, load_evaluation
from fxqat.cli.load_model import load_model
from fxqat.quantization.graph_module import QuantGraphModule
from fxqat.tools import WidthBank, bit_operations
from fxqat.tools import ptq as ptq_of
from fxqat.tools.margin import is_enough
from fxqat.tools.mixed_precision.units import find_units
from fxqat.tools.recipe import STEPS, Recipe

CALIBRATION = {"ResNet20": 256, "MobileNetV2": 64}
BITS = {"ResNet20": ((8, 8), (4, 8), (4, 4)), "MobileNetV2": ((8, 8), (4, 8)), "YOLOv5n": ((8, 8),)}
DROPS = (0.5, 1.0)
BACKEND = "Experimental"
FLOAT_BITS = 16
LEFT_OUT = {("MobileNetV2", (8, 8)): "QDrop", ("MobileNetV2", (4, 8)): "QDrop", ("ResNet20", (4, 4)): "QDrop"}
"""A method that is left out, to save time: it takes minutes for every number of wider tensors."""

Measure = Callable[[nn.Module], float | Tensor]
"""A number, or 100 or 0 for each image."""


@dataclass
class Task:
    """A float model, batches to calibrate on, and its metric in percent on two halves of the images."""

    model: nn.Module
    batches: list[Any]
    search: Measure
    held_back: Measure
    bits: tuple[int, int]
    found: list[tuple[float, float]] = field(default_factory=list)

    def evaluate(self, model: nn.Module) -> float | Tensor:
        """The metric that guides the ladder; that of the other half and the cost are only recorded."""
        _ = self.bank  # made with the float model, so that no step is charged for it
        cost = self.cost_of(model) if isinstance(model, QuantGraphModule) else math.nan
        self.found.append((mean_of(self.held_back(model)), cost))
        return self.search(model)

    @cached_property
    def bank(self) -> WidthBank:
        """The model in the widths of the row, all up to 8 bits, which the ladder tries, and what float counts as."""
        widths = [[*range(bits, 9), FLOAT_BITS] for bits in self.bits]
        return WidthBank(self.model, self.batches[:1], *widths, BACKEND)

    def cost_of(self, gm: QuantGraphModule) -> float:
        """Bit operations of a model, in those of the uniform choice."""
        cost = bit_operations(self.bank, self.batches[0])
        own = {name: unit.scheme(gm).bit_width for name, unit in find_units(gm).items()}
        uniform = {name: self.bits[not unit.is_weight] for name, unit in self.bank.units.items()}
        return cost.of({name: own.get(name, FLOAT_BITS) for name in uniform}) / cost.of(uniform)


def mean_of(found: float | Tensor) -> float:
    """The metric in percent."""
    return float(torch.as_tensor(found).mean())


def load(name: str, bits: tuple[int, int], data: Path) -> Task:
    """The task of a row."""
    if name == "YOLOv5n":  # as the command line gets it
        os.environ["FXQAT_DATA"] = str(data)
        file = f"{Path(__file__).parent / 'yolov5_functions.py'}"
        halves = [load_evaluation(f"{file}:{half}", None) for half in ("search", "held_back")]
        return Task(load_model(f"{file}:model").model, load_batches(f"{file}:batches", None), *halves, bits)
    if name == "ResNet20":
        model, batches, images, labels = load_resnet(data / "cifar10")
    else:
        task = ptq.load(name, CALIBRATION[name], data)
        model, batches, images, labels = task.model, task.batches, task.images, task.labels
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1))
    halves = [accuracy_on(images[half], labels[half]) for half in order.chunk(2)]
    return Task(model, batches, *halves, bits)


def load_resnet(folder: Path) -> tuple[nn.Module, list[Tensor], Tensor, Tensor]:
    """ResNet20 tuned on the JPEG images of CIFAR-10, batches of training images, and the test images."""
    model = resnet.ResNet20()
    model.load_state_dict(torch.load(folder / "resnet20_jpegft_state_dict.pt", weights_only=True))
    chosen = torch.randperm(50_000, generator=torch.Generator().manual_seed(0))[: CALIBRATION["ResNet20"]]
    train, _ = jpeg_images(folder / "cifar10_train_jpeg.npz", chosen.tolist())
    return model.eval(), list(train.split(32)), *jpeg_images(folder / "cifar10_test_jpeg.npz", range(10_000))


def jpeg_images(file: Path, chosen: Iterable[int]) -> tuple[Tensor, Tensor]:
    """Some images of a file, normalised, and their labels."""
    arrays = np.load(file)
    content, ends, numbers = arrays["jpeg"], arrays["offsets"], list(chosen)
    pixels = [np.asarray(Image.open(io.BytesIO(content[ends[i] : ends[i + 1]].tobytes()))) for i in numbers]
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (resnet.MEAN, resnet.STD))
    images = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).float() / 255
    return (images - mean) / std, torch.from_numpy(arrays["labels"][numbers]).long()


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


def uniform_choices(cost: float, bits: tuple[int, int]) -> list[tuple[int, int]]:
    """The wider uniform choices that cost at most as much, without those that another one exceeds."""
    found = [(w, a) for w in range(bits[0], 9) for a in range(bits[1], 9) if w * a <= cost * bits[0] * bits[1]]
    return [(w, a) for w, a in found if (w, a) != bits and (w + 1, a) not in found and (w, a + 1) not in found]


def run(arguments: argparse.Namespace) -> None:
    """Climb the ladder for the rows that have no result yet."""
    torch.set_num_threads(arguments.threads)
    for name in arguments.models:
        for bits in BITS[name]:
            results = experiments.read(arguments.results)
            if all((result["model"], result["bits"]) != (name, list(bits)) for result in results):
                for row in measured_rows(name, bits, arguments.data):
                    experiments.add(arguments.results, row | {"commit": commit()})


def commit() -> str:
    """The commit that is measured."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True).stdout.strip()


def measured_rows(name: str, bits: tuple[int, int], data: Path) -> list[dict[str, Any]]:
    """Climb the ladder of the smallest budget, read the others from it, and measure uniform choices of their costs."""
    task = load(name, bits, data)
    steps = [
        (step, [change for change in changes if change.get("reconstruct") != LEFT_OUT.get((name, bits), "")])
        for step, changes in STEPS
    ]
    result = fxqat.quantize(
        task.model, task.batches, BACKEND, task.evaluate, min(DROPS),
        steps=steps, prepare_custom_config_dict=config_of(*bits),
    )  # fmt: skip
    (held_back, _), *others = task.found
    found = iter(others)
    trials = []
    for trial in result.trials:
        known = {} if math.isnan(trial.metric) else dict(zip(("held_back", "cost"), next(found), strict=True))
        figures = {"metric": None if math.isnan(trial.metric) else trial.metric, "margin": trial.margin, **known}
        trials.append({"step": trial.step, "recipe": str(trial.recipe), "seconds": trial.seconds, **figures})
        trials[-1] |= {"note": trial.note}
    float_metric = result.float_metric
    assert float_metric is not None
    best = next(i for i, trial in enumerate(result.trials) if trial.recipe == result.recipe)
    rows = []
    for drop in DROPS:
        ends = [
            i for i, trial in enumerate(trials) if trial["metric"] is not None and is_end(trial, float_metric, drop)
        ]
        tried, taken = (len(trials), best) if drop == min(DROPS) or not ends else (ends[0] + 1, ends[0])
        row = {"model": name, "bits": bits, "drop": drop, "taken": taken, "trials": trials[:tried]}
        row |= {"float": result.float_metric, "held_back_float": held_back, "samples": result.samples}
        rows.append(row | {"worst": result.worst, "uniform": []})
    measured: dict[tuple[tuple[int, int], Recipe], tuple[float, float]] = {}
    for row in rows:
        taken = result.trials[row["taken"]].recipe
        for choice in uniform_choices(trials[row["taken"]]["cost"], bits) if taken.overrides else []:
            for recipe in dict.fromkeys([Recipe(), replace(taken, overrides=())]):
                if (choice, recipe) not in measured:
                    measured[choice, recipe] = uniform_metrics(task, choice, recipe)
                row["uniform"].append([choice, str(recipe), *measured[choice, recipe]])
    return rows


def is_end(trial: dict[str, Any], float_metric: float, drop: float) -> bool:
    """Whether a ladder ends at a trial."""
    return is_enough(float_metric - trial["metric"], trial["margin"], drop)


def uniform_metrics(task: Task, bits: tuple[int, int], recipe: Recipe) -> tuple[float, float]:
    """The metric on both halves of a uniform choice, quantized by a recipe."""
    observers = {key: value for key in ("w_observer", "a_observer") if (value := getattr(recipe, key))}
    config = {"extra_qconfig_dict": {**config_of(*bits)["extra_qconfig_dict"], **observers}}
    options = {key: getattr(recipe, key) for key in ("equalize", "correct_bias")}
    gm = ptq_of(task.model, task.batches, BACKEND, config, reconstruct=recipe.reconstruct or None, **options)
    return mean_of(task.search(gm)), mean_of(task.held_back(gm))


def best_uniform(result: dict[str, Any], results: list[dict[str, Any]]) -> float:
    """The best metric of all uniform choices of the model that were measured and cost at most as much as a result."""
    most = result["trials"][result["taken"]]["cost"]
    found = [metric for _, _, metric, _ in result["uniform"]]
    for other in (other for other in results if other["model"] == result["model"]):
        scale = math.prod(other["bits"]) / math.prod(result["bits"])
        for trial in other["trials"]:
            uniform = trial["metric"] is not None and trial["step"] != "wider tensors"
            if uniform and trial["cost"] * scale <= most + 1e-9:
                found.append(trial["metric"])
    return max(found)


def verdict(drop: float, margin: float, budget: float) -> str:
    """Whether a loss is within a budget."""
    if drop + margin <= budget:
        return "yes"
    return "without margin" if drop <= budget else "no"


def report(arguments: argparse.Namespace) -> None:
    """Write the documentation page."""
    results = experiments.read(arguments.results)
    header = ["model", "bits", "budget", "met", "recipe", "cost", "float", "quantized", "margin", "best uniform"]
    header += ["held back: float", "quantized ", "met ", "s", "commit"]
    table = PrettyTable(header, align="l", hrules=1, max_width=40)
    sections = []
    below = []
    for name, bits, drop in [(model, bits, drop) for model in BITS for bits in BITS[model] for drop in DROPS]:
        title = f"{name} W{bits[0]}A{bits[1]}, at most {drop} points"
        r = next((r for r in results if (r["model"], tuple(r["bits"]), r["drop"]) == (name, bits, drop)), None)
        words = [name, f"W{bits[0]}A{bits[1]}", drop]
        if r is None:
            table.add_row([*words, "not run", *[""] * (len(header) - 4)])
            continue
        taken, uniform = r["trials"][r["taken"]], best_uniform(r, results)
        met = verdict(r["float"] - taken["metric"], taken["margin"], drop)
        if not is_end(taken, r["float"], drop) and taken["metric"] < uniform:
            below.append(f"{title}: {taken['metric']:.2f}, and {uniform:.2f} of a uniform choice")
        figures = [f"{x:.2f}" for x in (r["float"], taken["metric"], taken["margin"], uniform)]
        figures += [f"{x:.2f}" for x in (r["held_back_float"], taken["held_back"])]
        held_back = verdict(r["held_back_float"] - taken["held_back"], 0.0, drop)
        seconds = f"{sum(trial['seconds'] for trial in r['trials']):.0f}"
        row = [*words, met, taken["recipe"], f"{taken['cost']:.2f}", *figures, held_back, seconds, r["commit"]]
        table.add_row(row)
        steps = ["step", "recipe", "cost", "metric", "margin", "held back", "s", "note"]
        tried = PrettyTable(steps, align="l", hrules=1, max_width=60)
        for i, trial in enumerate(r["trials"]):
            figures = [trial.get(key) for key in ("cost", "metric", "margin", "held_back")]
            known = ["" if trial["metric"] is None else f"{x:.2f}" for x in figures]
            note = trial["note"] or ("taken" if i == r["taken"] else "")
            tried.add_row([trial["step"], trial["recipe"], *known, f"{trial['seconds']:.0f}", note])
        for (w, a), recipe, metric, other in r["uniform"]:
            cost = w * a / math.prod(bits)
            measured = [f"{cost:.2f}", f"{metric:.2f}", "", f"{other:.2f}", "", "to compare"]
            tried.add_row(["uniform, not dearer", f"W{w}A{a}: {recipe}", *measured])
        tail = [f"Commit {r['commit']}.", *([r["steps"]] if "steps" in r else [])]
        if met != "yes":
            tail.append(f"The rounding of these tensors changes the outputs most: {', '.join(r['worst'])}.")
        lines = textwrap.fill(" ".join(tail), 120, break_long_words=False, break_on_hyphens=False)
        sections.append(f"{title}\n{'-' * len(title)}\n\n{tried.get_string()}\n\n{lines}")
    body = "\n\n".join(sections)
    lower = "\n".join(f"* {each}" for each in below) or "None."
    text = f"""Within an accuracy budget
=========================

``fxqat.quantize`` (:doc:`/reference/cli`) on backend {BACKEND}, from uniform bit widths, with a budget of points:
top-1 of ResNet20 on the 10 000 test images of CIFAR-10, and of MobileNetV2 on those of :doc:`/evidence/accuracy_ptq`;
mAP50-95 of YOLOv5n at 320 px on the images of :doc:`/evidence/accuracy_yolov5`, as functions of a Python file. One half
of the test images guides the ladder: 5000 of ResNet20, 468 of MobileNetV2, and of YOLOv5n 64, in 16 groups of the
sample, whose scores have the mAP as their mean (``jackknife_scores``). The other half is held back and only recorded.

* *met*: *yes* if the loss and its *margin* for the size of the half are within the budget together; *without margin* if
  only the loss is: the half is too small to show it. The ladder ends there too, if the loss is at most half of the
  budget. The last *met* is about the other half, without a margin.
* *cost*: bit operations, in those of the uniform choice the row starts from; a float tensor counts as one of 16 bits.
* *best uniform*: the best metric of all uniform choices of the model that were measured and cost at most as much, by
  any recipe, of the row or of another one.
* *s*: seconds on one CPU core, other programs often running; those of a step include its test on both halves.
* *commit*: of the program that was measured.

QDrop, a step of the ladder, is left out for MobileNetV2 and for ResNet20 W4A4, to save time.

Written by ``tests/benchmarks/accuracy/ladder.py`` with torch {experiments.torch_versions(results)}; do not edit.

{table.get_string()}

Not within the budget, and below a uniform choice that is not dearer:

{lower}

{body}
"""
    arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    experiments.command_line(
        __file__, str(__doc__), "accuracy_ladder.rst", run, report, {"models": list(BITS), "drops": list(DROPS)}
    )

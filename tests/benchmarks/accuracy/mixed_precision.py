"""Mixed precision of CIFAR ResNet20: widths chosen by sensitivity, against uniform and random widths of the same size.

DIR is the folder of ``resnet20_cifar10.py``. Each row adds a line to ``results/mixed_precision.jsonl``; rows that have
a line there are skipped.

    python tests/benchmarks/accuracy/mixed_precision.py run --data DIR
    python tests/benchmarks/accuracy/mixed_precision.py report
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import experiments
import resnet20_cifar10 as resnet
import torch
from prettytable import PrettyTable
from scipy.stats import spearmanr
from torch import Tensor, nn

from fxqat import convert_export
from fxqat.tools import Sensitivity, WidthBank, average_weight_bits, file_bytes, read_sensitivity, sensitivity, solve

BUDGETS = [3, 4, 5, 6]
METHODS = ["alone", "without", "hessian", "fisher"]
WIDTHS = (2, 3, 4, 5, 6, 8)
IMAGES, EPOCHS, LR, DRAWS = 256, 2, 0.005, 10
CONFIG = {
    "extra_qconfig_dict": {"w_observer": "MSE", "a_observer": "MSE", "w_qscheme": {"narrow_range": False}},
    "bn_mode": "freeze",
}


def random_widths(bank: WidthBank, budget: float, draw: random.Random) -> dict[str, int]:
    """Random widths within the budget: they are raised in a random order as long as they fit."""
    cost = average_weight_bits(bank)
    widths = {name: choice[0] for name, choice in bank.widths.items()}
    steps = [name for name, choice in bank.widths.items() for _ in choice[1:]]
    draw.shuffle(steps)
    for name in steps:
        wider = {**widths, name: next(bits for bits in bank.widths[name] if bits > widths[name])}
        if cost.of(wider) <= budget:
            widths = wider
    return widths


def finetuned(gm: nn.Module, data: resnet.Data) -> float:
    """Top-1 after training."""
    resnet.finetune(gm, data, LR, EPOCHS, seed=0)
    return resnet.accuracy(gm, data)


def run(arguments: argparse.Namespace) -> None:
    """Measure the rows that have no result yet."""
    torch.set_num_threads(arguments.threads)
    data, model = resnet.load_data(arguments.data), resnet.load_model(arguments.data)
    pick = torch.randperm(len(data.train_x), generator=torch.Generator().manual_seed(0))[:IMAGES]
    batches = data.train_x[pick].split(64)
    bank = WidthBank(model, batches, WIDTHS, (8,), "ONNXRuntime", CONFIG)
    scores = {method: scored(bank, batches, method, arguments.results) for method in arguments.methods}
    cost = average_weight_bits(bank)
    for budget in arguments.budgets:
        for kind in ("uniform", "random", *scores, "file"):
            row = {"kind": kind, "budget": budget}
            if any(result.items() >= row.items() for result in experiments.read(arguments.results)):
                continue
            if kind == "file":
                experiments.add(arguments.results, row | exported(bank, scores["alone"], budget, batches[0][:1]))
                continue
            began = time.perf_counter()
            if kind == "random":
                draws = [random_widths(bank, budget, random.Random(seed)) for seed in range(DRAWS)]
            elif kind == "uniform":
                draws = [{name: budget for name, unit in bank.units.items() if unit.is_weight}]
            else:
                draws = [dict(solve(scores[kind].scores, [(cost, budget)]).widths)]
            seconds = time.perf_counter() - began
            full = [{name: choice[-1] for name, choice in bank.widths.items()} | widths for widths in draws]
            found: dict[str, Any] = {"bits": [cost.of(widths) for widths in full], "seconds": seconds}
            found["top1"] = [resnet.accuracy(bank.mix(widths), data) for widths in full]
            if kind in ("uniform", "alone"):
                found["finetuned"] = finetuned(bank.mix(full[0]), data)
                found["widths"] = full[0]
            experiments.add(arguments.results, row | found)


def exported(bank: WidthBank, scores: Sensitivity, budget: float, example: Tensor) -> dict[str, Any]:
    """The file of the chosen widths: its size, the cost model's prediction, the types of the weights, and parity."""
    cost = file_bytes(bank, (example,))
    widths = solve(scores.scores, [(average_weight_bits(bank), budget)]).widths
    with tempfile.TemporaryDirectory() as folder:
        report = convert_export(bank.mix(widths), (example,), Path(folder) / "mixed.onnx")
        stored = [tensor.dtype for tensor in report.tensors if tensor.kind == "weight"]
        return {
            "bytes": report.onnx_path.stat().st_size,
            "predicted": cost.of(widths),
            "dtypes": {dtype: stored.count(dtype) for dtype in sorted(set(stored))},
            "off_share": report.certificate.off_share,
        }


def scored(bank: WidthBank, batches: Any, method: str, results: Path) -> Sensitivity:
    """The scores of a method; they are saved next to the results."""
    path = results.with_name(f"{results.stem}_{method}.json")
    path.parent.mkdir(exist_ok=True)
    return sensitivity(bank, batches, method, path=path, progress=True)


def report(arguments: argparse.Namespace) -> None:
    """Write the documentation page."""
    results = experiments.read(arguments.results)
    table = PrettyTable(["weights", *(f"{budget} bits" for budget in BUDGETS)], align="l", hrules=1)

    def cell(kind: str, budget: int, key: str) -> str:
        row = next((r for r in results if (r["kind"], r["budget"]) == (kind, budget)), {})
        values = row.get(key, [])
        values = values if isinstance(values, list) else [values]
        if len(values) < 2:
            return "".join(f"{value:.2f}" for value in values)
        return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"

    for kind in ("uniform", "random", *METHODS):
        table.add_row([kind, *(cell(kind, budget, "top1") for budget in BUDGETS)])
    for kind in ("uniform", "alone"):
        table.add_row([f"{kind}, {EPOCHS} epochs", *(cell(kind, budget, "finetuned") for budget in BUDGETS)])
    paths = {method: arguments.results.with_name(f"{arguments.results.stem}_{method}.json") for method in METHODS}
    known = {method: sensitivity_of(path) for method, path in paths.items() if path.exists()}
    ranks = PrettyTable(["Spearman", *known, "seconds"], align="l", hrules=1)
    for method, (losses, seconds) in known.items():
        ranks.add_row(
            [method, *(f"{spearmanr(losses, other)[0]:.2f}" for other, _ in known.values()), f"{seconds:.0f}"]
        )
    files = PrettyTable(["file", *(f"{budget} bits" for budget in BUDGETS)], align="l", hrules=1)
    of_files = [next((r for r in results if (r["kind"], r["budget"]) == ("file", budget)), None) for budget in BUDGETS]
    rows = {
        "size, kB": lambda r: f"{r['bytes'] / 1000:.1f}",
        "predicted, kB": lambda r: f"{r['predicted'] / 1000:.1f}",
        "difference": lambda r: f"{100 * (r['predicted'] / r['bytes'] - 1):+.2f} %",
        "weights by type": lambda r: ", ".join(f"{count} {dtype}" for dtype, count in r["dtypes"].items()),
        "values off by a step": lambda r: f"{100 * r['off_share']:.3f} %",
    }
    for name, text_of in rows.items():
        files.add_row([name, *("" if row is None else text_of(row) for row in of_files)])
    solved = max((r["seconds"] for r in results if r["kind"] in METHODS), default=0.0)
    text = f"""Accuracy of mixed precision
===========================

Top-1 accuracy in percent of ResNet20 (akamaster/pytorch_resnet_cifar10, float 91.64 %) with a width for each layer, on
a lossless subset of CIFAR-10 (1017 test images). The columns are the average bits of a weight. A layer's weights have
{", ".join(map(str, WIDTHS))} bits, its activations 8; calibrated on {IMAGES} training images.

* *uniform*: the same width in all layers.
* *random*: {DRAWS} random choices of the same average; mean and standard deviation.
* *{"*, *".join(METHODS)}*: the widths of least loss by the scores of this method
  (:doc:`/howto/mixed_precision`). The longest solve took {solved:.2f} s.
* *{EPOCHS} epochs*: after finetuning.

Written by ``tests/benchmarks/accuracy/mixed_precision.py`` with torch {experiments.torch_versions(results)}; do not
edit.

{table.get_string()}

The exported files of the widths by ``alone``, compared with the model in ONNX Runtime. Weights of 2 and 3 bits are
stored in 4 bits, weights of 5 and 6 bits in 8:

{files.get_string()}

How far the methods agree: Spearman's rank correlation of their scores for all widths of all layers. *seconds*: to
compute the scores on one CPU thread, with other programs running.

{ranks.get_string()}
"""
    arguments.output.write_text(text, encoding="utf-8")


def sensitivity_of(path: Path) -> tuple[list[float], float]:
    """All scores of a file in a fixed order, and the seconds they took."""
    found = read_sensitivity(path)
    weights = sorted((name, bits) for name, losses in found.scores.items() for bits in losses if len(losses) > 1)
    return [found.scores[name][bits] for name, bits in weights], found.seconds


if __name__ == "__main__":
    CHOICES = {"budgets": BUDGETS, "methods": METHODS}
    experiments.command_line(__file__, str(__doc__), "accuracy_mixed_precision.rst", run, report, CHOICES)

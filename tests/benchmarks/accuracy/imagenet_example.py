"""Accuracy that ``example/imagenet_example`` reaches on real data: CIFAR ResNet20 and MobileNetV2.

DIR holds ``cifar10/``, ``imagenet_sample/`` and ``mobilenet_v2/`` (see ``image_folders.py``). Each run adds a line to
``results/imagenet_example.jsonl``; runs that have a line there are skipped.

    python tests/benchmarks/accuracy/imagenet_example.py run --data DIR
    python tests/benchmarks/accuracy/imagenet_example.py report
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import experiments
import image_folders
import resnet20_cifar10 as resnet
import torch
import yaml
from prettytable import PrettyTable

MAIN = Path(__file__).resolve().parents[3] / "example" / "imagenet_example" / "main.py"
RESNET = f"{resnet.__file__}:ResNet20 --image-size 32 --backend ONNXRuntime -b 128"
FOUR_BITS = {
    "extra_qconfig_dict": {
        "w_observer": "MSE",
        "a_observer": "MSE",
        "w_qscheme": {"bit": 4, "narrow_range": False},
        "a_qscheme": {"bit": 4, "signed": False, "symmetry": False},
    },
    "bn_mode": "freeze",
}


@dataclass(frozen=True)
class Row:
    """One command line, without data, weights and seed.

    Args:
        name: in the table.
        tree: the images: the name of a function of ``image_folders``.
        flags: as on the command line.
        config: for ``--quant-config``.
        seeds: the number of runs.
        target: what finetuning should reach, in words.
    """

    name: str
    tree: str
    flags: str
    config: dict[str, Any] = field(default_factory=lambda: {"bn_mode": "freeze"})
    seeds: int = 3
    target: str = ""


FOUR_EPOCHS = f"-a {RESNET} --epochs 4 --lr 2e-3"
ROWS = (
    Row("ResNet20, W8A8", "cifar10", f"-a {RESNET} --epochs 1 --lr 1e-4", target="float - 0.1"),
    Row("ResNet20, W4A4", "cifar10", FOUR_EPOCHS, FOUR_BITS),
    Row(
        *("ResNet20, W4A4, distilled", "cifar10", f"{FOUR_EPOCHS} --distill-method logits --temperature 4", FOUR_BITS),
        target="the row above",
    ),
    Row(
        *("MobileNetV2, W8A8, distilled", "imagenet_sample"),
        "-a mobilenet_v2 -b 16 --epochs 2 --optim adam --lr 1e-5 --wd 1e-5 --distill-method logits",
        seeds=1,
        target="calibrated",
    ),
)
COLUMNS = ("float", "fake-quant, calibrated", "fake-quant, finetuned", "ONNX Runtime int8")


def weights_of(tree: str, data: Path, folder: Path) -> Path:
    """The file for ``--model-path``."""
    if tree == "imagenet_sample":
        (path,) = (data / "mobilenet_v2").glob("*.pt")
        return path
    torch.save(resnet.load_model(data / "cifar10").state_dict(), folder / "resnet20.pth")
    return folder / "resnet20.pth"


def table_of(printed: str) -> dict[str, float]:
    """Top-1 of each row of the table that the example prints."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in printed.splitlines() if line[:1] == "|"]
    return {row[0]: float(row[1]) for row in rows if row[0] in COLUMNS}


def run(arguments: argparse.Namespace) -> None:
    """Measure the rows and seeds that have no result yet."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for row in ROWS:
            for seed in range(row.seeds):
                what = {"row": row.name, "flags": row.flags.replace(f"{resnet.__file__}:", ""), "seed": seed}
                known = any(what.items() <= result.items() for result in experiments.read(arguments.results))
                if known or row.name not in arguments.rows:
                    continue
                tree = folder / row.tree
                if not tree.exists():
                    getattr(image_folders, row.tree)(arguments.data, tree)
                (folder / "quant.yaml").write_text(yaml.safe_dump(row.config))
                command = [sys.executable, str(MAIN), *row.flags.split(), "--data", str(tree), "--seed", str(seed)]
                command += ["--model-path", str(weights_of(row.tree, arguments.data, folder)), "-j", "0"]
                command += ["--quant-config", str(folder / "quant.yaml"), "--output-dir", str(folder / "out")]
                start = time.perf_counter()
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
                seconds = {"seconds": time.perf_counter() - start}
                experiments.add(arguments.results, what | table_of(done.stdout) | seconds)


def report(arguments: argparse.Namespace) -> None:
    """Write the documentation page."""
    results = experiments.read(arguments.results)
    table = PrettyTable(["model", *COLUMNS, "target of finetuning", "runs", "s"], align="l", hrules=1)
    for row in ROWS:
        runs = [result for result in results if result["row"] == row.name]
        cells = []
        for column in (*COLUMNS, "seconds"):
            values = [result[column] for result in runs]
            deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 and column != "seconds" else ""
            cells.append(f"{statistics.mean(values):.{0 if column == 'seconds' else 2}f}{deviation}" if values else "")
        table.add_row([row.name, *cells[:-1], row.target, len(runs), cells[-1]])
    flags = "\n".join(f"* {row.name}: ``{row.flags.replace(f'{resnet.__file__}:', '')}``" for row in ROWS)
    text = f"""Accuracy of the ImageNet example
================================

Top-1 accuracy in percent, as ``example/imagenet_example/main.py`` prints it (:doc:`/recipes/imagenet`): of the float
model, of the fake-quant model after calibration and after finetuning, and of the exported file in ONNX Runtime. Rows of
several runs show the mean and the standard deviation over the random seeds 0, 1, 2.

* ResNet20 (akamaster/pytorch_resnet_cifar10): a lossless subset of CIFAR-10, 8068 training and 1017 test images.
* MobileNetV2 (torchvision): one photo of each ImageNet class, 800 for training and 200 for testing.

BatchNorm uses the statistics of the float model. In the rows W4A4 all layers have 4 bits, and the observers choose the
range of least squared error. *s*: seconds of a whole run on one CPU core, with other programs running.

Written by ``tests/benchmarks/accuracy/imagenet_example.py`` with torch {experiments.torch_versions(results)}; do not
edit.

{table.get_string()}

The flags of each row, besides ``--data``, ``--model-path`` and ``--seed``:

{flags}
"""
    arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    CHOICES = {"rows": [row.name for row in ROWS]}
    experiments.command_line(__file__, str(__doc__), "accuracy_imagenet_example.rst", run, report, CHOICES)

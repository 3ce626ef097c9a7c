"""Accuracy after quantization without training, by method and width: CIFAR ResNet20 and MobileNetV2.

DIR holds ``cifar10/`` (see ``resnet20_cifar10.py``), ``mobilenet_v2/`` and ``imagenet_sample/`` (see
``mobilenet_v2_imagenet.py``). Each row adds a line to ``results/ptq.jsonl``; rows that have a line there are skipped.

    python tests/benchmarks/accuracy/ptq.py run --data DIR
    python tests/benchmarks/accuracy/ptq.py report
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import experiments
import mobilenet_v2_imagenet as mobilenet
import resnet20_cifar10 as resnet
import torch
from prettytable import PrettyTable
from torch import Tensor, nn
from tqdm import tqdm

from fxqat.tools import Reconstruction, ptq
from fxqat.tools.post_training.reconstruct import METHODS

LEARNED = [name for name, setting in METHODS.items() if setting.iterations]
IMAGES = {"ResNet20": 256, "MobileNetV2": 64}


@dataclass(frozen=True)
class Row:
    """One way to quantize one model.

    Args:
        model: ``"ResNet20"`` or ``"MobileNetV2"``.
        backend: a backend.
        weight_bits: bit width of weights.
        activation_bits: bit width of activations.
        observer: of weights and of activations below 8 bits; empty: the backend's.
        method: of reconstruction; empty: calibration alone.
        equalize: equalize across layers before calibration.
        correct_bias: correct the bias of every layer.
        target: the top-1 that the row should reach; 0 if there is none.
        images: for calibration and learning.
        mirrored: use the mirror image of each of them too.
        iterations: of the reconstruction, for each segment.
        after_gptq: the method starts from the weights that GPTQ finds.
    """

    model: str
    backend: str
    weight_bits: int
    activation_bits: int
    observer: str = ""
    method: str = ""
    equalize: bool = False
    correct_bias: bool = False
    target: float = 0.0
    images: int = 0
    iterations: int = 0
    mirrored: bool = False
    after_gptq: bool = False

    def __post_init__(self) -> None:
        """Set the numbers that most rows share."""
        object.__setattr__(self, "images", self.images or IMAGES[self.model])
        object.__setattr__(self, "iterations", (self.iterations or 200) if self.method in LEARNED else 0)

    def reconstruction(self) -> Reconstruction | None:
        """The setting of its method."""
        if not self.method:
            return None
        setting = METHODS[self.method]
        return replace(setting, iterations=self.iterations, gptq=setting.gptq or self.after_gptq)

    def config(self) -> dict[str, Any]:
        """The ``prepare_custom_config_dict``."""
        qconfig: dict[str, Any] = {"w_qscheme": {"bit": self.weight_bits}, "a_qscheme": {"bit": self.activation_bits}}
        if self.weight_bits < 8:
            qconfig["w_qscheme"]["narrow_range"] = False
        if self.activation_bits < 8:
            qconfig["a_qscheme"] |= {"signed": False, "symmetry": False}
        if self.observer and self.weight_bits < 8:
            qconfig["w_observer"] = self.observer
        if self.observer and self.activation_bits < 8:
            qconfig["a_observer"] = self.observer
        return {"extra_qconfig_dict": qconfig}


def row_of(result: dict[str, Any]) -> Row:
    """The row of a result."""
    return Row(**result["row"])


MANY: dict[str, Any] = {"images": 256, "mirrored": True}
ROWS = (
    Row("ResNet20", "ONNXRuntime", 4, 8, "MinMax"),
    Row("ResNet20", "ONNXRuntime", 4, 8, "MSE"),
    Row("ResNet20", "ONNXRuntime", 4, 8, "MSE", "GPTQ", correct_bias=True),
    Row("ResNet20", "ONNXRuntime", 4, 8, "MSE", "QDrop", target=91.0),
    Row("ResNet20", "ONNXRuntime", 4, 4, "MinMax"),
    Row("ResNet20", "ONNXRuntime", 4, 4, "MSE"),
    Row("ResNet20", "ONNXRuntime", 4, 4, "MSE", "GPTQ", correct_bias=True),
    Row("ResNet20", "ONNXRuntime", 4, 4, "MSE", "AdaRound"),
    Row("ResNet20", "ONNXRuntime", 4, 4, "MSE", "BRECQ"),
    Row("ResNet20", "ONNXRuntime", 4, 4, "MSE", "QDrop", target=86.0),
    Row("ResNet20", "ONNXRuntime", 4, 4, "MSE", "QDrop", target=86.0, after_gptq=True),
    Row("ResNet20", "ONNXRuntime", 2, 4, "MSE", "GPTQ", correct_bias=True),
    Row("ResNet20", "ONNXRuntime", 2, 4, "MSE", "QDrop"),
    Row("ResNet20", "ONNXRuntime", 2, 4, "MSE", "QDrop", after_gptq=True),
    Row("MobileNetV2", "ONNXRuntime", 8, 8, target=86.5),
    Row("MobileNetV2", "ONNXRuntime", 4, 8, "MinMax"),
    Row("MobileNetV2", "ONNXRuntime", 4, 8, "MSE"),
    Row("MobileNetV2", "ONNXRuntime", 4, 8, "MSE", "GPTQ", correct_bias=True),
    Row("MobileNetV2", "ONNXRuntime", 4, 8, "MSE", "GPTQ", correct_bias=True, target=83.0, **MANY),
    Row("MobileNetV2", "ONNXRuntime", 4, 8, "MSE", "QDrop", target=83.0),
    Row("MobileNetV2", "ONNXRuntime", 4, 8, "MSE", "QDrop", correct_bias=True, target=83.0, **MANY),
    Row("MobileNetV2", "ONNXRuntime", 4, 8, "MSE", "QDrop", correct_bias=True, target=83.0, **MANY, after_gptq=True),
    Row("MobileNetV2", "Vitis", 8, 8),
    Row("MobileNetV2", "Vitis", 8, 8, correct_bias=True),
    Row("MobileNetV2", "Vitis", 8, 8, equalize=True),
    Row("MobileNetV2", "Vitis", 8, 8, equalize=True, correct_bias=True),
    Row("MobileNetV2", "Vitis", 8, 8, equalize=True, correct_bias=True, **MANY),
    Row("MobileNetV2", "Vitis", 8, 8, "", "GPTQ", equalize=True, correct_bias=True, target=85.5, **MANY),
    Row(
        *("MobileNetV2", "Vitis", 8, 8, "", "QDrop"),
        equalize=True,
        correct_bias=True,
        target=85.5,
        **MANY,
    ),
)


@dataclass
class Task:
    """A float model, batches to calibrate on, and images to evaluate on."""

    model: nn.Module
    batches: list[Tensor]
    images: Tensor
    labels: Tensor

    @torch.no_grad()
    def accuracy(self, model: nn.Module) -> float:
        """Top-1 in percent."""
        found = torch.cat([model(x).argmax(1) for x in tqdm(self.images.split(50), leave=False)])
        return 100 * float((found == self.labels).float().mean())


def load(name: str, count: int, folder: Path) -> Task:
    """The model of a row with its data: images of CIFAR-10 in batches of 32, or photos in batches of 8."""
    generator = torch.Generator().manual_seed(0)
    if name == "ResNet20":
        data = resnet.load_data(folder / "cifar10")
        pick = torch.randperm(len(data.train_x), generator=generator)[:count]
        return Task(resnet.load_model(folder / "cifar10"), list(data.train_x[pick].split(32)), data.test_x, data.test_y)
    images, labels = mobilenet.load_data(folder)
    order = torch.randperm(len(images), generator=generator)
    rest = order[count:]
    return Task(mobilenet.load_model(folder), list(images[order[:count]].split(8)), images[rest], labels[rest])


def run(arguments: argparse.Namespace) -> None:
    """Measure the rows that have no result yet."""
    torch.set_num_threads(arguments.threads)
    results = experiments.read(arguments.results)
    tasks: dict[tuple[str, int], Task] = {}
    for row in ROWS:
        known = any(row_of(result) == row for result in results)
        if known or row.model not in arguments.models or row.backend not in arguments.backends:
            continue
        which = row.model, row.images
        if which not in tasks:
            tasks[which] = load(*which, arguments.data)
        task = tasks[which]
        start = time.process_time()
        options = {"equalize": row.equalize, "reconstruct": row.reconstruction(), "correct_bias": row.correct_bias}
        batches = [view for x in task.batches for view in ((x, x.flip(-1)) if row.mirrored else (x,))]
        gm = ptq(task.model, batches, resnet.without_limits(row.backend), row.config(), **options, progress=True)
        seconds = time.process_time() - start
        top1 = {"float": task.accuracy(task.model), "top1": task.accuracy(gm)}
        experiments.add(arguments.results, {"row": asdict(row), **top1, "seconds": seconds})


def report(arguments: argparse.Namespace) -> None:
    """Write the documentation page."""
    results = experiments.read(arguments.results)
    header = ["model", "backend", "bits", "weight ranges", "steps", "float", "top-1", "target", "images", "iterations"]
    table = PrettyTable([*header, "s"], align="l", hrules=1)
    for result in sorted(results, key=lambda result: ROWS.index(row_of(result))):
        row = row_of(result)
        bits = f"W{row.weight_bits}A{row.activation_bits}"
        images = f"{row.images} x 2" if row.mirrored else row.images
        figures = [f"{result['float']:.2f}", f"{result['top1']:.2f}", row.target or "", images]
        figures += [row.iterations or "", f"{result['seconds']:.0f}"]
        flags = {
            "equalized": row.equalize,
            "GPTQ": row.after_gptq,
            row.method: row.method,
            "bias corrected": row.correct_bias,
        }
        steps = ", ".join(step for step, done in flags.items() if done)
        table.add_row([row.model, row.backend, bits, row.observer or "backend's", steps, *figures])
    text = f"""Accuracy without training
=========================

Top-1 accuracy in percent after ``fxqat.tools.ptq`` (:doc:`/howto/ptq`), which needs no labels. Every layer has the
widths in the column *bits*.

* ResNet20 (akamaster/pytorch_resnet_cifar10): images of CIFAR-10 in batches of 32, tested on 1017 others.
* MobileNetV2 (google-coral/test_data): ImageNet photos (EliSchwartz/imagenet-sample-images) in batches of 8, tested on
  the rest of the 1000.

*weight ranges*: the observer of the weights; *steps*: besides calibration; *target*: what top-1 should reach;
*images*: for calibration and learning, *256 x 2* with the mirror image of each; *iterations*: for each segment; *s*:
CPU seconds to quantize.

Written by ``tests/benchmarks/accuracy/ptq.py`` with torch {experiments.torch_versions(results)}; do not edit.

{table.get_string()}
"""
    arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    CHOICES = {name: list(dict.fromkeys(getattr(row, name[:-1]) for row in ROWS)) for name in ("models", "backends")}
    experiments.command_line(__file__, str(__doc__), "accuracy_ptq.rst", run, report, CHOICES)

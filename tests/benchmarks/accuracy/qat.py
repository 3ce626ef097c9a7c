"""Accuracy of CIFAR ResNet20 after training at few bits, by method and width, over random seeds.

DIR is the folder of ``resnet20_cifar10.py``. Each run adds a line to ``results/qat.jsonl``; runs that have a line there
are skipped, so several processes can share the work (each with other ``--seeds``).

    python tests/benchmarks/accuracy/qat.py run --data DIR
    python tests/benchmarks/accuracy/qat.py report
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import experiments
import resnet20_cifar10 as resnet
import torch
from prettytable import PrettyTable
from torch import Tensor, nn
from torch.nn import functional as F

from fxqat.fake_quantize import oscillation
from fxqat.tools import ptq
from fxqat.tools.post_training.reconstruct import METHODS as RECONSTRUCTIONS
from fxqat.tools.training.dampening import dampening_loss


@dataclass(frozen=True)
class Width:
    """Bit widths of weights and activations.

    Args:
        weight: bits of weights.
        activation: bits of activations.
        ends_at_8: the first and the last layer, and the input, have 8 bits.
        target: the top-1 that the best method should reach; 0 if there is none.
        target_gain: by how much the best method should exceed LSQ.
        bn_mode: 126 (of 252 steps with the statistics of the batch) where the float model's statistics do not fit.
            After QDrop they do.
    """

    weight: int
    activation: int
    ends_at_8: bool
    target: float = 0.0
    target_gain: float = 0.0
    bn_mode: str | int = "freeze"

    def config(self, method: Method) -> dict[str, Any]:
        """The ``prepare_custom_config_dict``."""
        config: dict[str, Any] = {
            "extra_qconfig_dict": {
                "w_observer": "MSE",
                "a_observer": "MSE",
                "w_fakequantize": method.weight,
                "a_fakequantize": method.activation,
                "w_qscheme": {"bit": self.weight, "narrow_range": False, **method.scheme()},
                "a_qscheme": {"bit": self.activation, "signed": False, "symmetry": False, **method.scheme()},
            },
            "bn_mode": "freeze" if method.reconstruct else self.bn_mode,
        }
        if self.ends_at_8:
            config["first_last"] = {"weight": {"bit": 8}}
            config["first"] = {"activation": {"bit": 8, "fake_quantize": "Fixed"}}
            config["last"] = {"activation": {"bit": 8}}
        return config


WIDTHS = {
    "W4A4": Width(4, 4, ends_at_8=False, target=89.3),
    "W4A4, ends at 8": Width(4, 4, ends_at_8=True, target=91.1),
    "W3A3, ends at 8": Width(3, 3, ends_at_8=True, target_gain=1.0, bn_mode=126),
    "W2A4, ends at 8": Width(2, 4, ends_at_8=True, target_gain=1.0, bn_mode=126),
}


@dataclass(frozen=True)
class Method:
    """A way to train.

    Args:
        weight: the fake-quant of weights.
        activation: the fake-quant of activations.
        power_of_two: whether scales are powers of two.
        reconstruct: start from QDrop.
        distill: the loss is the divergence from the float model's softened probabilities, without labels, on mixtures
            of two images.
        extra_loss: added to the loss; a function of the model and of the progress of training, 0 to 1.
        lr: the learning rate at the start.
    """

    weight: str = "LSQ"
    activation: str = "LSQ"
    power_of_two: bool = False
    reconstruct: bool = False
    distill: bool = False
    extra_loss: Callable[[nn.Module, float], Tensor] | None = None
    lr: float = 0.01

    def scheme(self) -> dict[str, bool]:
        """Changes of the backend's scheme."""
        return {"pot_scale": True} if self.power_of_two else {}


def freeze_oscillations(gm: nn.Module, progress: float) -> Tensor:
    """Nagel et al. 2022, section 4.3: the threshold falls along a cosine, here from 0.05 to 0.01."""
    oscillation.set_freeze_threshold(gm, 0.01 + 0.02 * (1 + float(torch.cos(torch.tensor(torch.pi * progress)))))
    return torch.zeros(())


def dampen(gm: nn.Module, progress: float) -> Tensor:
    """Nagel et al. 2022, section 4.2: the coefficient grows along a cosine, here to 1e-3."""
    return 0.5e-3 * (1 - float(torch.cos(torch.tensor(torch.pi * progress)))) * dampening_loss(gm)


PLAIN, BEST = "LSQ", "QDrop, then LSQ, distilled"
METHODS = {
    PLAIN: Method(),
    "DoReFa, PACT": Method("DoReFa", "PACT"),
    "DSQ": Method("DSQ", "DSQ"),
    "EWGS": Method("EWGS", "EWGS"),
    "TQT": Method("TQT", "TQT", power_of_two=True),
    "LSQ, dampening": Method(extra_loss=dampen),
    "LSQ, freezing": Method("Oscillation", extra_loss=freeze_oscillations),
    "QDrop, then LSQ": Method(reconstruct=True, lr=0.003),
    "LSQ, distilled": Method(distill=True, lr=2e-3),
    BEST: Method(reconstruct=True, distill=True, lr=5e-4),
}
CALIBRATION_IMAGES = 256
RECONSTRUCTION_IMAGES, ITERATIONS = 1024, 1000
EPOCHS = 4
TEMPERATURE = 4.0


def prepared(model: nn.Module, width: Width, method: Method, data: resnet.Data, seed: int) -> nn.Module:
    """The model before training, calibrated (and reconstructed) on a draw of training images."""
    count = RECONSTRUCTION_IMAGES if method.reconstruct else CALIBRATION_IMAGES
    pick = torch.randperm(len(data.train_x), generator=torch.Generator().manual_seed(seed))[:count]
    reconstruction = replace(RECONSTRUCTIONS["QDrop"], iterations=ITERATIONS) if method.reconstruct else None
    backend, batches = resnet.without_limits("ONNXRuntime"), data.train_x[pick].split(32)
    return ptq(model, batches, backend, width.config(method), reconstruct=reconstruction)


def train(gm: nn.Module, teacher: nn.Module, method: Method, data: resnet.Data, seed: int) -> None:
    """Train with the loss of a method."""
    torch.manual_seed(seed)

    def loss_of(x: Tensor, labels: Tensor, generator: torch.Generator, progress: float) -> Tensor:
        if method.distill:
            x = torch.lerp(x, x.roll(1, 0), torch.rand(len(x), 1, 1, 1, generator=generator))
            with torch.no_grad():
                expected = F.log_softmax(teacher(x) / TEMPERATURE, 1)
            found = F.log_softmax(gm(x) / TEMPERATURE, 1)
            loss = F.kl_div(found, expected, log_target=True, reduction="batchmean") * TEMPERATURE**2
        else:
            loss = F.cross_entropy(gm(x), labels)
        return loss if method.extra_loss is None else loss + method.extra_loss(gm, progress)

    resnet.finetune(gm, data, method.lr, EPOCHS, seed, loss_of)


def run(arguments: argparse.Namespace) -> None:
    """Measure what has no result yet."""
    torch.set_num_threads(arguments.threads)
    data, model = resnet.load_data(arguments.data), resnet.load_model(arguments.data)
    for width_name in arguments.widths:
        for method_name in arguments.methods:
            for seed in arguments.seeds:
                what = {"width": width_name, "method": method_name, "seed": seed, "epochs": EPOCHS}
                if any(what.items() <= result.items() for result in experiments.read(arguments.results)):
                    continue
                method = METHODS[method_name]
                start = time.perf_counter()
                gm = prepared(model, WIDTHS[width_name], method, data, seed)
                before = resnet.accuracy(gm, data)
                middle = time.perf_counter()
                train(gm, model, method, data, seed)
                seconds = {"seconds_before": middle - start, "seconds": time.perf_counter() - middle}
                found = {"before": before, "top1": resnet.accuracy(gm, data), **seconds}
                experiments.add(arguments.results, what | found)


def spread(values: list[float]) -> str:
    """Mean and standard deviation, and the count if it is not 3."""
    if not values:
        return ""
    deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{deviation}" + (f" (of {len(values)})" if len(values) != 3 else "")


def report(arguments: argparse.Namespace) -> None:
    """Write the documentation page."""
    results = experiments.read(arguments.results)
    table = PrettyTable(["method", *WIDTHS], align="l", hrules=1)

    def cells(method: str, part: str) -> list[str]:
        found = [[r[part] for r in results if (r["width"], r["method"]) == (width, method)] for width in WIDTHS]
        return [spread(values) for values in found]

    measured = [method for method in METHODS if any(cells(method, "top1"))]
    for method in measured:
        table.add_row([method, *cells(method, "top1")])
    for method, start in ((PLAIN, "ranges of least squared error"), (BEST, "QDrop")):
        table.add_row([f"before training: {start}", *cells(method, "before")])
    rates = ", ".join(f"{METHODS[method].lr:g} ({method})" for method in measured)
    targets = [f"{w.target}" if w.target else f"LSQ + {w.target_gain}" for w in WIDTHS.values()]
    table.add_row(["target of the best", *targets])
    text = f"""Accuracy of CIFAR ResNet20 at few bits
======================================

Top-1 accuracy in percent of ResNet20 (akamaster/pytorch_resnet_cifar10, float 91.64 %) after quantization-aware
training, by method (rows) and bits of weights and activations (columns): mean and standard deviation of 3 random seeds,
which change the calibration images and the order of the training images. *ends at 8*: weights and inputs of the first
and the last layer have 8 bits.

* Data: a lossless subset of CIFAR-10, 8068 training and 1017 test images.
* Backend ONNXRuntime; the observers choose the range of least squared error, on {CALIBRATION_IMAGES} training images
  (with QDrop on {RECONSTRUCTION_IMAGES}).
* Training: {EPOCHS} epochs, batch 128, SGD with momentum 0.9, weight decay 1e-4, cosine schedule, crop and flip. First
  learning rates: {rates}.
* BatchNorm uses the statistics of the float model at 4 bits and after QDrop, else those of the batch in the first half
  of training.

Written by ``tests/benchmarks/accuracy/qat.py`` with torch {experiments.torch_versions(results)}; do not edit.

{table.get_string()}

*distilled*: the loss is the divergence from the float model's probabilities at temperature {TEMPERATURE:g}, without
labels, on mixtures of two images each (Beyer et al. 2022, arXiv:2106.05237). *QDrop*: {ITERATIONS} iterations for each
block (:doc:`/howto/ptq`).
"""
    arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    CHOICES = {"widths": list(WIDTHS), "methods": list(METHODS), "seeds": [0, 1, 2]}
    experiments.command_line(__file__, str(__doc__), "accuracy_qat.rst", run, report, CHOICES)

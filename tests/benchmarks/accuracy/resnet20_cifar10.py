"""Accuracy of CIFAR ResNet20 at several widths, after calibration and after training; ONNX Runtime on the 8-bit file.

DIR holds ``resnet20-12fca82f.th`` (akamaster/pytorch_resnet_cifar10) and ``cifar10_lossless_subset.npz`` (train_x,
train_y, test_x, test_y; uint8 images).

    python tests/benchmarks/accuracy/resnet20_cifar10.py --data DIR --output docs/evidence/accuracy_resnet20.rst
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from prettytable import PrettyTable
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

import fxqat
from fxqat.custom_quantizer.backend_type import backend_spec
from fxqat.custom_quantizer.spec import BackendSpec

Loss = Callable[[Tensor, Tensor, torch.Generator, float], Tensor]
"""The loss of augmented images and their labels; it may draw from the generator, and reads the progress, 0 to 1."""

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
DRAWS = 4
EIGHT_AT_THE_ENDS = [
    {"match": {"node": name}, "weight": {"bit": 8}, "activation": {"bit": 8}} for name in ("conv1", "linear")
]


class Block(nn.Module):
    """Basic block with a shortcut without parameters: every second pixel, and zero channels on both sides."""

    def __init__(self, planes_in: int, planes: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(planes_in, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsamples = stride != 1 or planes_in != planes
        self.pad = (planes - planes_in) // 2

    def forward(self, x: Tensor) -> Tensor:
        """Residual of two convolutions."""
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.downsamples:
            x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.pad, self.pad))
        return F.relu(y + x)


class ResNet20(nn.Module):
    """He et al. 2016 (arXiv:1512.03385), section 4.2."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(Block(16, 16, 1), Block(16, 16, 1), Block(16, 16, 1))
        self.layer2 = nn.Sequential(Block(16, 32, 2), Block(32, 32, 1), Block(32, 32, 1))
        self.layer3 = nn.Sequential(Block(32, 64, 2), Block(64, 64, 1), Block(64, 64, 1))
        self.linear = nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of (n, 3, 32, 32) images."""
        x = self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x))))))
        return self.linear(F.adaptive_avg_pool2d(x, 1).flatten(1))


@dataclass(frozen=True)
class Setting:
    """One row: widths and finetuning.

    Below 8 bits, ranges are chosen by least error, and activations are unsigned because most come from a ReLU.
    """

    name: str
    backend: str
    weight_bits: int
    activation_bits: int
    lr: float
    bn_mode: str | int = "freeze"
    overrides: list[dict[str, Any]] = field(default_factory=list)

    def config(self) -> dict[str, Any]:
        """The ``prepare_custom_config_dict``."""
        qconfig: dict[str, Any] = {"w_qscheme": {"bit": self.weight_bits}, "a_qscheme": {"bit": self.activation_bits}}
        if self.weight_bits < 8:
            qconfig["w_observer"] = "MSE"
            qconfig["w_qscheme"]["narrow_range"] = False
        if self.activation_bits < 8:
            qconfig["a_observer"] = "MSE"
            qconfig["a_qscheme"] |= {"signed": False, "symmetry": False}
        return {"extra_qconfig_dict": qconfig, "bn_mode": self.bn_mode, "overrides": self.overrides}


SETTINGS = (
    Setting("W8A8", "TSQAT", 8, 8, 0.002),
    Setting("W8A8", "ONNXRuntime", 8, 8, 0.0005),
    Setting("W4A8", "TSQAT", 4, 8, 0.002),
    Setting("W4A8", "ONNXRuntime", 4, 8, 0.002),
    Setting("W4A4", "ONNXRuntime", 4, 4, 0.01, 126),
    Setting("W4A4, ends at 8", "ONNXRuntime", 4, 4, 0.01, overrides=EIGHT_AT_THE_ENDS),
    Setting("W4A4", "TensorRT", 4, 4, 0.01),
    Setting("W4A4, ends at 8", "TensorRT", 4, 4, 0.01, overrides=EIGHT_AT_THE_ENDS),
)


@dataclass
class Data:
    """Normalised images and labels."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


def without_limits(backend: str) -> BackendSpec:
    """The table of a backend for any bit width: narrow activations run nowhere, but their accuracy is of interest."""
    return replace(backend_spec(backend), legal_weights=(), legal_activations=())


def load_data(folder: Path) -> Data:
    """The lossless subset."""
    arrays = np.load(folder / "cifar10_lossless_subset.npz")
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (MEAN, STD))
    train_x, test_x = ((torch.from_numpy(arrays[f"{part}_x"]).float() / 255 - mean) / std for part in ("train", "test"))
    train_y, test_y = (torch.from_numpy(arrays[f"{part}_y"]).long() for part in ("train", "test"))
    return Data(train_x, train_y, test_x, test_y)


def load_model(folder: Path) -> nn.Module:
    """The trained float model."""
    state = torch.load(folder / "resnet20-12fca82f.th", map_location="cpu", weights_only=True)["state_dict"]
    model = ResNet20()
    model.load_state_dict({name.removeprefix("module."): tensor for name, tensor in state.items()})
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, data: Data) -> float:
    """Top-1 in percent."""
    model.eval()
    hits = sum(
        int((model(x).argmax(1) == y).sum())
        for x, y in zip(data.test_x.split(256), data.test_y.split(256), strict=True)
    )
    return 100 * hits / len(data.test_y)


def calibrated(model: nn.Module, setting: Setting, data: Data, draw: int = 0) -> nn.Module:
    """Prepared and calibrated on a draw of 512 training images, quantization on."""
    gm = fxqat.prepare_by_platform(model, without_limits(setting.backend), setting.config())
    generator = torch.Generator().manual_seed(draw)
    pick = torch.randperm(len(data.train_x), generator=generator)[:512]
    fxqat.calibrate(gm, data.train_x[pick].split(128))
    fxqat.enable_quantization(gm)
    return gm


def augment(x: Tensor, generator: torch.Generator) -> Tensor:
    """A random crop of the image padded by 4, and a random flip, different for each image."""
    n = len(x)
    padded = F.pad(x, (4, 4, 4, 4))
    dy, dx = torch.randint(0, 9, (2, n, 1, 1, 1), generator=generator)
    flip = torch.rand(n, 1, 1, 1, generator=generator) < 0.5
    rows = (torch.arange(32).view(1, 1, 32, 1) + dy).expand(n, 3, 32, 40)
    columns = torch.arange(32).view(1, 1, 1, 32)
    columns = (torch.where(flip, 31 - columns, columns) + dx).expand(n, 3, 32, 32)
    return padded.gather(2, rows).gather(3, columns)


def finetune(gm: nn.Module, data: Data, lr: float, epochs: int, seed: int, loss_of: Loss | None = None) -> None:
    """Train with SGD: batch 128, momentum 0.9, weight decay 1e-4, cosine schedule. Default loss: cross entropy."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(gm.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)
    steps = epochs * (len(data.train_x) // 128)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    gm.train()
    with tqdm(total=steps, leave=False) as bar:
        for _ in range(epochs):
            order = torch.randperm(len(data.train_x), generator=generator)
            for pick in order[: len(order) // 128 * 128].split(128):
                x, labels = augment(data.train_x[pick], generator), data.train_y[pick]
                if loss_of is None:
                    loss = F.cross_entropy(gm(x), labels)
                else:
                    loss = loss_of(x, labels, generator, bar.n / steps)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                bar.update()


def agreement(gm: nn.Module, data: Data) -> tuple[int, int]:
    """The number of test images for which the exported file predicts the model's class, and that of all test images.

    The file runs in ONNX Runtime with optimizations off.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "resnet20.onnx"
        fxqat.convert_export(gm, (data.test_x[:2],), path, dynamic_batch=True)
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        name = session.get_inputs()[0].name
        same = 0
        gm.eval()
        for x in data.test_x.split(256):
            with torch.no_grad():
                expected = gm(x).argmax(1)
            same += int((torch.from_numpy(session.run(None, {name: x.numpy()})[0]).argmax(1) == expected).sum())
    return same, len(data.test_x)


def main() -> None:
    """Measure, print the table, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--only", nargs="*", type=int, default=list(range(len(SETTINGS))), help="rows to run")
    parser.add_argument("--lr", type=float, nargs="*", help="learning rates to use instead of each row's own")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    data, model = load_data(arguments.data), load_model(arguments.data)
    baseline = accuracy(model, data)
    table = PrettyTable(["setting", "backend", "PTQ", "QAT", "lr", "bn_mode", "same class in ONNX Runtime"], align="l")
    table.add_row(["float", "", "", f"{baseline:.2f}", "", "", ""])
    for index in arguments.only:
        setting = SETTINGS[index]
        ptq = calibrated(model, setting, data)
        draws = [accuracy(ptq, data)] + [accuracy(calibrated(model, setting, data, n), data) for n in range(1, DRAWS)]
        before = f"{sum(draws) / DRAWS:.2f} ({min(draws):.2f})"
        for lr in arguments.lr or [setting.lr]:
            torch.manual_seed(0)
            gm = copy.deepcopy(ptq)
            finetune(gm, data, lr, arguments.epochs, seed=1)
            after = accuracy(gm, data)
            same = "{} of {}".format(*agreement(gm, data)) if setting.weight_bits == 8 else ""
            table.add_row([setting.name, setting.backend, before, f"{after:.2f}", lr, setting.bn_mode, same])
            tqdm.write(str(table))
    if arguments.output:
        arguments.output.write_text(page(table, arguments.epochs), encoding="utf-8")


def page(table: PrettyTable, epochs: int) -> str:
    """The documentation page."""
    table.hrules = 1
    return f"""Accuracy of CIFAR ResNet20
==========================

Top-1 accuracy in percent of ResNet20 (akamaster/pytorch_resnet_cifar10) on a lossless subset of CIFAR-10, 8068 training
and 1017 test images.

* *PTQ*: after calibration on 512 training images: mean of {DRAWS} random choices of them, and the worst in brackets.
* *QAT*: after training that starts from the first choice: {epochs} epochs, batch 128, SGD with momentum 0.9, weight
  decay 1e-4, cosine schedule, crop and flip. *lr*: the first learning rate.
* *bn_mode*: BatchNorm with the statistics of the float model (``freeze``), or frozen after this many of 252 steps.
* *same class in ONNX Runtime*: test images for which the exported file predicts the model's class. Only files of 8 bits
  are exported here.

Written by ``tests/benchmarks/accuracy/resnet20_cifar10.py`` with torch {torch.__version__} on {date.today()}; do not
edit.

{table.get_string()}
"""


if __name__ == "__main__":
    main()

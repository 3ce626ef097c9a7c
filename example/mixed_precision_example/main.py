r"""Bit widths for a file size: score every layer, choose within a budget, finetune, export a verified ONNX file.

Uses a small residual network on scikit-learn's handwritten digits, 32 x 32 px. Writes `widths.yaml` (a configuration
for `prepare_by_platform`, or for `--quant-config` of the other examples), the scores, the Pareto front as JSON and PNG,
and the ONNX file with its JSON.

    python example/mixed_precision_example/main.py
    python example/mixed_precision_example/main.py --size 120 --method fisher --output-dir small
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "common"))  # what the examples share

import numpy as np
import torch
from argument_types import integer, number
from errors import UserError, leaving
from prettytable import PrettyTable
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from fxqat import convert_export, load_checkpoint, save_checkpoint
from fxqat.tools import WidthBank, file_bytes, sensitivity, solve, sweep

WIDTHS = (4, 8)
METHODS = ("alone", "without", "hessian", "fisher")
CONFIG = {"extra_qconfig_dict": {"w_observer": "MSE", "w_qscheme": {"narrow_range": False}}, "bn_mode": "freeze"}


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Conv2d(channels_in, channels, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the block."""
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


def network() -> nn.Module:
    """A network of six blocks for (n, 1, 32, 32) images."""
    channels = (16, 16, 32, 32, 64, 64)
    blocks = [Block(a, b, 2 if a < b else 1) for a, b in zip((16, *channels), channels, strict=False)]
    stem = [nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images (n, 1, 32, 32) and labels to train, then to test; the test digits are from other writers."""
    found = load_digits()
    images = torch.from_numpy(found.images.astype(np.float32))[:, None] / 16
    images, labels = F.interpolate(images, size=32, mode="bilinear"), torch.from_numpy(found.target)
    return images[:1300], labels[:1300], images[1300:], labels[1300:]


def train(model: nn.Module, images: Tensor, labels: Tensor, epochs: int, lr: float) -> None:
    """Train with Adam and a cosine schedule."""
    optimizer = torch.optim.Adam(model.parameters(), lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, epochs * (len(images) // 50)))
    model.train()
    for _ in range(epochs):
        for pick in torch.randperm(len(images))[: len(images) // 50 * 50].split(50):
            optimizer.zero_grad()
            F.cross_entropy(model(images[pick]), labels[pick]).backward()
            optimizer.step()
            schedule.step()
    model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Top-1 in percent."""
    return 100 * float((model(images).argmax(1) == labels).float().mean())


def build_parser() -> argparse.ArgumentParser:
    """All flags."""
    parser = argparse.ArgumentParser(description="Choose a width for each layer within a budget.")
    add = parser.add_argument
    add("--size", type=number(1), help="file size in kB (default: midway between all layers at 4 and at 8 bits)")
    add("--method", choices=METHODS, default="alone", help="method that scores the layers (default: alone)")
    add("--backend", default="ONNXRuntime", help="deployment backend (default: ONNXRuntime)")
    add("--epochs", type=integer(1), default=8, help="epochs of the float training (default: 8)")
    add("--qat-epochs", type=integer(0), default=2, help="epochs of the finetuning (default: 2)")
    add("--seed", type=integer(0), default=0, help="seed of the run (default: 0)")
    add("--output-dir", type=Path, default=Path("mixed_precision"), help="folder for the files (default: %(default)s)")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    with leaving():
        flags = build_parser().parse_args(sys.argv[1:] if argv is None else argv)
        try:
            run(flags)
        except OSError as error:
            raise UserError(str(error)) from error


def run(flags: argparse.Namespace) -> None:
    """Do the whole run."""
    torch.manual_seed(flags.seed)
    folder: Path = flags.output_dir
    folder.mkdir(parents=True, exist_ok=True)
    images, labels, test_images, test_labels = digits()
    model = network()
    train(model, images, labels, flags.epochs, 3e-3)

    batches = images[:256].split(64)
    bank = WidthBank(model, batches, WIDTHS, (8,), flags.backend, CONFIG)
    scores = sensitivity(bank, batches, flags.method, progress=True)
    print(scores)
    scores.write_json(folder / "scores.json")
    cost = file_bytes(bank, (test_images[:1],))
    pareto = sweep(scores.scores, cost)
    pareto.write_json(folder / "pareto.json")
    pareto.plot(folder / "pareto.png")
    uniform = {bits: {name: bits if unit.is_weight else 8 for name, unit in bank.units.items()} for bits in WIDTHS}
    midway = sum(cost.of(widths) for widths in uniform.values()) / len(uniform)
    choice = solve(scores.scores, [(cost, 1000 * flags.size if flags.size else midway)])
    choice.write_yaml(bank.units, folder / "widths.yaml")

    table = PrettyTable(["model", "file, kB", "top-1"], align="l")

    def add_row(name: str, evaluated: nn.Module, size: float | str) -> float:
        found = accuracy(evaluated, test_images, test_labels)
        table.add_row([name, size if isinstance(size, str) else f"{size / 1000:.1f}", f"{found:.2f}"])
        return found

    add_row("float", model, "")
    for bits, widths in uniform.items():
        add_row(f"all at {bits} bits, calibrated", bank.mix(widths), cost.of(widths))
    gm = bank.mix(choice.widths)
    before = add_row("chosen, calibrated", gm, choice.costs[cost.name])
    save_checkpoint(gm, folder / "model.pth")
    train(gm, images, labels, flags.qat_epochs, 3e-4)
    if accuracy(gm, test_images, test_labels) < before:
        load_checkpoint(gm, folder / "model.pth")
    save_checkpoint(gm, folder / "model.pth")
    paths = folder / "model.onnx", folder / "model.json"
    report = convert_export(gm, (test_images[:1],), *paths, runtime="onnxruntime")
    add_row("chosen, finetuned", gm, report.onnx_path.stat().st_size)
    print(table)
    print(f"{report.onnx_path}: verified; {100 * report.certificate.off_share:.3f}% of its values off by a step")


if __name__ == "__main__":
    main()

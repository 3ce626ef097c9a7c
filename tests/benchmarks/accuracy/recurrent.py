"""Accuracy of quantized recurrent layers on scikit-learn's digits, read row by row.

    python tests/benchmarks/accuracy/recurrent.py --output docs/evidence/accuracy_recurrent.rst

Each network reads the 8 rows of an image as 8 steps. It is trained in float, then quantized for TSQAT: PTQ, and QAT for
a few epochs, with a twentieth of the learning rate. ``layer`` is one ONNX operator for each layer; ``unrolled`` is
one operation after the other with 16-bit states.
"""

from __future__ import annotations

import argparse
import copy
import logging
import tempfile
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from fxqat import convert_export, enable_calibration, enable_quantization, prepare_by_platform

NETS: dict[str, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    "LSTM": (nn.LSTM, {}),
    "GRU": (nn.GRU, {}),
    "RNN": (nn.RNN, {}),
    "LSTM, both directions": (nn.LSTM, {"bidirectional": True}),
    "LSTM, two layers": (nn.LSTM, {"num_layers": 2}),
    "GRU, three layers, both directions": (nn.GRU, {"num_layers": 3, "bidirectional": True}),
}
UNROLLED: list[dict[str, Any]] = [
    {"match": {"module": "rnn"}, "recurrent": "unrolled"},
    {"match": {"node": "re:rnn_(hidden|cell).*"}, "output": {"bit": 16}},
]
FORMS: dict[str, list[dict[str, Any]]] = {"layer": [], "unrolled": UNROLLED}


class Rows(nn.Module):
    """A classifier of images that are read row by row."""

    def __init__(self, kind: type[nn.RNNBase], options: dict[str, Any]) -> None:
        super().__init__()
        self.rnn = kind(8, 64, batch_first=True, **options)
        self.head = nn.Linear(128 if options.get("bidirectional") else 64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """``(N, 8, 8)`` to ``(N, 10)``."""
        y, _ = self.rnn(x)
        return self.head(y.mean(1))


def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images and labels to train on, and to test on."""
    digits = load_digits()
    images, labels = torch.tensor(digits.images).float() / 16, torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return images[order[:1200]], labels[order[:1200]], images[order[1200:]], labels[order[1200:]]


def train(model: nn.Module, images: Tensor, labels: Tensor, epochs: int, rate: float) -> None:
    """Adam with a rate that falls to zero."""
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * (len(labels) // 100))
    generator = torch.Generator().manual_seed(1)
    for _ in range(epochs):
        for batch in torch.randperm(len(labels), generator=generator).split(100):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
            schedule.step()
    model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Percent."""
    return 100 * (model(images).argmax(1) == labels).float().mean().item()


def measure(name: str, form: str, trained: nn.Module, float_accuracy: float, epochs: int) -> dict[str, Any]:
    """One row of the table."""
    images, labels, test_images, test_labels = data()
    config = {"overrides": FORMS[form]} if FORMS[form] else None
    gm = prepare_by_platform(copy.deepcopy(trained), "TSQAT", config, example_inputs=(images[:4],))
    gm.eval()
    enable_calibration(gm)
    with torch.no_grad():
        for batch in images[:400].split(100):
            gm(batch)
    enable_quantization(gm)
    found = {"net": name, "form": form, "float": float_accuracy, "ptq": accuracy(gm, test_images, test_labels)}
    train(gm, images, labels, epochs, 5e-4)
    found["qat"] = accuracy(gm, test_images, test_labels)
    with tempfile.TemporaryDirectory() as folder:
        report = convert_export(gm, (test_images[:64],), Path(folder) / "net.onnx", dynamic_batch=True)
    assert report.certificate is not None
    found["parity"] = "passed" if report.certificate.passed else "FAILED"
    return found


def page(rows: list[dict[str, Any]]) -> str:
    """The page of the documentation."""
    lines = [
        "Accuracy of recurrent layers",
        "============================",
        "",
        "scikit-learn's digits, read row by row: 1200 images to train on, 597 to test on. Weights and activations of 8",
        "bits (TSQAT). ``layer``: one ONNX operator for each layer; ``unrolled``: every operation quantized, states of",
        "16 bits. One image is 0.17 points. Written by ``tests/benchmarks/accuracy/recurrent.py``.",
        "",
        ".. list-table::",
        "   :header-rows: 1",
        "",
    ]
    header = ("network", "form", "float", "PTQ", "QAT", "file equals the model")
    cells = [(r["net"], r["form"], *(f"{r[k]:.2f}" for k in ("float", "ptq", "qat")), r["parity"]) for r in rows]
    for row in (header, *cells):
        lines += [f"   {'* -' if place == 0 else '  -'} {cell}" for place, cell in enumerate(row)]
    return "\n".join([*lines, ""])


def main() -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=80)
    parser.add_argument("--qat-epochs", type=int, default=5)
    arguments = parser.parse_args()
    logging.getLogger("fxqat").setLevel(logging.ERROR)
    images, labels, test_images, test_labels = data()
    rows = []
    for name, (kind, options) in NETS.items():
        torch.manual_seed(0)
        model = Rows(kind, options)
        train(model, images, labels, arguments.epochs, 1e-2)
        reference = accuracy(model, test_images, test_labels)
        for form in FORMS if len(options) < 2 else ("layer",):
            rows.append(measure(name, form, model, reference, arguments.qat_epochs if form == "layer" else 1))
            print(rows[-1], flush=True)
            arguments.output.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()

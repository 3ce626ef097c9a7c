"""Accuracy of quantized recurrent layers on scikit-learn's digits, read row by row, and on its texts.

    python tests/benchmarks/accuracy/recurrent.py --output docs/evidence/accuracy_recurrent.rst

Each network reads the 8 rows of an image as 8 steps. The digits are tested in three parts, each by networks that were
trained on the other two from several seeds: one network differs from the next by more than the points in question. The
language model predicts each next character of the descriptions of scikit-learn's data
sets; every tenth piece of 16 characters is for the test. A network is trained in float, then quantized for TSQAT: PTQ,
and QAT for a few epochs on the same inputs, without labels: the float network teaches its logits. (Labels would change
the network itself: float training that goes on for as long moves the accuracy as much.) Of the rates 5e-4, 2e-4 and
5e-5, the last had the smallest difference to the float network's logits: digits, the first 800 training images of the
first part to train on and its others to compare, four networks of a seed that is not used here, no labels. ``layer`` is
one ONNX operator for each layer; ``unrolled`` is one operation after the other with 16-bit states.
"""

from __future__ import annotations

import argparse
import copy
import logging
import math
import tempfile
from collections.abc import Iterator
from importlib import resources
from itertools import product
from pathlib import Path
from statistics import stdev
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from fxqat import convert_export, enable_calibration, enable_quantization, prepare_by_platform

DIGITS: dict[str, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    "LSTM": (nn.LSTM, {}),
    "GRU": (nn.GRU, {}),
    "RNN": (nn.RNN, {}),
    "LSTM, both directions": (nn.LSTM, {"bidirectional": True}),
    "LSTM, two layers": (nn.LSTM, {"num_layers": 2}),
    "GRU, three layers, both directions": (nn.GRU, {"num_layers": 3, "bidirectional": True}),
}
LANGUAGE_MODEL = "LSTM, next character"
LENGTH, FOLDS, SEEDS = 16, 3, 5
RATE, DISTILL_RATE, TEMPERATURE, QAT_EPOCHS = 1e-2, 5e-5, 2.0, 5
COLUMNS = ("float", "PTQ", "QAT")
HEADING = ("network", "form", "trained", *COLUMNS, "QAT - float", "standard error", "changed", "file equals the model")

Data = tuple[Tensor, Tensor, Tensor, Tensor]
"""Inputs and labels to train on, and to test on."""

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


class Characters(nn.Module):
    """A language model of characters."""

    def __init__(self, alphabet: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(alphabet, 32)
        self.rnn = nn.LSTM(32, 128, batch_first=True)
        self.head = nn.Linear(128, alphabet)

    def forward(self, x: Tensor) -> Tensor:
        """``(N, LENGTH)`` to ``(N, alphabet, LENGTH)``."""
        return self.head(self.rnn(self.embedding(x))[0]).transpose(1, 2)


def digits() -> Iterator[Data]:
    """The digits, tested in parts."""
    found = load_digits()
    images, labels = torch.tensor(found.images).float() / 16, torch.tensor(found.target)
    parts = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).chunk(FOLDS)
    for fold, part in enumerate(parts):
        rest = torch.cat([other for number, other in enumerate(parts) if number != fold])
        yield images[rest], labels[rest], images[part], labels[part]


def texts() -> Data:
    """The descriptions of scikit-learn's data sets in pieces, as numbers of characters."""
    folder = resources.files("sklearn.datasets.descr")
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".rst")), key=lambda file: file.name)
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    numbers = {character: number for number, character in enumerate(sorted(set(text)))}
    pieces = torch.tensor([numbers[character] for character in text]).unfold(0, LENGTH + 1, LENGTH)
    is_test = torch.arange(len(pieces)) % 10 == 0
    given, following = pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()
    return given[~is_test], following[~is_test], given[is_test], following[is_test]


def train(model: nn.Module, images: Tensor, labels: Tensor | nn.Module, epochs: int, rate: float) -> None:
    """Adam with a rate that falls to zero, on labels or on the logits of a teacher."""
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * math.ceil(len(images) / 100))
    generator = torch.Generator().manual_seed(1)
    for _ in range(epochs):
        for batch in torch.randperm(len(images), generator=generator).split(100):
            optimizer.zero_grad()
            if isinstance(labels, nn.Module):
                with torch.no_grad():
                    target = (labels(images[batch]) / TEMPERATURE).softmax(1)
                loss = F.cross_entropy(model(images[batch]) / TEMPERATURE, target) * TEMPERATURE**2
            else:
                loss = F.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            schedule.step()
    model.eval()


def percent(hits: Tensor) -> float:
    """The share of what is true."""
    return 100 * hits.float().mean().item()


@torch.no_grad()
def measure(form: str, trained: nn.Module, data: Data, epochs: int) -> dict[str, Any]:
    """Percent in float, after PTQ and after QAT, the share of answers that QAT changes, and the verdict on the file."""
    images, _, test_images, test_labels = data
    config = {"overrides": FORMS[form]} if FORMS[form] else None
    gm = prepare_by_platform(copy.deepcopy(trained), "TSQAT", config, example_inputs=(images[:4],))
    gm.eval()
    enable_calibration(gm)
    for batch in images[:400].split(100):
        gm(batch)
    enable_quantization(gm)
    answers = {"float": trained(test_images).argmax(1), "PTQ": gm(test_images).argmax(1)}
    with torch.enable_grad():
        train(gm, images, trained, epochs, DISTILL_RATE)
    answers["QAT"] = gm(test_images).argmax(1)
    found = {name: percent(given == test_labels) for name, given in answers.items()}
    found["changed"] = percent(answers["QAT"] != answers["float"])
    with tempfile.TemporaryDirectory() as folder:
        report = convert_export(gm, (test_images[:64],), Path(folder) / "net.onnx", dynamic_batch=True)
    assert report.certificate is not None
    return found | {"passed": report.certificate.passed, "count": test_labels.numel()}


def row(name: str, form: str, parts: list[dict[str, Any]]) -> tuple[str, ...]:
    """One row of the table, over all networks and parts of the test."""
    count = sum(part["count"] for part in parts)
    mean = {k: sum(part[k] * part["count"] for part in parts) / count for k in (*COLUMNS, "changed")}
    gains = [part["QAT"] - part["float"] for part in parts]
    error = f"{stdev(gains) / math.sqrt(len(gains)):.2f}" if len(gains) > 1 else ""
    cells = (f"{mean[k]:.2f}" for k in COLUMNS)
    gain = f"{mean['QAT'] - mean['float']:+.2f}"
    verdict = "passed" if all(part["passed"] for part in parts) else "FAILED"
    return name, form, str(len(parts)), *cells, gain, error, f"{mean['changed']:.2f}", verdict


def rows_of(page: str) -> list[tuple[str, ...]]:
    """The rows of the table of a page that :func:`page` wrote, without the heading."""
    rows = page.partition(":header-rows: 1")[2].split("\n   * - ")[1:]
    return [tuple(cell.strip() for cell in row.split("\n     -")) for row in rows][1:]


def page(rows: list[tuple[str, ...]], sizes: tuple[int, int]) -> str:
    """The page of the documentation.

    Args:
        rows: the rows of the table.
        sizes: the numbers of digits and of characters in the test.
    """
    lines = [
        "Accuracy of recurrent layers",
        "============================",
        "",
        f"scikit-learn's {sizes[0]} digits, read row by row and tested in {FOLDS} parts, each by networks that were",
        f"trained on the others; and the next character of its texts, {sizes[1]} in the test. ``trained``: how many",
        f"networks the row averages over, the {FOLDS} parts of the digits with up to {SEEDS} seeds; ``unrolled`` is",
        f"measured with the first seed. With one seed a wrong answer is {100 / sizes[0]:.3f} points of the digits and",
        f"{100 / sizes[1]:.3f} of the texts; with more seeds it is as many times less.",
        f"Weights and activations of 8 bits (TSQAT). QAT: {QAT_EPOCHS} epochs with the training inputs, "
        "without labels: the",
        f"float network teaches its logits. Its learning rate, {DISTILL_RATE}, was chosen with networks of another "
        "seed by",
        "the difference of logits to float, on digits that they were not trained on; no label was used.",
        "``layer``: one ONNX operator for each layer; ``unrolled``: every operation quantized, states of 16 bits.",
        "``standard error``: of ``QAT - float``, from how much it varies over the networks. ``changed``: the",
        "percentage of test inputs to which the network after QAT gives another answer than in float, right or wrong.",
        "Written by ``tests/benchmarks/accuracy/recurrent.py``.",
        "",
        ".. list-table::",
        "   :header-rows: 1",
        "",
    ]
    order = [LANGUAGE_MODEL, *DIGITS]
    for cells in (HEADING, *sorted(rows, key=lambda row: (row[1], order.index(row[0])))):
        lines += [f"   {'* -' if place == 0 else '  -'} {cell}".rstrip() for place, cell in enumerate(cells)]
    return "\n".join([*lines, ""])


def main() -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=80)
    parser.add_argument("--only", nargs="*", default=[LANGUAGE_MODEL, *DIGITS], help="the networks to measure")
    parser.add_argument("--keep", action="store_true", help="keep the rows that the page has of other networks")
    arguments = parser.parse_args()
    logging.getLogger("fxqat").setLevel(logging.ERROR)
    folds, text = list(digits()), texts()
    alphabet = 1 + max(int(tensor.max()) for tensor in text)
    sizes = sum(data[3].numel() for data in folds), text[3].numel()
    is_kept = arguments.keep and arguments.output.exists()
    rows = rows_of(arguments.output.read_text(encoding="utf-8")) if is_kept else []
    rows = [cells for cells in rows if cells[0] not in arguments.only]
    networks: dict[str, list[tuple[nn.Module, Data]]] = {}
    for name in arguments.only:
        kind, options = DIGITS.get(name, (nn.LSTM, {}))
        networks[name] = trained = []
        for seed, data in product(range(SEEDS), [text] if name == LANGUAGE_MODEL else folds):
            torch.manual_seed(seed)
            model = Characters(alphabet) if name == LANGUAGE_MODEL else Rows(kind, options)
            train(model, *data[:2], arguments.epochs // (2 if name == LANGUAGE_MODEL else 1), RATE)
            trained.append((model, data))
        parts = [measure("layer", model, data, QAT_EPOCHS) for model, data in trained]
        rows.append(row(name, "layer", parts))
        print(*rows[-1], flush=True)
        arguments.output.write_text(page(rows, sizes), encoding="utf-8")
    for name, trained in networks.items():
        if len(DIGITS.get(name, (None, {}))[1]) < 2:
            first_seed = trained[: len(trained) // SEEDS]
            parts = [measure("unrolled", model, data, QAT_EPOCHS) for model, data in first_seed]
            rows.append(row(name, "unrolled", parts))
            print(*rows[-1], flush=True)
            arguments.output.write_text(page(rows, sizes), encoding="utf-8")


if __name__ == "__main__":
    main()

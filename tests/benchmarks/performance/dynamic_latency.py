"""Latency of dynamic quantization in ONNX Runtime at batch 1: the float and the dynamic file take turns in one process.

Run nothing else meanwhile. BERT needs the package ``transformers``; without it that row is left out.

    python tests/benchmarks/performance/dynamic_latency.py --output docs/evidence/dynamic_latency.rst
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path

import onnxruntime as ort
import torch
from torch import Tensor, nn

import fxqat
from fxqat.utils.tensors import flatten_tensors

Case = tuple[nn.Module, tuple[Tensor, ...]]


class LastStep(nn.Module):
    """A two-layer LSTM and a classifier of its last step."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(inputs, hidden, 2, batch_first=True)
        self.head = nn.Linear(hidden, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def linear(scale: int) -> Case:
    width = 1024 // scale
    layers = [nn.Linear(width, width) if n % 2 == 0 else nn.ReLU() for n in range(7)]
    return nn.Sequential(*layers), (torch.randn(1, width),)


def lstm(scale: int) -> Case:
    return LastStep(256 // scale, 512 // scale), (torch.randn(1, 50, 256 // scale),)


def bert_tiny(scale: int) -> Case:
    import transformers

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}
            self.bert = transformers.BertModel(transformers.BertConfig(vocab_size=30522 // scale, **sizes))

        def forward(self, ids: Tensor) -> Tensor:
            return self.bert(ids).pooler_output

    return Pooled(), (torch.randint(0, 30522 // scale, (1, 128)),)


CASES: dict[str, Callable[[int], Case]] = {
    "4 linear layers of 1024": linear,
    "2-layer LSTM, 512 wide, 50 steps": lstm,
    "BERT-tiny, 128 tokens": bert_tiny,
}


def export(model: nn.Module, inputs: tuple[Tensor, ...], folder: Path) -> dict[str, Path]:
    """The float file of torch's exporter and the dynamic file."""
    paths = {kind: folder / f"{kind}.onnx" for kind in ("float", "dynamic")}
    torch.onnx.export(model.eval(), inputs, paths["float"], dynamo=True, verbose=False, external_data=False)
    gm = fxqat.prepare_by_platform(model, "ONNXRuntime", {"activation": "dynamic"}, example_inputs=inputs).eval()
    fxqat.enable_quantization(gm)
    fxqat.convert_export(gm, inputs, paths["dynamic"])
    return paths


def measure(paths: dict[str, Path], inputs: tuple[Tensor, ...], turns: int, runs: int) -> dict[str, float]:
    """The median over turns of the mean time of a run, in milliseconds; float and dynamic take turns."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    sessions = {k: ort.InferenceSession(str(p), options, providers=["CPUExecutionProvider"]) for k, p in paths.items()}
    arrays = [tensor.numpy() for tensor in flatten_tensors(inputs)]
    times: dict[str, list[float]] = {kind: [] for kind in sessions}
    for turn in range(turns + 1):
        for kind, session in sessions.items():
            feeds = dict(zip((value.name for value in session.get_inputs()), arrays, strict=True))
            start = time.perf_counter()
            for _ in range(runs):
                session.run(None, feeds)
            if turn:  # the first turn warms up
                times[kind].append((time.perf_counter() - start) / runs * 1000)
    return {kind: statistics.median(values) for kind, values in times.items()}


def rows(scale: int, turns: int, runs: int) -> Iterator[tuple[str, dict[str, float], dict[str, float]]]:
    """Name, milliseconds and megabytes of each case."""
    for name, make in CASES.items():
        if make is bert_tiny and importlib.util.find_spec("transformers") is None:
            continue
        torch.manual_seed(0)
        model, inputs = make(scale)
        with tempfile.TemporaryDirectory() as folder:
            paths = export(model, inputs, Path(folder))
            sizes = {kind: path.stat().st_size / 1e6 for kind, path in paths.items()}
            yield name, measure(paths, inputs, turns, runs), sizes


def page(scale: int, turns: int, runs: int) -> str:
    """The page as reStructuredText."""
    lines = [
        "Latency of dynamic quantization",
        "===============================",
        "",
        f"Batch 1, one thread, ONNX Runtime {ort.__version__}, {platform.machine()}, {os.cpu_count()} cores, "
        f"{date.today()}. The float and the dynamic file take turns in one process; the median of {turns} turns of "
        f"{runs} runs. Written by ``tests/benchmarks/performance/dynamic_latency.py``; see :doc:`/howto/dynamic`.",
        "",
        ".. list-table::",
        "   :header-rows: 1",
        "",
        "   * - Model",
        "     - Float, ms",
        "     - Dynamic, ms",
        "     - Times faster",
        "     - File, share of float",
    ]
    for name, times, sizes in rows(scale, turns, runs):
        cells = [f"{times['float']:.3f}", f"{times['dynamic']:.3f}", f"{times['float'] / times['dynamic']:.2f}"]
        cells.append(f"{sizes['dynamic'] / sizes['float']:.3f}")
        lines += [f"   * - {name}", *(f"     - {cell}" for cell in cells)]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="the page to write; by default it is printed")
    parser.add_argument("--turns", type=int, default=21)
    parser.add_argument("--runs", type=int, default=20, help="runs in each turn")
    parser.add_argument("--scale", type=int, default=1, help="divides the sizes of the models, to try the script")
    options = parser.parse_args()
    text = page(options.scale, options.turns, options.runs)
    if options.output is None:
        print(text)
    else:
        options.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

"""Time and memory of a compiled QAT training step on CPU against the compiled float model's, and where the time goes.

Both models are compiled by ``torch.compile`` without caches, with ``fullgraph=True``; their steps take turns. For the
account of the parts they are compiled once more, with the names of the generated kernels in torch's profiler. Run
nothing else meanwhile. Each model adds a line to the results::

    python tests/benchmarks/performance/compiled_step.py run          # about 12 minutes
    python tests/benchmarks/performance/compiled_step.py page --output docs/evidence/step_compiled.rst
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from prettytable import PrettyTable
from torch import nn
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent))
from machine import processor
from step_time import LIMITS, MEMORY_LIMIT, Step, build, interleaved, peak_memory, quantized, seconds_of, step_of

RESULTS = Path(__file__).parents[1] / "results" / "step_compiled.jsonl"

PROFILED = 8
"""Steps under the profiler."""

ROUNDING = re.compile("round|clamp|hardtanh")
"""Operators that the names of generated kernels with fake-quant hold."""

ROWS = {
    "convolutions and products": "operators of libraries: their input is quantized, their code is the same",
    "generated kernels": "code that the compiler generates: normalization, activations, additions",
    "generated kernels with fake-quant": "the same and fake-quant in one pass, where fxqat's kernels are not used",
    "kernels of fake-quant": "fxqat's, which the generated code calls; weights and biases, too",
    "copies": "of weights and gradients into another order in memory",
    "optimizer": "zero_grad and step: the float step's, and more parameters: the learned scales",
    "other": "what surrounds these: the wrapper in Python, autograd, allocation",
}

SAVED = {
    "weights": "copies in another order in memory, in both models; with TSQAT the rounded ones, too",
    "int8 tensors": "codes of fake-quant for its backward pass; indices of max pooling",
    "other tensors": "inputs of layers, of normalization, of activations; rounded ones, too",
}
"""What a step saves for its backward pass, beside parameters."""

LIBRARY = ("convolution", "aten::mm", "aten::addmm", "aten::bmm", "flash_attention", "mkldnn")


def row_of(name: str) -> str:
    """The row of the table to which an operator or kernel belongs."""
    if "cpp_fused" in name:
        return "generated kernels with fake-quant" if ROUNDING.search(name) else "generated kernels"
    if name.startswith("fxqat::round"):
        return "kernels of fake-quant"
    if any(part in name for part in LIBRARY):
        return "convolutions and products"
    if name == "aten::copy_":
        return "copies"
    return "optimizer" if "sgd" in name.lower() or "Optimizer" in name else "other"


def account_of(step: Step) -> tuple[dict[str, float], dict[str, float]]:
    """``(milliseconds, calls)`` of each row in a step: the time of operators without that of those they call."""
    with profile(activities=[ProfilerActivity.CPU]) as record:
        for _ in range(PROFILED):
            step()
    spent: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in record.key_averages():
        spent[row_of(event.key)] += event.self_cpu_time_total / 1e3
        calls[row_of(event.key)] += event.count
    return {row: spent[row] / PROFILED for row in ROWS}, {row: calls[row] / PROFILED for row in ROWS}


def saved_for_backward(model: nn.Module, compiled: Callable[..., Any], x: torch.Tensor) -> dict[str, float]:
    """MiB of the tensors that the forward pass keeps for the backward pass, by the rows of ``SAVED``."""
    parameters = list(model.parameters())
    known = {tensor.untyped_storage().data_ptr() for tensor in (*parameters, *model.buffers(), x)}
    weights = [parameter for parameter in parameters if parameter.dim() > 1]
    shapes = {tuple(weight.shape) for weight in weights} | {tuple(weight.shape[::-1]) for weight in weights}
    found = dict.fromkeys(SAVED, 0.0)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            known.add(storage.data_ptr())
            kind = "weights" if tuple(tensor.shape) in shapes else "other tensors"
            found["int8 tensors" if tensor.dtype == torch.int8 else kind] += storage.nbytes() / 2**20
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = compiled(x)  # which holds what was saved: no storage is taken twice
    del outputs
    return found


def compile_models(
    models: dict[str, nn.Module], x: torch.Tensor, options: dict[str, Any] | None = None
) -> tuple[dict[str, Callable[..., Any]], dict[str, Step], dict[str, float]]:
    """The compiled models, their steps, and the seconds of each first step, by the names of the models."""
    compiled = {key: torch.compile(model, fullgraph=True, options=options) for key, model in models.items()}
    steps = {key: step_of(model, x, None) for key, model in compiled.items()}
    return compiled, steps, {key: seconds_of(step, "cpu") for key, step in steps.items()}


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The line of a model."""
    torch.manual_seed(0)
    x = torch.randn(arguments.batch, 3, arguments.image, arguments.image)
    model = build(name, "cpu", arguments.image)
    models = {"float": model, "TSQAT": quantized(model, x, "TSQAT", "train")}
    compiled, steps, first = compile_models(models, x)
    print(f"{name}: compiled in {first['float']:.0f} s in float, {first['TSQAT']:.0f} s with TSQAT", flush=True)
    seconds = interleaved(steps, arguments.rounds, "cpu")
    ratios = [ours / base for ours, base in zip(seconds["TSQAT"], seconds["float"], strict=True)]
    held = {key: peak_memory(models[key], step) for key, step in steps.items()}
    saved = {key: saved_for_backward(models[key], compiled[key], x) for key in models}
    torch.compiler.reset()
    named = compile_models(models, x, {"cpp.enable_kernel_profile": True})[1]
    accounts = {key: account_of(step) for key, step in named.items()}
    head = subprocess.run(["git", "rev-parse", "--short=9", "HEAD"], capture_output=True, text=True, check=True).stdout
    return {
        "model": name,
        "processor": processor(),
        "settings": [arguments.batch, arguments.image, torch.get_num_threads(), arguments.rounds],
        "torch": torch.__version__,
        "commit": head.strip(),
        "date": str(date.today()),
        "first": first,
        "ms": {key: 1e3 * statistics.median(values) for key, values in seconds.items()},
        "ratio": statistics.median(ratios),
        "memory": held,
        "saved": saved,
        "accounts": accounts,
    }


def section(line: dict[str, Any]) -> str:
    """What is said about a model."""
    name, limit = line["model"], LIMITS[line["model"]][1]
    batch, image, threads, rounds = line["settings"]
    compiling = line["first"]["TSQAT"] / line["first"]["float"]
    verdict = "met" if line["ratio"] <= limit else "missed"
    held = line["memory"]
    memory = held["TSQAT"] / held["float"]
    verdict_of_memory = "met" if memory <= MEMORY_LIMIT else "missed"
    table = PrettyTable(["part", "float, ms", "TSQAT, ms", "difference", "calls", "what it is"], align="l", hrules=1)
    (base, base_calls), (ours, our_calls) = line["accounts"]["float"], line["accounts"]["TSQAT"]
    for row, meaning in ROWS.items():
        cells = [f"{base[row]:.1f}", f"{ours[row]:.1f}", f"{ours[row] - base[row]:+.1f}"]
        table.add_row([row, *cells, f"{base_calls[row]:.0f}, {our_calls[row]:.0f}", meaning])
    totals = sum(base.values()), sum(ours.values())
    table.add_row(["sum", f"{totals[0]:.1f}", f"{totals[1]:.1f}", f"{totals[1] - totals[0]:+.1f}", "", ""])
    table.max_width["what it is"] = 50
    kept = PrettyTable(["saved for the backward pass", "float, MiB", "TSQAT, MiB", "what it is"], align="l", hrules=1)
    for row, meaning in SAVED.items():
        kept.add_row([row, *(f"{line['saved'][key][row]:.1f}" for key in ("float", "TSQAT")), meaning])
    kept.max_width["what it is"] = 50
    return f"""{name}
{"-" * len(name)}

A step takes {line["ms"]["float"]:.1f} ms in float and {line["ms"]["TSQAT"]:.1f} ms with TSQAT, **{line["ratio"]:.2f}**
times as long (median of {rounds} rounds); the limit of {limit} is {verdict}. The first step, which compiles, takes
{line["first"]["float"]:.0f} s and {line["first"]["TSQAT"]:.0f} s, {compiling:.2f} times as long. At its peak a step
holds {held["float"]:.0f} MiB of tensors in float, {held["TSQAT"]:.0f} MiB with TSQAT, **{memory:.2f}** times as much;
the limit of {MEMORY_LIMIT} is {verdict_of_memory}. Batch {batch}, {image} px, {threads} threads of
{line["processor"]},
torch {line["torch"]}, code of {line["commit"]}, {line["date"]}.

{table.get_string()}

{kept.get_string()}
"""


def page(lines: list[dict[str, Any]]) -> str:
    """The documentation page."""
    missing = [name for name in LIMITS if name not in {line["model"] for line in lines}]
    left_out = f"\nNot measured: {', '.join(missing)}.\n" if missing else ""
    return f"""Where the time of a compiled training step goes
===============================================

The training step of :doc:`step_time`, compiled by ``torch.compile`` in one graph: float and prepared for TSQAT,
BatchNorm in training mode, on CPU. The compiled code calls fxqat's kernels for each fake-quant and each bias. Without
them (``FXQAT_KERNELS=0``), fake-quant is torch's operators, for which the compiler generates code together with what
stands beside them: it then compiles longer (see :doc:`../howto/train`).

* The times of the parts are of {PROFILED} steps under torch's profiler: the time of an operator or a generated kernel
  without that of those it calls. The profiler itself takes time, so the sums are above the steps' times.
* For the profiler the models are compiled once more, with a name for each generated kernel. Step, time to compile and
  memory are those without names, as users have them.
* *calls*: operators and kernels in a step, float and TSQAT.
* Memory: of the tensors alive at the peak of a step, by torch's record of allocations: parameters, gradients, momentum
  and intermediate tensors. The compiler computes activations and normalization of the float model again in the backward
  pass, and not what fxqat's kernels return. The saved weights do not grow with the batch, which is small here.
{left_out}
Written by ``tests/benchmarks/performance/compiled_step.py``; do not edit.

{chr(10).join(map(section, lines))}"""


def main() -> None:
    """Measure models, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    run = commands.add_parser("run", help="measure models; a model's line replaces its older one")
    run.add_argument("--models", nargs="*", default=list(LIMITS), choices=list(LIMITS))
    run.add_argument("--batch", type=int, default=8)
    run.add_argument("--image", type=int, default=128)
    run.add_argument("--rounds", type=int, default=20)
    run.add_argument("--threads", type=int, default=2)
    commands.add_parser("page", help="write the page").add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    text = RESULTS.read_text(encoding="utf-8") if RESULTS.exists() else ""
    lines = {line["model"]: line for line in map(json.loads, text.splitlines())}
    if arguments.command == "page":
        arguments.output.write_text(page([lines[name] for name in LIMITS if name in lines]), encoding="utf-8")
        return
    torch.compiler.config.force_disable_caches = True
    torch.set_num_threads(arguments.threads)
    for name in arguments.models:
        lines[name] = measure(name, arguments)
        RESULTS.write_text("".join(json.dumps(line) + "\n" for line in lines.values()), encoding="utf-8")


if __name__ == "__main__":
    main()

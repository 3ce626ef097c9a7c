"""Latency in ONNX Runtime on the CPU: float, fxqat's backend ONNXRuntime, and ONNX Runtime's ``quantize_static``.

Each file runs in its own process with thread spinning off; the processes take turns. Run nothing else meanwhile.

    python tests/benchmarks/performance/ort_latency.py --output docs/evidence/ort_latency.rst
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
import torchvision
from machine import processor
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process
from prettytable import PrettyTable
from torch import Tensor, nn
from tqdm import tqdm

import fxqat
from fxqat.tools import ptq

MODELS = (
    *("resnet18", "resnet50", "mobilenet_v2", "regnet_x_400mf", "vit_b_16"),
    *("mobilenet_v3_small", "mobilenet_v3_large", "efficientnet_b0"),
)
SIZE = 224
INTEGER_OPS = ("QLinearConv", "QGemm", "QLinearMatMul", "MatMulIntegerToFloat", "ConvInteger", "DynamicQuantizeMatMul")
"""The integer layers that ONNX Runtime's optimizer creates."""

OPTIMIZED = "optimized.onnx"
FLOAT_OPS = ("Conv", "FusedConv", "Gemm", "FusedGemm", "MatMul", "FusedMatMul")


@dataclass(frozen=True)
class Measured:
    """The figures of one file.

    Args:
        milliseconds: the median of each turn.
        integer_share: share of the layers' multiply-accumulates that run on integers.
        ops: the number of nodes of each kind in the optimized graph.
    """

    milliseconds: list[float]
    integer_share: float
    ops: Counter[str]


class Batches(CalibrationDataReader):
    """Calibration data for ``quantize_static``."""

    def __init__(self, batches: list[Tensor]) -> None:
        self.rest = iter([{"x": batch.numpy()} for batch in batches])

    def get_next(self) -> dict[str, np.ndarray] | None:
        """The next batch, by the name of the input."""
        return next(self.rest, None)


def write_files(name: str, folder: Path, threads: int) -> dict[str, Path]:
    """Write the three files of a model with random weights, calibrated on the same noise."""
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    model: nn.Module = torchvision.models.get_model(name, weights=None).eval()
    batches = [torch.randn(1, 3, SIZE, SIZE) for _ in range(4)]
    paths = {kind: folder / f"{name}_{kind}.onnx" for kind in ("float", "quantize_static", "fxqat")}
    export = {"input_names": ["x"], "dynamo": True, "external_data": False, "verbose": False}
    torch.onnx.export(model, (batches[0],), paths["float"], **export)
    write_static(paths["float"], paths["quantize_static"], batches)
    gm = ptq(model, batches, "ONNXRuntime")
    fxqat.convert_export(gm, (batches[0],), paths["fxqat"], input_names=["x"])
    return paths


def write_static(path: Path, target: Path, batches: list[Tensor]) -> None:
    """Quantize a float file with ``quantize_static``."""
    prepared = target.with_name("prepared.onnx")
    quant_pre_process(str(path), str(prepared), skip_symbolic_shape=True)
    quantize_static(
        str(prepared),
        str(target),
        Batches(batches),
        quant_format=QuantFormat.QDQ,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        per_channel=True,
    )


def session_of(path: Path, threads: int, folder: Path | None = None) -> ort.InferenceSession:
    """A session at the default optimization level; its profile and optimized graph go to a folder, if one is given."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if folder is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(folder / "profile")
        options.optimized_model_filepath = str(folder / OPTIMIZED)
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def serve(path: Path, threads: int, connection: Connection) -> None:
    """Run a file as often as asked, and send the median milliseconds of that turn."""
    session = session_of(path, threads)
    feeds = {"x": np.random.default_rng(0).standard_normal((1, 3, SIZE, SIZE), dtype=np.float32)}
    for runs in iter(connection.recv, 0):
        found = []
        for _ in range(runs):
            start = time.perf_counter()
            session.run(None, feeds)
            found.append(1e3 * (time.perf_counter() - start))
        connection.send(statistics.median(found))


def latencies(paths: dict[str, Path], arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Median milliseconds of each file in each turn; each turn starts with another file."""
    context = multiprocessing.get_context("spawn")
    workers = {}
    for kind, path in paths.items():
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(path, arguments.threads, theirs), daemon=True)
        process.start()
        workers[kind] = (ours, process)
    found: dict[str, list[float]] = {kind: [] for kind in paths}
    order = list(workers)
    for turn in range(arguments.turns + 1):
        for kind in order:
            connection, _ = workers[kind]
            connection.send(arguments.runs)
            milliseconds = connection.recv()
            if turn:  # the first warms up
                found[kind].append(milliseconds)
        order.append(order.pop(0))
    for connection, process in workers.values():
        connection.send(0)
        process.join()
    return found


def integer_share(path: Path, threads: int, folder: Path) -> tuple[float, Counter[str]]:
    """The share of multiply-accumulates on integers (from a profile), and the ops of the optimized graph."""
    session = session_of(path, threads, folder)
    session.run(None, {"x": np.zeros((1, 3, SIZE, SIZE), np.float32)})
    file = Path(session.end_profiling())
    events = json.loads(file.read_text(encoding="utf-8"))
    file.unlink()
    graph = onnx.load(folder / OPTIMIZED).graph
    sizes = {initializer.name: tuple(initializer.dims) for initializer in graph.initializer}
    weights = {}
    for node in graph.node:
        weights[node.name] = next((sizes[name] for name in node.input if len(sizes.get(name, ())) > 1), None)
    macs: Counter[bool] = Counter()
    for event in events:
        kind = event.get("args", {}).get("op_name")
        if event["name"].endswith("_kernel_time") and kind in (*INTEGER_OPS, *FLOAT_OPS):
            macs[kind in INTEGER_OPS] += macs_of(event["args"], weights[event["name"].removesuffix("_kernel_time")])
    ops = Counter(node.op_type for node in graph.node)
    return macs[True] / max(1, sum(macs.values())), ops


def macs_of(arguments: dict[str, Any], weight: tuple[int, ...] | None) -> int:
    """Multiply-accumulates of a node, from the shapes in the profile and that of its weight, if it has one."""
    output = next(iter(arguments["output_type_shape"][0].values()))
    if weight is None:  # a product of two computed values
        return math.prod(output) * next(iter(arguments["input_type_shape"][0].values()))[-1]  # type: ignore[no-any-return]
    channels = weight[0] if "Conv" in arguments["op_name"] else output[-1]
    return math.prod(output) // channels * math.prod(weight)  # type: ignore[no-any-return]


def measure(name: str, arguments: argparse.Namespace) -> Iterator[tuple[str, Measured]]:
    """The figures of the three files of a model."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        paths = write_files(name, folder, arguments.threads)
        shares = {kind: integer_share(path, arguments.threads, folder) for kind, path in paths.items()}
        found = latencies(paths, arguments)
        for kind in paths:
            yield kind, Measured(found[kind], *shares[kind])


def ratio(one: Measured, other: Measured) -> float:
    """The latency of one over that of the other: the median of the ratios of all turns."""
    return statistics.median(a / b for a, b in zip(one.milliseconds, other.milliseconds, strict=True))


def page(table: PrettyTable, arguments: argparse.Namespace) -> str:
    """The documentation page."""
    table.hrules = 1
    return f"""Latency in ONNX Runtime
=======================

Milliseconds that ONNX Runtime needs on the CPU for one {SIZE}x{SIZE} image: with the float model, with the file of
ONNX Runtime's own ``quantize_static`` and with fxqat's file for the backend ONNXRuntime. Models of torchvision with
random weights.

* *float*, *static*, *fxqat*: the median over {arguments.turns} turns of the median of {arguments.runs} runs. Each file
  runs in its own process with {arguments.threads} threads without spinning, at the default optimization level; the
  processes take turns.
* *float / fxqat*, *static / fxqat*: how many times faster fxqat's file is: the median of the ratios of all turns.
* *static*: QDQ, uint8 activations, int8 weights per channel, every operation that it quantizes by default.
* *on integers*: share of the multiply-accumulates that run in an integer kernel, from ONNX Runtime's profile of the
  optimized graph.

Processor: {processor()}.

Written by ``tests/benchmarks/performance/ort_latency.py`` with onnxruntime {ort.__version__} and torch
{torch.__version__} on {date.today()}; do not edit.

{table.get_string()}
"""


def main() -> None:
    """Measure, print the table, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=30, help="turns of each file")
    parser.add_argument("--runs", type=int, default=6, help="runs in a turn")
    parser.add_argument("--output", type=Path, help="write the documentation page here")
    arguments = parser.parse_args()
    header = ["model", "float", "static", "fxqat", "float / fxqat", "static / fxqat", "static: on integers"]
    table = PrettyTable([*header, "fxqat: on integers", "fxqat: optimized graph"], align="l")
    for name in tqdm(arguments.models):
        found = dict(measure(name, arguments))
        plain, static, ours = found["float"], found["quantize_static"], found["fxqat"]
        times = [f"{statistics.median(m.milliseconds):.2f}" for m in (plain, static, ours)]
        ratios = [f"{ratio(m, ours):.2f}" for m in (plain, static)]
        kinds = [kind for kind in sorted(ours.ops) if kind in INTEGER_OPS or "Linear" in kind]
        ops = ", ".join(f"{ours.ops[kind]} {kind}" for kind in kinds)
        table.add_row([name, *times, *ratios, f"{static.integer_share:.0%}", f"{ours.integer_share:.0%}", ops])
        tqdm.write(str(table))
    if arguments.output:
        arguments.output.write_text(page(table, arguments), encoding="utf-8")


if __name__ == "__main__":
    main()

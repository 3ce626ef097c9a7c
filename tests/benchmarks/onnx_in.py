"""ONNX files through ``fxqat quantize``: torchvision models as torch exports them, and files that wheels ship.

The packages rapidocr-onnxruntime, nudenet and ddddocr must be importable; of each, only its ``.onnx`` files are read.
Each row adds a line to ``results/onnx_in.jsonl``; those that have one are skipped.

    python tests/benchmarks/onnx_in.py run
    python tests/benchmarks/onnx_in.py report
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnxruntime as ort
import torch
from prettytable import PrettyTable

from fxqat.cli.load_model import load_model
from fxqat.cli.main import fxqat
from fxqat.errors import FxqatError
from fxqat.utils.tensors import flatten_tensors

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER / "accuracy"), str(FOLDER / "zoo")]

import experiments  # noqa: E402
import parity  # noqa: E402

SHIPPED = {
    "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx": (3, 160, 160),
    "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx": (3, 48, 160),
    "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx": (3, 48, 192),
    "nudenet/320n.onnx": (3, 160, 160),
    "ddddocr/common_det.onnx": (3, 416, 416),
    "ddddocr/common.onnx": (1, 64, 96),
}
"""Files in packages, and the shapes of the images that they are given."""

IMAGE, SAMPLES, BACKEND = 64, 4, "ONNXRuntime"


def images(shape: tuple[int, ...]) -> np.ndarray:
    """White pages with dark bars of random lengths, like lines of text, and a little noise; about 0 to 1."""
    generator = np.random.default_rng(0)
    pages = np.full((SAMPLES, *shape), 0.95, np.float32)
    for page in pages:
        for top in range(4, shape[1] - 8, 16):
            for left in range(4, int(generator.integers(shape[2] // 4, shape[2] - 4)), 6):
                page[:, top : top + 10, left : left + int(generator.integers(2, 5))] = 0.1
    return np.clip(pages + generator.normal(0, 0.02, pages.shape), 0, 1).astype(np.float32)


def file_of(name: str, folder: Path) -> Path:
    """The file of a row."""
    if name in SHIPPED:
        package, _, rest = name.partition("/")
        found = importlib.util.find_spec(package)
        assert found is not None
        assert found.submodule_search_locations is not None
        return Path(found.submodule_search_locations[0]) / rest
    path = folder / f"{name}.onnx"
    torch.onnx.export(
        parity.build(name, IMAGE).eval(), (torch.zeros(1, 3, IMAGE, IMAGE),), path,
        input_names=["image"], output_names=["scores"], opset_version=18, dynamo=True,
        verbose=False, external_data=False,
    )  # fmt: skip
    return path


def measured(name: str, folder: Path) -> dict[str, Any]:
    """Read a file, compare the module with it, and quantize it by the command."""
    began = time.perf_counter()
    file, x = file_of(name, folder), images(SHIPPED.get(name, (3, IMAGE, IMAGE)))
    np.save(folder / "images.npy", x)
    session = ort.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    inputs, outputs = ([value.name for value in values] for values in (session.get_inputs(), session.get_outputs()))
    line: dict[str, Any] = {"file": name}
    try:
        with torch.no_grad():
            found = flatten_tensors(load_model(str(file)).model(torch.from_numpy(x[:1])))
        exact = session.run(None, {inputs[0]: x[:1]})
        line["difference"] = max(
            float(np.abs(a.numpy() - b).max() / (np.abs(b).max() or 1.0)) for a, b in zip(found, exact, strict=True)
        )
        out = folder / "out"
        fxqat.main(
            ["-q", "quantize", str(file), "--calib", str(folder / "images.npy"), "-b", BACKEND, "-o", str(out),
             "--batch-size", "1"], standalone_mode=False,
        )  # fmt: skip
    except (FxqatError, click.ClickException) as error:
        return line | {"refused": str(error).splitlines()[0].replace(str(file), name)}
    quantized = ort.InferenceSession(str(out / "model.onnx"), providers=["CPUExecutionProvider"])
    names = [[value.name for value in values] for values in (quantized.get_inputs(), quantized.get_outputs())]
    certificate = json.loads((out / "model.parity.json").read_text())
    figures = certificate["end_to_end"]["example_inputs"]
    return line | {
        "names": names == [inputs, outputs],
        "passed": certificate["passed"],
        "cosine": min(each["file"].get("cosine", 1.0) for each in figures),
        "size": (out / "model.onnx").stat().st_size / file.stat().st_size,
        "seconds": time.perf_counter() - began,
    }


def run(arguments: Namespace) -> None:
    """Measure the files that have no result yet."""
    torch.set_num_threads(arguments.threads)
    known = {result["file"] for result in experiments.read(arguments.results)}
    for name in arguments.files:
        if name not in known:
            with tempfile.TemporaryDirectory() as folder:
                experiments.add(arguments.results, measured(name, Path(folder)))


def report(arguments: Namespace) -> None:
    """Write the documentation page."""
    results = experiments.read(arguments.results)
    header = ["file", "float difference", "names kept", "certificate", "cosine to float", "size"]
    table = PrettyTable(header, align="l", hrules=1, max_width=60)
    for r in results:
        difference = f"{r['difference']:.1e}" if "difference" in r else ""
        if "refused" in r:
            table.add_row([r["file"], difference, "", f"refused: {r['refused']}", "", ""])
            continue
        verdicts = ["yes" if r["names"] else "NO", "passed" if r["passed"] else "FAILED"]
        table.add_row([r["file"], difference, *verdicts, f"{r['cosine']:.4f}", f"{r['size']:.0%}"])
    text = f"""ONNX files as models
====================

``fxqat quantize FILE.onnx`` (:doc:`/reference/cli`) on backend {BACKEND}, calibrated on {SAMPLES} drawn pages. The
torchvision models have random weights and {IMAGE} x {IMAGE} pixels, and are exported by ``torch.onnx.export``; the
other files come with Python packages.

* *float difference*: the largest difference of the module that is read from the file to the file in ONNX Runtime, in
  parts of the largest output (torchvision's ViT starts with a head of zeros);
* *names kept*: inputs and outputs of the quantized file have the names of the float file;
* *certificate*: of the quantized file (:doc:`/concepts/verify`), or why the file is refused;
* *cosine to float*: outputs of the quantized file to those of the float one;
* *size*: of the quantized file, in that of the float one.

Written by ``tests/benchmarks/onnx_in.py`` with torch {experiments.torch_versions(results)}; do not edit.

{table.get_string()}
"""
    arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    experiments.command_line(
        __file__, str(__doc__), "onnx_in.rst", run, report, {"files": [*parity.MODELS, *SHIPPED]}, needs_data=False
    )

"""The debug bundle: one zip file with which somebody else sees the same failure."""

from __future__ import annotations

import inspect
import json
import platform
import tempfile
import traceback
import zipfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fxqat.calibrate import calibrate
from fxqat.convert_export import convert_export
from fxqat.errors import ConfigError
from fxqat.prepare_by_platform import prepare_by_platform
from fxqat.utils.files import atomic_path
from fxqat.utils.tensors import map_tensors

PACKAGES = (
    "fxqat",
    "torch",
    "torchvision",
    "timm",
    "transformers",
    "onnx",
    "onnx-ir",
    "onnxscript",
    "onnxruntime",
    "numpy",
)

SCRIPT = '''"""Reproduce: python reproduce.py, in the folder of this file, with the versions of versions.json."""

import json
from pathlib import Path

import torch

from fxqat.cli.load_model import load_model
from fxqat.cli.write_bundle import run_steps

setup = json.loads(Path("setup.json").read_text())
weights = Path("weights.pth") if Path("weights.pth").exists() else None
torch.manual_seed(0)
model = load_model(setup["model"], weights).model
inputs = torch.load("inputs.pth", weights_only=True)
config = "config.yaml" if Path("config.yaml").exists() else None
outcome = run_steps(model, inputs, setup["backend"], config)
print(outcome.traceback)
print(outcome.summary)
'''


def write_bundle(
    path: Path, model: nn.Module, inputs: Any, backend: str, config: Path | None, name: str, with_weights: bool
) -> str:
    """Prepare, calibrate and export a model on random inputs, and write what is needed to do it again.

    Args:
        path: the zip file to write.
        model: the float model; not changed.
        inputs: example inputs, a tuple or a dict; values are random numbers.
        backend: name of the backend.
        config: a YAML file.
        name: the model on the command line.
        with_weights: whether the weights go into the file.

    Returns:
        What happened: ``"prepared, calibrated and exported"``, or the first line of the error.

    Raises:
        ConfigError: the file cannot be written.
    """
    outcome = run_steps(model, inputs, backend, None if config is None else str(config))
    sources = _sources(model, name)
    where, _, factory = name.rpartition(":")
    setup = {
        "model": f"{Path(where).name}:{factory}" if where.endswith(".py") else Path(name).name if not where else name,
        "backend": backend,
    }
    texts = {
        "reproduce.py": SCRIPT,
        "setup.json": json.dumps(setup, indent=1),
        "versions.json": json.dumps(_versions(), indent=1),
        "structure.txt": str(model),
        "inputs.txt": str(map_tensors(inputs, _described)),
        "report.txt": outcome.report,
        "outcome.txt": f"{outcome.summary}\n\n{outcome.traceback}",
    }
    if config is not None:
        texts["config.yaml"] = config.read_text(encoding="utf-8")
    with (
        atomic_path(path, ConfigError) as target,
        tempfile.TemporaryDirectory() as folder,
        zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        for file, text in texts.items():
            archive.writestr(file, text)
        for source in sources:
            archive.write(source, source.name)
        tensors = {"inputs.pth": inputs} | ({"weights.pth": model.state_dict()} if with_weights else {})
        for file, value in tensors.items():
            torch.save(value, Path(folder) / file)
            archive.write(Path(folder) / file, file)
    return outcome.summary


@dataclass(frozen=True)
class Outcome:
    """What happened.

    Args:
        summary: that it worked, or class and first line of the error.
        traceback: the full traceback, or empty.
        report: the report and the certificate, if it came so far.
    """

    summary: str
    traceback: str
    report: str


def run_steps(model: nn.Module, inputs: Any, backend: str, config: str | None) -> Outcome:
    """Prepare, calibrate and export a model on the same inputs."""
    report = "not prepared"
    try:
        gm = prepare_by_platform(model, backend, config, example_inputs=inputs).eval()
        report = str(gm.quant_report)
        calibrate(gm, [inputs], progress=False)
        with tempfile.TemporaryDirectory() as folder:
            found = convert_export(gm, inputs, Path(folder) / "model.onnx")
            report += f"\n{found.certificate}"
    except Exception as error:
        lines = str(error).splitlines() or [""]
        return Outcome(f"{type(error).__name__}: {lines[0]}", traceback.format_exc(), report)
    return Outcome("prepared, calibrated and exported", "", report)


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def _sources(model: nn.Module, name: str) -> list[Path]:
    """The user's files that the model is made from: that of MODEL, and those of its modules' classes."""
    where = name.rpartition(":")[0] or name
    paths = {Path(where).resolve()} if Path(where).is_file() else set()
    for module in model.modules():
        try:
            path = Path(inspect.getfile(type(module))).resolve()
        except (TypeError, OSError):
            continue
        if "site-packages" not in path.parts and path.is_file() and Path(torch.__file__).parent not in path.parents:
            paths.add(path)
    return sorted(paths)

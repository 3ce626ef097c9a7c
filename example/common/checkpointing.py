"""The files of a run: their paths, and how they are read and written."""

import pickle
import shutil
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from errors import UserError
from torch import nn


@dataclass(frozen=True)
class OutputFiles:
    """Paths of the files that a run writes; the JSON and the certificate are next to each quantized ONNX file."""

    folder: Path
    arch: str

    @property
    def checkpoint(self) -> Path:
        """The model after the last epoch: weights, fake-quants and training state."""
        return self.folder / f"{self.arch}_checkpoint.pth"

    @property
    def best(self) -> Path:
        """The same, after the epoch with the highest accuracy."""
        return self.folder / f"{self.arch}_model_best.pth"

    @property
    def onnx(self) -> Path:
        """The QDQ ONNX file of the last export."""
        return self.folder / f"{self.arch}_onnx_quantization.onnx"

    @property
    def best_onnx(self) -> Path:
        """The QDQ ONNX file of the epoch with the highest accuracy."""
        return self.folder / f"{self.arch}_bestonnx_quantization.onnx"

    @property
    def float_weights(self) -> Path:
        """The float model that was trained because no weights were given; a file for --model-path."""
        return self.folder / f"{self.arch}_float.pth"

    @property
    def profile_csv(self) -> Path:
        """Every layer compared with the float model, as a table."""
        return self.folder / f"{self.arch}_profile.csv"

    @property
    def profile_page(self) -> Path:
        """The same, as an HTML page."""
        return self.folder / f"{self.arch}_profile.html"

    @property
    def float_onnx(self) -> Path:
        """The float model as ONNX: the baseline for size and latency."""
        return self.folder / f"{self.arch}_onnx_float.onnx"


def open_output(folder: Path, arch: str) -> OutputFiles:
    """The files of a run; creates the folder and checks that it can be written, before any training.

    Raises:
        UserError: the folder cannot be written.
    """
    name = arch.rpartition(":")[2]  # NAME of FILE.py:NAME
    probe = folder / f".{name}_write_test"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink(missing_ok=True)  # another process of this run may have removed it
    except OSError as error:
        raise UserError(f"--output-dir {folder} cannot be written: {error.strerror}") from error
    return OutputFiles(folder, name)


def read_file(path: Path) -> Any:
    """The content of a .pth file, tensors and plain values only, on the CPU.

    Raises:
        UserError: it cannot be read, or is no such file.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except (pickle.UnpicklingError, RuntimeError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} is not a weight file: torch.load(..., weights_only=True) cannot read it") from error


def read_extra(path: Path) -> dict[str, Any]:
    """The rest of a checkpoint besides the weights: `options`, `quantized`, `training`, ...

    Raises:
        UserError: the file is not a checkpoint of this example.
    """
    content = read_file(path)
    extra = content.get("extra") if isinstance(content, dict) else None
    if not isinstance(extra, dict) or "options" not in extra:
        raise UserError(f"{path} is not a checkpoint of this example: give weights with --model-path")
    return extra


def save_float(model: nn.Module, extra: dict[str, Any], path: Path) -> None:
    """Write a float model in the layout of a quantized checkpoint; a crash leaves the old file."""
    partial = path.with_name(path.name + ".partial")
    torch.save({"state_dict": model.state_dict(), "extra": extra}, partial)
    partial.replace(path)


def copy_file(source: Path, target: Path) -> None:
    """Copy a file; a crash leaves the old one."""
    partial = target.with_name(target.name + ".partial")
    shutil.copyfile(source, partial)
    partial.replace(target)

"""The files of a run: where they are, how they are read, and what they hold beside the weights."""

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
    """Paths of what a run writes, named as in the guide; JSON and certificate lie beside each quantized ONNX."""

    folder: Path
    arch: str

    @property
    def checkpoint(self) -> Path:
        """The model after the last epoch: weights, fake-quant and training state."""
        return self.folder / f"{self.arch}_checkpoint.pth"

    @property
    def best(self) -> Path:
        """The same after the epoch of the highest accuracy."""
        return self.folder / f"{self.arch}_model_best.pth"

    @property
    def onnx(self) -> Path:
        """The QDQ ONNX after the last epoch."""
        return self.folder / f"{self.arch}_onnx_quantization.onnx"

    @property
    def best_onnx(self) -> Path:
        """The QDQ ONNX after the epoch of the highest accuracy."""
        return self.folder / f"{self.arch}_bestonnx_quantization.onnx"

    @property
    def float_weights(self) -> Path:
        """The float model that was trained because no weights were given; good for --model-path."""
        return self.folder / f"{self.arch}_float.pth"

    @property
    def profile_csv(self) -> Path:
        """Every layer compared with float, as a table."""
        return self.folder / f"{self.arch}_profile.csv"

    @property
    def profile_page(self) -> Path:
        """The same as a page."""
        return self.folder / f"{self.arch}_profile.html"

    @property
    def float_onnx(self) -> Path:
        """The float model as ONNX, to compare size and latency with."""
        return self.folder / f"{self.arch}_onnx_float.onnx"


def open_output(folder: Path, arch: str) -> OutputFiles:
    """The files of a run, their folder made and found writable before any time is spent on training."""
    name = arch.rpartition(":")[2]  # of a model of the user's
    probe = folder / f".{name}_write_test"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink(missing_ok=True)  # processes of one run do this at the same time
    except OSError as error:
        raise UserError(f"--output-dir {folder} cannot be written: {error.strerror}") from error
    return OutputFiles(folder, name)


def read_file(path: Path) -> Any:
    """The content of a .pth file: tensors and plain values only, on the CPU."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except (pickle.UnpicklingError, RuntimeError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} is not a file of weights that torch.load(..., weights_only=True) reads") from error


def read_extra(path: Path) -> dict[str, Any]:
    """What a checkpoint of this example holds beside the weights: `options`, `quantized`, `training`, ..."""
    content = read_file(path)
    extra = content.get("extra") if isinstance(content, dict) else None
    if not isinstance(extra, dict) or "options" not in extra:
        raise UserError(f"{path} is not a checkpoint of this example: give weights with --model-path")
    return extra


def save_float(model: nn.Module, extra: dict[str, Any], path: Path) -> None:
    """Write a float model in the layout of a quantized one; a crash leaves the old file."""
    partial = path.with_name(path.name + ".partial")
    torch.save({"state_dict": model.state_dict(), "extra": extra}, partial)
    partial.replace(path)


def copy_file(source: Path, target: Path) -> None:
    """Copy a file; a crash leaves the old one."""
    partial = target.with_name(target.name + ".partial")
    shutil.copyfile(source, partial)
    partial.replace(target)

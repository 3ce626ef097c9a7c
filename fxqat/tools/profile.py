"""Find where accuracy is lost: compare every quantized tensor of a model with float.

Three differences are measured for each tensor:

1. *own*: its float value and the rounded float value: the error of this quantizer;
2. *output*: the outputs of the float model and of the model in which only this tensor is quantized: the effect of that
   error;
3. *cumulative*: its values in the float and in the quantized model: all errors up to here.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass
from typing import Any

import torch
from prettytable import PrettyTable
from tqdm import tqdm

from fxqat.errors import ConfigError
from fxqat.fake_quantize.state import disable_all, enable_quantization, switches_kept
from fxqat.quantization.graph_module import QuantGraphModule
from fxqat.tools.post_training.correct_bias import require_float_biases
from fxqat.tools.profiling.measure import Measurements, histograms_of
from fxqat.tools.profiling.profiled_tensor import Histogram, ProfiledTensor
from fxqat.utils.batches import read_batches
from fxqat.utils.compare import Difference
from fxqat.utils.contexts import buffers_kept, eval_mode
from fxqat.utils.files import atomic_path

DIFFERENCES = ("own", "output", "cumulative")
MEASURES = ("cosine", "sqnr", "max_error")


@dataclass(frozen=True)
class Profile:
    """The quantized tensors of a model, the worst first; prints as a table.

    Args:
        backend: name of the backend.
        tensors: sorted by ``ProfiledTensor.sort_key``.
        output: difference at the model's outputs when everything is quantized.
        histograms: histograms of the worst tensors, by name.
    """

    backend: str
    tensors: tuple[ProfiledTensor, ...]
    output: Difference
    histograms: Mapping[str, Histogram]

    def __iter__(self) -> Iterator[ProfiledTensor]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def table(self, rows: int | None = None) -> str:
        """The worst tensors as text; all of them by default."""
        kinds = [f"{kind}: {measure}" for kind in DIFFERENCES for measure in ("cosine", "dB", "max error")]
        table = PrettyTable(["tensor", *kinds, "lost", "dead", "outlier"], align="r")
        table.align["tensor"] = "l"
        for tensor in self.tensors[:rows]:
            found = [getattr(tensor, kind) for kind in DIFFERENCES]
            cells = [text for d in found for text in (f"{d.cosine:.6f}", f"{d.sqnr:.1f}", f"{d.max_error:.3g}")]
            channels = tensor.channels
            lost, dead = f"{len(channels.lost)}/{channels.count}", len(channels.dead)
            table.add_row([tensor.name, *cells, lost, dead, f"{channels.outlier:.1f}x"])
        return str(table)

    def __str__(self) -> str:
        return f"{self.backend}, all quantized, at the outputs: {self.output}\n{self.table()}"

    def write_csv(self, path: str | os.PathLike[str]) -> None:
        """Write one row per tensor, the worst first, with all digits.

        Raises:
            ConfigError: the file cannot be written.
        """
        columns = [f"{kind}_{measure}" for kind in DIFFERENCES for measure in MEASURES]
        head = ["rank", "name", "kind", "order", "scheme", *columns]
        with atomic_path(path, ConfigError) as target, target.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow([*head, "channels", "lost_channels", "dead_channels", "outlier", "widest_channel"])
            for rank, tensor in enumerate(self.tensors, 1):
                values = [value for kind in DIFFERENCES for value in astuple(getattr(tensor, kind))]
                channels = tensor.channels
                counts = [channels.count, len(channels.lost), len(channels.dead), channels.outlier, channels.widest]
                writer.writerow([rank, tensor.name, tensor.kind, tensor.order, tensor.scheme, *values, *counts])

    def write_html(self, path: str | os.PathLike[str], title: str = "Quantization profile") -> None:
        """Write one self-contained page: curves, table, and the histograms and channels of the worst tensors.

        Raises:
            ConfigError: the file cannot be written, or matplotlib is not installed.
        """
        try:
            from fxqat.tools.profiling.page import render
        except ImportError as error:
            raise ConfigError(f"Profile.write_html draws with matplotlib: pip install matplotlib ({error})") from error
        page = render(title, self.backend, self.tensors, self.output, self.histograms)
        with atomic_path(path, ConfigError) as target:
            target.write_text(page, encoding="utf-8")


def profile(gm: QuantGraphModule, batches: Iterable[Any], *, worst: int = 10, progress: bool = False) -> Profile:
    """Compare every quantized tensor with float.

    Each batch takes two forward passes and one per tensor, so use few batches: a few images are enough.

    Args:
        gm: a prepared and calibrated model; its mode and switches are unchanged.
        batches: batches of inputs, see :func:`fxqat.calibrate`. All quantized values of one batch are kept.
        worst: number of tensors to take histograms of.
        progress: show a progress bar if the output is a terminal.

    Raises:
        CalibrationError: the model is not calibrated.
        ConfigError: there are no batches, one does not fit the model, or the biases of the model were corrected (then
            it is not the float model without its fake-quants).
    """
    require_float_biases(gm, "profile")
    inputs = read_batches(gm, batches, "profile")
    with eval_mode(gm), switches_kept(gm), buffers_kept(gm), torch.no_grad():
        enable_quantization(gm)
        disable_all(gm)
        measurements = Measurements(gm)
        passes = len(inputs) * (len(measurements.quantized) + 2)
        with tqdm(total=passes, desc="profile", leave=False, disable=None if progress else True) as bar:
            for batch in inputs:
                measurements.add(batch, bar)
        tensors = sorted(measurements.tensors(), key=lambda tensor: tensor.sort_key)
        histograms = histograms_of(gm, inputs, measurements.quantized, tensors[:worst])
    return Profile(gm.quant_report.backend, tuple(tensors), measurements.all_quantized.difference(), histograms)

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any

import torch
from prettytable import PrettyTable
from torch import nn
from tqdm import tqdm

from fxqat.errors import ConfigError
from fxqat.fake_quantize.state import disable_all, enable_quantization, switches_kept
from fxqat.quantization.graph_module import QuantGraphModule, prepared_model, require_float_model
from fxqat.tools.profiling.charts import curves, histogram, ranges
from fxqat.tools.profiling.measure import Measurements, histograms_of
from fxqat.tools.profiling.page import render
from fxqat.tools.profiling.profiled_tensor import DAMAGED, HEALTHY, Histogram, ProfiledTensor
from fxqat.utils.batches import read_batches
from fxqat.utils.compare import MOST_DB, Difference, decibels
from fxqat.utils.contexts import buffers_kept, eval_mode
from fxqat.utils.files import atomic_path
from fxqat.utils.flags import check_flags
from fxqat.utils.tensors import flatten_tensors
from fxqat.version import __version__

DIFFERENCES = ("own", "output", "cumulative")
COLUMNS = ("own dB", "output dB", "cumulative dB", "max error")
MEASURES = ("cosine", "sqnr", "max_error")
CLOSENESS = (
    (20.0, "Close to the float model"),
    (10.0, "Usable, as a rule; evaluate it"),
    (-MOST_DB, "Far from the float model"),
)
"""Words for the ratio at the outputs in dB, from this one up: errors of 10 % and of 32 % of the outputs' size."""


@dataclass(frozen=True)
class Finding:
    """A tensor that is not healthy.

    Args:
        tensor: the tensor; ``tensor.verdict`` and ``tensor.why`` say what is wrong.
        share: its fraction (0 to 1) of the error at the outputs that all tensors cause, each alone.
        expected: the ratio at the outputs in dB to expect if this tensor is left float, with its ``overrides``.
    """

    tensor: ProfiledTensor
    share: float
    expected: float


@dataclass(frozen=True)
class Profile:
    """The quantized tensors of a model, the worst first; prints as a table.

    Args:
        backend: name of the backend.
        tensors: sorted by ``ProfiledTensor.sort_key``.
        output: difference at the model's outputs when everything is quantized.
        histograms: histograms of the worst tensors, by name.
        provenance: what was measured: model, samples, date and versions, as text.
    """

    backend: str
    tensors: tuple[ProfiledTensor, ...]
    output: Difference
    histograms: Mapping[str, Histogram]
    provenance: Mapping[str, str] = field(default_factory=dict)

    def __iter__(self) -> Iterator[ProfiledTensor]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def share(self, tensor: ProfiledTensor) -> float:
        """Fraction (0 to 1) of the error at the outputs that a tensor causes: of the sum of all, each alone."""
        return _noise(tensor) / (self._noise_of_all or 1.0)

    @cached_property
    def _noise_of_all(self) -> float:
        return sum(map(_noise, self.tensors))

    @property
    def findings(self) -> list[Finding]:
        """The tensors that are not healthy, those with the largest effect on the outputs first."""
        found = sorted((t for t in self.tensors if t.verdict != HEALTHY), key=lambda t: t.output.sqnr)
        return [Finding(t, self.share(t), self._expected(self.share(t))) for t in found]

    def overrides(self) -> list[Mapping[str, Any]]:
        """The rules for ``overrides`` in ``prepare_custom_config_dict`` that leave all of ``findings`` float."""
        rules = [rule for found in self.findings for rule in found.tensor.overrides]
        return [rule for number, rule in enumerate(rules) if rule not in rules[:number]]

    @property
    def verdict(self) -> str:
        """In words: how close the quantized model is to the float model, and which tensors to change."""
        found = self.findings
        close = next(words for least, words in CLOSENESS if self.output.sqnr >= least)
        text = f"{close}: {self.output.sqnr:.1f} dB at the outputs with everything quantized"
        if not found:
            return f"{text}. All {len(self)} tensors are healthy."
        damaged = sum(each.tensor.verdict == DAMAGED for each in found)
        share = min(1.0, sum(each.share for each in found))
        return (
            f"{text}. Of {len(self)} tensors, {damaged} are damaged, {len(found) - damaged} need a look; together they "
            f"cause {share:.0%} of the error. If they are left float, expect {self._expected(share):.1f} dB."
        )

    def table(self, rows: int | None = None) -> str:
        """The worst tensors as text; all of them by default."""
        table = PrettyTable(["tensor", "kind", "verdict", "error", *COLUMNS, "lost", "dead", "outlier"], align="r")
        table.align["tensor"] = table.align["kind"] = table.align["verdict"] = "l"
        for tensor in self.tensors[:rows]:
            found = [getattr(tensor, kind) for kind in DIFFERENCES]
            cells = [f"{d.sqnr:.1f}" for d in found] + [f"{tensor.output.max_error:.3g}"]
            channels = tensor.channels
            lost, dead = f"{len(channels.lost)}/{channels.count}", len(channels.dead)
            head = [tensor.name, tensor.kind, tensor.verdict, f"{self.share(tensor):.1%}"]
            table.add_row([*head, *cells, lost, dead, f"{channels.outlier:.1f}x"])
        return str(table)

    def __str__(self) -> str:
        return f"{self.backend}, all quantized, at the outputs: {self.output}\n{self.verdict}\n{self.table()}"

    def _expected(self, share: float) -> float:
        """The ratio at the outputs without a share of the error, in dB."""
        return min(MOST_DB, self.output.sqnr - decibels(max(0.0, 1 - share), 1.0))

    def write_csv(self, path: str | os.PathLike[str]) -> None:
        """Write one row per tensor, the worst first, with all digits.

        Raises:
            ConfigError: the file cannot be written.
        """
        columns = [f"{kind}_{measure}" for kind in DIFFERENCES for measure in MEASURES]
        head = ["rank", "name", "kind", "order", "scheme", "verdict", "share", *columns]
        with atomic_path(path, ConfigError) as target, target.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow([*head, "channels", "lost_channels", "dead_channels", "outlier", "widest_channel"])
            for rank, tensor in enumerate(self.tensors, 1):
                values = [value for kind in DIFFERENCES for value in astuple(getattr(tensor, kind))]
                channels = tensor.channels
                counts = [channels.count, len(channels.lost), len(channels.dead), channels.outlier, channels.widest]
                about = [tensor.name, tensor.kind, tensor.order, tensor.scheme, tensor.verdict, self.share(tensor)]
                writer.writerow([rank, *about, *values, *counts])

    def write_html(self, path: str | os.PathLike[str], title: str = "Quantization profile") -> None:
        """Write one self-contained page: verdict, findings with overrides, tables, curves and histograms.

        Raises:
            ConfigError: the file cannot be written.
        """
        page = render(
            title=title,
            found=self,
            curves=curves(self.tensors),
            details=[
                (tensor, histogram(self.histograms[tensor.name]), ranges(tensor))
                for tensor in self.tensors
                if tensor.name in self.histograms
            ],
        )
        with atomic_path(path, ConfigError) as target:
            target.write_text(page, encoding="utf-8")


def profile(gm: nn.Module, batches: Iterable[Any], *, worst: int = 10, progress: bool = True) -> Profile:
    """Compare every quantized tensor with float.

    For each tensor the float model runs once more, from that tensor on, so use few batches: a few images are enough.

    Args:
        gm: a prepared and calibrated model; its mode and switches are unchanged.
        batches: batches of inputs, see :func:`fxqat.calibrate`.
        worst: number of tensors to take histograms of.
        progress: show a progress bar if the output is a terminal.

    Raises:
        CalibrationError: the model is not calibrated.
        ConfigError: there are no batches, one does not fit the model, or weights or biases of the model were fitted to
            quantization errors (then it is not the float model without its fake-quants).
    """
    check_flags(ConfigError, "profile", progress=progress)
    gm = prepared_model(gm, ConfigError)
    require_float_model(gm, "profile")
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
    return Profile(
        gm.quant_report.backend,
        tuple(tensors),
        measurements.all_quantized.difference(),
        histograms,
        _provenance(gm, inputs),
    )


def _noise(tensor: ProfiledTensor) -> float:
    """The error at the outputs that a tensor causes alone, relative to their mean square."""
    return 0.0 if tensor.output.sqnr >= MOST_DB else float(10 ** (-tensor.output.sqnr / 10))


def _provenance(gm: QuantGraphModule, batches: Sequence[tuple[Any, ...]]) -> dict[str, str]:
    first = [next((x for x in flatten_tensors(batch) if x.dim()), None) for batch in batches]
    samples = sum(1 if x is None else len(x) for x in first)
    return {
        "model": type(gm).__name__,
        "backend": gm.quant_report.backend,
        "samples": f"{samples} in {len(batches)} batch{'es' if len(batches) > 1 else ''}",
        "date": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        "versions": f"fxqat {__version__}, torch {torch.__version__}",
    }

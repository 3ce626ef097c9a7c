"""The charts of measured pages, each drawn from the first table of its page when the site is built.

The pictures are not kept: a chart cannot be older than its table. ``tables.py`` puts them into the pages.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

Row = dict[str, str]
COLORS = ("#9aa5b1", "#2563eb", "#f59e0b", "#10b981", "#8b5cf6")
NUMBER = re.compile(r"[+-]?\d+(?:\.\d+)?")
HEAD, LINE, LABEL = 1.1, 0.2, 36
"""In inches: the height of the title, the axis and the legend, and of a line; in characters: the width of a label."""


@dataclass(frozen=True)
class Chart:
    """A chart of dots: one line for each row of the table, one color for each series."""

    title: str
    label: tuple[str, ...]
    """The columns whose texts name a row."""
    series: Mapping[str, str]
    """By the words of the legend: the column with its figures. A cell without a figure has no dot."""
    line: float | None = None
    """Where a dashed line stands."""

    def figures(self, rows: list[Row]) -> dict[str, dict[str, float]]:
        """By series and by row, the figures; a row without any is left out.

        Raises:
            ValueError: two rows have the same name, or a series has no figures.
        """
        found: dict[str, dict[str, float]] = {words: {} for words in self.series}
        for row in rows:
            name = ", ".join(row[column] for column in self.label if row[column])
            for words, column in self.series.items():
                if number := NUMBER.search(row[column]):
                    if name in found[words]:
                        raise ValueError(f"two rows of the chart {self.title!r} are named {name!r}")
                    found[words][name] = float(number[0])
        if empty := [words for words, points in found.items() if not points]:
            raise ValueError(f"the table has no figures for {', '.join(empty)} of the chart {self.title!r}")
        return found

    def draw(self, rows: list[Row], path: Path) -> None:
        """Write the chart as SVG."""
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure

        figures = self.figures(rows)
        names = list(dict.fromkeys(name for points in figures.values() for name in points))[::-1]
        lines = max(len(textwrap.wrap(name, LABEL)) for name in names)
        figure = Figure(figsize=(7, HEAD + LINE * len(names) * max(lines, 1.2)), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        for color, (words, points) in zip(COLORS, figures.items(), strict=False):
            places = [names.index(name) for name in points]
            axes.scatter(list(points.values()), places, color=color, label=words, s=28, zorder=3)
        if self.line is not None:
            axes.axvline(self.line, color="black", linewidth=0.8, linestyle="--")
        axes.set_yticks(range(len(names)), [textwrap.fill(name, LABEL) for name in names])
        axes.set_ylim(-0.6, len(names) - 0.4)
        axes.grid(color="#e5e7eb")
        axes.spines[:].set_visible(False)
        axes.set_title(self.title, fontsize="medium")
        if len(figures) > 1:
            figure.legend(loc="outside lower center", ncols=len(figures), frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})


CHARTS: dict[str, Chart] = {
    "evidence/accuracy_imagenet_example": Chart(
        "Top-1, %",
        ("model",),
        {"float": "float", "calibrated": "fake-quant, calibrated", "finetuned": "fake-quant, finetuned"},
    ),
    "evidence/accuracy_ladder": Chart(
        "Metric on the images held back: float, and quantized within the budget",
        ("model", "bits", "budget"),
        {"float": "held back: float", "quantized": "quantized 2"},
    ),
    "evidence/accuracy_mixed_precision": Chart(
        "Top-1, % at the same size: chosen layer by layer, and uniform",
        ("weights",),
        {bits: bits for bits in ("3 bits", "4 bits", "5 bits", "6 bits")},
    ),
    "evidence/accuracy_mobilenet_v2": Chart("Top-1, %", ("backend",), {"top-1": "top-1"}),
    "evidence/accuracy_ptq": Chart(
        "Top-1, %, without training",
        ("model", "backend", "bits", "weight ranges", "steps", "images", "iterations"),
        {"float": "float", "quantized": "top-1"},
    ),
    "evidence/accuracy_qat": Chart(
        "Top-1, %, by bits of weights and activations",
        ("method",),
        {bits: bits for bits in ("W4A4", "W4A4, ends at 8", "W3A3, ends at 8", "W2A4, ends at 8")},
    ),
    "evidence/accuracy_recurrent": Chart(
        "Right, % of the test images", ("network", "form"), {"float": "float", "calibrated": "PTQ", "trained": "QAT"}
    ),
    "evidence/accuracy_resnet20": Chart("Top-1, %", ("setting", "backend"), {"calibrated": "PTQ", "trained": "QAT"}),
    "evidence/accuracy_yolov5": Chart("mAP50-95", ("backend", "epochs"), {"mAP50-95": "mAP50-95"}),
    "evidence/cost_against_size": Chart(
        "Milliseconds a layer, by the number of layers",
        ("layers",),
        {"prepare": "prepare, ms a layer", "calibrate": "calibrate, ms a layer", "export": "export, ms a layer"},
    ),
    "evidence/ort_latency": Chart(
        "Times as fast as float, and as ONNX Runtime's own quantizer",
        ("model",),
        {"as float": "float / fxqat", "as quantize_static": "static / fxqat"},
        line=1,
    ),
    "evidence/prepare_time": Chart(
        "Seconds to prepare", ("model",), {"prepare": "prepare", "with inputs": "with inputs"}
    ),
    "evidence/dynamic_latency": Chart(
        "Times as fast as float in ONNX Runtime, batch 1", ("Model",), {"dynamic": "Times faster"}, line=1
    ),
    "evidence/runtime_latency": Chart(
        "Latency over the float file's in ONNX Runtime",
        ("model",),
        {"TSQAT": "TSQAT", 'TSQAT, runtime="onnxruntime"': "rewritten", "ONNXRuntime": "ONNXRuntime"},
        line=1,
    ),
    "evidence/step_time": Chart(
        "Step time over the float model's", ("model", "mode", "variant"), {"over float": "over float"}, line=1
    ),
    "evidence/step_time_gpu": Chart(
        "Step time over the float model's", ("model", "batch", "mode", "variant"), {"over float": "over float"}, line=1
    ),
}

"""The HTML page of a profile, self-contained with its drawings."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fxqat.tools.profiling.profiled_tensor import Histogram, ProfiledTensor
from fxqat.utils.compare import MOST_DB, Difference

TEMPLATE = Path(__file__).with_name("page.html.jinja")
OUTLIER = 10.0
"""The findings name each tensor whose widest channel has at least this many times the median range."""

LOST_CHANNELS = 0.05
"""They also name each tensor that loses at least this fraction of its channels."""

OWN, OUTPUT, CUMULATIVE, NEUTRAL = "#1b7837", "#c51b7d", "#2166ac", "#777777"
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "fxqat",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
}
BOX = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 1}


def render(
    title: str,
    backend: str,
    tensors: Sequence[ProfiledTensor],
    output: Difference,
    histograms: Mapping[str, Histogram],
) -> str:
    """The page as text.

    Args:
        title: heading of the page.
        backend: name of the backend.
        tensors: the worst first.
        output: difference at the model's outputs when everything is quantized.
        histograms: histograms of the tensors that are drawn one by one.
    """
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters["db"] = lambda value: "exact" if value >= MOST_DB else f"{value:.1f}"
    drawn = [tensor for tensor in tensors if tensor.name in histograms]
    with matplotlib.rc_context(STYLE):
        details = [(t, _svg(_histogram(t, histograms[t.name])), _svg(_ranges(t))) for t in drawn]
        curves = _svg(_curves(tensors))
    outliers = [tensor for tensor in tensors if tensor.channels.outlier >= OUTLIER]
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=title,
        backend=backend,
        tensors=tensors,
        output=output,
        curves=curves,
        details=details,
        drawn={tensor.name for tensor in drawn},
        strongest=sorted(tensors, key=lambda tensor: tensor.output.sqnr)[:3],
        lost=[tensor for tensor in tensors if tensor.channels.lost_share >= LOST_CHANNELS],
        dead=[tensor for tensor in tensors if tensor.channels.dead],
        outliers=sorted(outliers, key=lambda tensor: -tensor.channels.outlier),
        outlier=OUTLIER,
    )


def _svg(figure: Figure) -> str:
    """A figure as an HTML element."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None}, bbox_inches="tight")
    text = file.getvalue()
    return text[text.index("<svg") :]


def _curves(tensors: Sequence[ProfiledTensor]) -> Figure:
    """The three signal to noise ratios in the order of execution."""
    figure = Figure(figsize=(11, 4))
    axes: Axes = figure.subplots()
    ordered = sorted(tensors, key=lambda tensor: tensor.order)
    activations = [tensor for tensor in ordered if tensor.kind == "activation"]
    for label, colour, chosen, values in (
        ("own rounding", OWN, ordered, [t.own.sqnr for t in ordered]),
        ("its effect on the output", OUTPUT, ordered, [t.output.sqnr for t in ordered]),
        ("cumulative (activations)", CUMULATIVE, activations, [t.cumulative.sqnr for t in activations]),
    ):
        axes.plot([t.order for t in chosen], values, ".-", color=colour, label=label, linewidth=1, markersize=4)
    for tensor in tensors[:3]:
        axes.annotate(tensor.name, (tensor.order, tensor.output.sqnr), fontsize=8, color=OUTPUT, bbox=BOX)
    axes.set_xlabel("tensors in the order of execution")
    axes.set_ylabel("signal to noise, dB (higher is better)")
    axes.legend(loc="upper right")
    return figure


def _histogram(tensor: ProfiledTensor, histogram: Histogram) -> Figure:
    """Histogram of the float values, with the ends of the quantized range."""
    figure = Figure(figsize=(5.4, 2.6))
    axes: Axes = figure.subplots()
    width = (histogram.high - histogram.low) / len(histogram.counts)
    edges = [histogram.low + width * i for i in range(len(histogram.counts) + 1)]
    axes.stairs(histogram.counts, edges, fill=True, color=NEUTRAL)
    axes.set_yscale("symlog", linthresh=1)
    for end in histogram.grid:
        axes.axvline(end, color=OUTPUT, linewidth=1, linestyle="--")
    axes.set_xlim(*_with_margin(min(histogram.low, histogram.grid[0]), max(histogram.high, histogram.grid[1])))
    axes.set_xlabel("float values; dashed: ends of the quantized range")
    axes.set_ylabel("count")
    return figure


def _ranges(tensor: ProfiledTensor) -> Figure:
    """The range of each channel; lost and dead channels are marked."""
    figure = Figure(figsize=(5.4, 2.6))
    axes: Axes = figure.subplots()
    ranges = tensor.channels.ranges
    smallest = min((value for value in ranges if value > 0), default=1.0)
    dead, lost = set(tensor.channels.dead), set(tensor.channels.lost)
    kinds = {
        "kept": (NEUTRAL, [c for c in range(len(ranges)) if c not in dead | lost]),
        "lost": (OUTPUT, sorted(lost)),
        "dead": (CUMULATIVE, sorted(dead)),
    }
    for label, (colour, channels) in kinds.items():
        if channels:
            heights = [max(ranges[c], smallest / 2) for c in channels]
            axes.plot(channels, heights, ".", color=colour, label=f"{label}: {len(channels)}", markersize=4)
    axes.set_yscale("log")
    axes.set_xlabel("channel")
    axes.set_ylabel("largest |value|")
    axes.legend(loc="best", fontsize=8)
    return figure


def _with_margin(low: float, high: float) -> tuple[float, float]:
    margin = 0.03 * (high - low or 1.0)
    return low - margin, high + margin

"""Charts of a profile as SVG text, small, with names that appear under the pointer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from fxqat.tools.profiling.profiled_tensor import Histogram, ProfiledTensor

LEFT, RIGHT, TOP, BOTTOM = 48, 8, 8, 34
"""Space around the area of a chart, in units of the drawing."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Axis:
    """A range of values that is drawn along a line.

    Args:
        label: text at the axis.
        low: smallest value.
        high: largest value, above ``low``; both are positive if ``log``.
        log: whether steps are factors.
    """

    label: str
    low: float
    high: float
    log: bool = False

    def place(self, value: float) -> float:
        """Where a value is, from 0 to 1."""
        low, high, value = map(math.log10, (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        return (value - low) / (high - low)

    def ticks(self) -> list[float]:
        """Some round values: powers of ten if ``log``, unless there is at most one."""
        if self.log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            if last > first:
                return [10.0**power for power in range(first, last + 1, 1 + (last - first) // 5)]
        size = 10.0 ** math.floor(math.log10((self.high - self.low) / 4))
        step = next(size * factor for factor in (1, 2, 5, 10) if (self.high - self.low) / (size * factor) <= 6)
        return [step * i for i in range(math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1)]


class Chart:
    """Collects the marks of a chart.

    Args:
        x: the horizontal axis.
        y: the vertical axis.
        width: in units of the drawing, which the page scales.
        height: the same.
    """

    def __init__(self, x: Axis, y: Axis, width: int = 520, height: int = 240) -> None:
        self.x, self.y, self.width, self.height = x, y, width, height
        self._marks = [*self._frame()]

    def at(self, point: Point) -> str:
        """Coordinates of a point."""
        x = LEFT + self.x.place(point[0]) * (self.width - LEFT - RIGHT)
        y = self.height - BOTTOM - self.y.place(point[1]) * (self.height - TOP - BOTTOM)
        return f"{x:.1f} {y:.1f}"

    def line(self, points: Sequence[Point], css: str, names: Iterable[str] = ()) -> None:
        """A line through points, each with a dot; names are shown under the pointer."""
        if points:
            self._path("M" + "L".join(map(self.at, points)), f"line {css}")
        for point, name in zip(points, names, strict=False):
            x, y = self.at(point).split()
            self._marks.append(f'<circle class="{css}" cx="{x}" cy="{y}" r="3"><title>{escape(name)}</title></circle>')

    def dots(self, points: Sequence[Point], css: str) -> None:
        """Points without names."""
        self._path("".join(f"M{self.at(point)}h0" for point in points), f"dots {css}")

    def area(self, corners: Sequence[Point], css: str) -> None:
        """A filled polygon."""
        self._path("M" + "L".join(map(self.at, corners)) + "Z", f"area {css}")

    def __str__(self) -> str:
        label = escape(f"{self.y.label} against {self.x.label}")
        marks = "\n".join(self._marks)
        return f'<svg viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{label}">\n{marks}\n</svg>'

    def _path(self, d: str, css: str) -> None:
        self._marks.append(f'<path class="{css}" d="{d}"/>')

    def _frame(self) -> Iterator[str]:
        bottom, right = self.height - BOTTOM, self.width - RIGHT
        for tick in self.x.ticks():
            x = self.at((tick, self.y.low)).split()[0]
            yield f'<path class="grid" d="M{x} {TOP}V{bottom}"/>'
            yield f'<text x="{x}" y="{bottom + 13}" text-anchor="middle">{tick:g}</text>'
        for tick in self.y.ticks():
            y = self.at((self.x.low, tick)).split()[1]
            yield f'<path class="grid" d="M{LEFT} {y}H{right}"/>'
            yield f'<text x="{LEFT - 4}" y="{y}" dy="4" text-anchor="end">{tick:g}</text>'
        across, down = (LEFT + right) // 2, (TOP + bottom) // 2
        yield f'<text x="{across}" y="{self.height - 4}" text-anchor="middle">{escape(self.x.label)}</text>'
        yield f'<text transform="translate(11 {down}) rotate(-90)" text-anchor="middle">{escape(self.y.label)}</text>'


def curves(tensors: Sequence[ProfiledTensor]) -> Chart:
    """The signal to noise ratios in the order of execution."""
    ordered = sorted(tensors, key=lambda tensor: tensor.order)
    activations = [tensor for tensor in ordered if tensor.kind == "activation"]
    weights = [tensor for tensor in ordered if tensor.kind == "weight"]
    series: Mapping[str, tuple[list[ProfiledTensor], list[float]]] = {
        "weight": (weights, [t.own.sqnr for t in weights]),
        "activation": (activations, [t.own.sqnr for t in activations]),
        "cumulative": (activations, [t.cumulative.sqnr for t in activations]),
        "output": (ordered, [t.output.sqnr for t in ordered]),
    }
    values = [value for _, found in series.values() for value in found]
    x = Axis("tensors in the order of execution", *_widened(0, len(ordered) - 1))
    chart = Chart(x, Axis("dB, higher is better", *_widened(min(values), max(values))), 1000, 340)
    for kind, (chosen, ratios) in series.items():
        names = [f"{t.name}: {kind} {ratio:.1f} dB" for t, ratio in zip(chosen, ratios, strict=True)]
        chart.line([(t.order, ratio) for t, ratio in zip(chosen, ratios, strict=True)], kind, names)
    return chart


def histogram(found: Histogram) -> Chart:
    """Histogram of the float values, with the ends of the quantized range."""
    width = (found.high - found.low) / len(found.counts)
    filled = [i for i, count in enumerate(found.counts) if count]
    low, high = (found.low + width * i for i in ((filled[0], filled[-1] + 1) if filled else (0, len(found.counts))))
    x = Axis(
        "float values; dashed: ends of the quantized range",
        *_widened(min(low, found.grid[0]), max(high, found.grid[1])),
    )
    y = Axis("count", 0.5, 2.0 * max(1, *found.counts), log=True)
    chart = Chart(x, y)
    for i in filled:
        left, right = found.low + width * i, found.low + width * (i + 1)
        chart.area([(left, y.low), (left, found.counts[i]), (right, found.counts[i]), (right, y.low)], "plain")
    for end in found.grid:
        chart.line([(end, y.low), (end, y.high)], "end")
    return chart


def ranges(tensor: ProfiledTensor) -> Chart:
    """The range of each channel; lost and dead channels are marked, the dead ones at the bottom."""
    found = tensor.channels.ranges
    alive = [value for value in found if value > 0] or [1.0]
    lowest = min(alive) / 2
    y = Axis("largest |value|", lowest / 1.2, 1.2 * max(alive), log=True)
    chart = Chart(Axis("channel", *_widened(0, len(found) - 1)), y)
    dead, lost = set(tensor.channels.dead), set(tensor.channels.lost)
    kept = set(range(len(found))) - dead - lost
    for css, channels in (("plain", kept), ("lost", lost), ("dead", dead)):
        if channels:
            chart.dots([(channel, max(found[channel], lowest)) for channel in sorted(channels)], css)
    return chart


def _widened(low: float, high: float) -> tuple[float, float]:
    margin = 0.03 * (high - low) or 1.0
    return low - margin, high + margin

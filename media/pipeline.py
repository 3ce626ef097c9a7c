"""Draws the pipeline of fxqat: python media/pipeline.py [output file; default media/pipeline.svg].

The ending of the output file chooses the format (.svg, .png, .pdf). The SVG holds no date and no random identifiers, so
that drawing it again with the same matplotlib gives the same file.
"""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

INK, MUTED = "#1f2933", "#52606d"
PASS_WIDTH, PASS_HEIGHT = 2.3, 1.05

# Each row: the call that runs it, its colour, and its stages as (name, what it does).
ROWS = [
    (
        "prepare_by_platform",
        "#dbeafe",
        "#2563eb",
        [
            ("trace", "forward()\nbecomes a graph"),
            ("standardize", "one spelling\nper operation"),
            ("fuse", "Conv + BN + ReLU\nbecome one module"),
            ("annotate", "what is quantized,\nhow, and why"),
            ("insert", "fake-quant nodes\nand QAT modules"),
        ],
    ),
    (
        "your training code",
        "#dcfce7",
        "#16a34a",
        [
            ("calibrate", "observe ranges on\na few batches"),
            ("train", "weights and scales\nlearn together"),
        ],
    ),
    (
        "convert_export",
        "#ffedd5",
        "#ea580c",
        [
            ("fold + lower", "fold BN, keep the\nquantized values"),
            ("onnx passes", "integer weights,\nint32 bias, names"),
            ("verify", "ONNX Runtime against\nthe trained model"),
        ],
    ),
]
GAP = 0.5
ROW_STEP = 2.25
LEFT = 2.45


def draw_box(ax, x, y, width, height, face, edge, title, text):
    """Draws one rounded box with its lower left corner at (x, y)."""
    style = "round,pad=0,rounding_size=0.12"
    ax.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=face, edgecolor=edge, linewidth=1.2))
    middle = x + width / 2
    ax.text(middle, y + height - 0.27, title, ha="center", va="center", fontsize=11, weight="bold", color=INK)
    ax.text(middle, y + 0.37, text, ha="center", va="center", fontsize=8.5, color=MUTED, linespacing=1.25)


def draw_arrow(ax, points):
    """Draws a line through the points with an arrow head at its end."""
    xs, ys = zip(*points[:-1], strict=True)
    ax.plot(xs, ys, color=MUTED, linewidth=1.3, solid_capstyle="butt", solid_joinstyle="round")
    style = {"arrowstyle": "-|>", "mutation_scale": 12, "color": MUTED, "linewidth": 1.3, "shrinkA": 0, "shrinkB": 0}
    ax.add_patch(FancyArrowPatch(points[-2], points[-1], **style))


def stage_x(index):
    """Returns the left edge of the stage at the index."""
    return LEFT + index * (PASS_WIDTH + GAP)


def draw_row(ax, y, face, edge, call, stages):
    """Draws the call of a row and its stages, joined by arrows; y is the lower edge."""
    middle = y + PASS_HEIGHT / 2
    ax.text(LEFT - GAP, middle, call, ha="right", va="center", fontsize=9.5, family="monospace", color=edge)
    for index, (name, text) in enumerate(stages):
        x = stage_x(index)
        draw_box(ax, x, y, PASS_WIDTH, PASS_HEIGHT, face, edge, name, text)
        if index:
            draw_arrow(ax, [(x - GAP, middle), (x, middle)])


def new_figure(width, top):
    """Returns a figure without margins, and its axes from -0.25 to the given ends."""
    figure = plt.figure(figsize=((width + 0.25) * 0.8, (top + 0.25) * 0.8))
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set(xlim=(-0.25, width), ylim=(-0.25, top))
    ax.set_axis_off()
    return figure, ax


def draw():
    """Returns the figure."""
    rows_y = [2 * ROW_STEP, ROW_STEP, 0.0]
    width, top = stage_x(5) - GAP + 0.25, rows_y[0] + PASS_HEIGHT + 1.1
    figure, ax = new_figure(width, top)

    for y, (call, face, edge, stages) in zip(rows_y, ROWS, strict=True):
        draw_row(ax, y, face, edge, call, stages)

    first = stage_x(0) + PASS_WIDTH / 2
    ax.text(first, top - 0.25, "your float model", ha="center", va="center", fontsize=11, color=INK)
    draw_arrow(ax, [(first, top - 0.5), (first, rows_y[0] + PASS_HEIGHT)])
    for upper, lower, (_, _, _, stages) in zip(rows_y[:-1], rows_y[1:], ROWS[:-1], strict=True):
        last = stage_x(len(stages) - 1) + PASS_WIDTH / 2
        between = (upper + lower + PASS_HEIGHT) / 2
        draw_arrow(ax, [(last, upper), (last, between), (first, between), (first, lower + PASS_HEIGHT)])

    x, middle = stage_x(3), PASS_HEIGHT / 2
    draw_arrow(ax, [(x - GAP, middle), (x, middle)])
    draw_box(ax, x, 0.0, 2 * PASS_WIDTH + GAP, PASS_HEIGHT, "#f1f5f9", MUTED, "what you ship", "")
    files = "model.onnx (QDQ)   model.json (all scales)\nmodel.parity.json (the certificate)"
    center = x + PASS_WIDTH + GAP / 2
    ax.text(center, 0.37, files, ha="center", va="center", fontsize=8.5, family="monospace", color=MUTED)
    return figure


def save(draw, default):
    """Writes a drawing to the file named on the command line, or to the default."""
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    settings = {"svg.hashsalt": "fxqat", "svg.fonttype": "path", "font.family": "DejaVu Sans"}
    with plt.rc_context(settings):
        metadata = {"Date": None} if output.suffix == ".svg" else None
        draw().savefig(output, facecolor="white", dpi=120, metadata=metadata)


if __name__ == "__main__":
    save(draw, Path(__file__).with_suffix(".svg"))

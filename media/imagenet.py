"""Draws a run of example/imagenet_example: python media/imagenet.py [output file; default media/imagenet.svg].

It uses the boxes and arrows of ``pipeline.py``.
"""

from pathlib import Path

from pipeline import INK, MUTED, PASS_HEIGHT, PASS_WIDTH, draw_arrow, draw_box, new_figure, save

BLUE, GREEN, ORANGE, GREY = (
    ("#dbeafe", "#2563eb"),
    ("#dcfce7", "#16a34a"),
    ("#ffedd5", "#ea580c"),
    ("#f1f5f9", MUTED),
)
GAP, ROW_STEP, LEFT = 0.5, 2.0, 1.3

# Row 2: the steps from left to right, with their flags.
STEPS = [
    (BLUE, "prepare", "--backend\n--quant-config"),
    (GREEN, "calibrate", "--calib-batches"),
    (GREY, "profile", "--profile"),
    (GREEN, "finetune", "--epochs --lr --optim\n--distill-method --amp"),
    (ORANGE, "export + verify", "--onnx-batch\n--opset-version"),
    (GREY, "compare", "float, fake-quant,\nONNX Runtime"),
]
FILES = [
    (2, "profile.csv\nprofile.html"),
    (3, "checkpoint.pth\nmodel_best.pth"),
    (4, "quantization.onnx\n.json  .parity.json"),
    (5, "the table"),
]


def place(index):
    """Returns the left edge of a step."""
    return LEFT + index * (PASS_WIDTH + GAP)


def draw():
    """Returns the figure."""
    rows = [2 * ROW_STEP, ROW_STEP, 0.0]
    figure, ax = new_figure(place(len(STEPS)) - GAP + 0.25, rows[0] + PASS_HEIGHT + 0.5)
    for row, name in zip(rows[:2], ("step 1", "step 2"), strict=True):
        ax.text(LEFT - GAP, row + PASS_HEIGHT / 2, name, ha="right", va="center", fontsize=11, weight="bold", color=INK)

    draw_box(ax, place(0), rows[0], PASS_WIDTH, PASS_HEIGHT, *BLUE, "float model", "--arch --model-zoo\n--model-path")
    draw_box(ax, place(1), rows[0], PASS_WIDTH, PASS_HEIGHT, *GREY, "test it", "-e --not-qat")
    draw_box(ax, place(3), rows[0], PASS_WIDTH, PASS_HEIGHT, *BLUE, "teacher", "the float model, or\n--teacher-arch")
    middle = rows[0] + PASS_HEIGHT / 2
    draw_arrow(ax, [(place(1) - GAP, middle), (place(1), middle)])
    for index in (0, 3):
        x = place(index) + PASS_WIDTH / 2
        draw_arrow(ax, [(x, rows[0]), (x, rows[1] + PASS_HEIGHT)])

    for index, (colours, title, text) in enumerate(STEPS):
        draw_box(ax, place(index), rows[1], PASS_WIDTH, PASS_HEIGHT, *colours, title, text)
        if index:
            middle = rows[1] + PASS_HEIGHT / 2
            draw_arrow(ax, [(place(index) - GAP, middle), (place(index), middle)])

    for index, text in FILES:
        x = place(index) + PASS_WIDTH / 2
        draw_arrow(ax, [(x, rows[1]), (x, rows[2] + PASS_HEIGHT)])
        ax.text(x, rows[2] + 0.6, text, ha="center", va="center", fontsize=8.5, family="monospace", color=MUTED)
    return figure


if __name__ == "__main__":
    save(draw, Path(__file__).with_suffix(".svg"))

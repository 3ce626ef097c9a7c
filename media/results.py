"""Draws media/results.svg from the tables of docs/evidence: python media/results.py."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EVIDENCE = ROOT / "docs" / "evidence"
OUTPUT = ROOT / "media" / "results.svg"
INK, GREY, BLUE, LIGHT = "#1f2933", "#9aa5b1", "#2563eb", "#e5e7eb"
LEFT, WIDTH, ROW = 200, 330, 19


def rows(page: str) -> list[dict[str, str]]:
    """The rows of the first table of a page, by the names of its columns."""
    lines = (EVIDENCE / f"{page}.rst").read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[1:] if len(row) == len(cells[0])]


def speeds() -> list[tuple[str, float, float]]:
    """How many times faster than float: ONNX Runtime's own quantizer, and fxqat."""
    return [
        (row["model"], float(row["float"]) / float(row["static"]), float(row["float / fxqat"]))
        for row in rows("ort_latency")
    ]


def accuracies() -> list[tuple[str, float, float]]:
    """Float and int8 after calibration, in percent."""
    resnet, mobilenet, yolo = rows("accuracy_resnet20"), rows("accuracy_mobilenet_v2"), rows("accuracy_yolov5")
    by_backend = {row["backend"]: float(row["top-1"]) for row in mobilenet}
    quantized = next(row for row in resnet if (row["setting"], row["backend"]) == ("W8A8", "ONNXRuntime"))
    maps = {row["backend"]: 100 * float(row["mAP50-95"]) for row in yolo if not row["epochs"]}
    return [
        ("ResNet20, CIFAR-10, top-1", float(resnet[0]["QAT"]), float(quantized["PTQ"].split()[0])),
        ("MobileNetV2, photos, top-1", by_backend["float"], by_backend["ONNXRuntime"]),
        ("YOLOv5n, COCO, mAP50-95", maps["float"], maps["ONNXRuntime"]),
    ]


def text(x: float, y: float, words: str, anchor: str = "start", weight: str = "normal", fill: str = INK) -> str:
    """A text."""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-weight="{weight}" fill="{fill}">{words}</text>'


def bars(
    top: int, title: str, key: tuple[str, str], data: list[tuple[str, float, float]], form: str, unit: float
) -> list[str]:
    """A title, and two bars for each row."""
    shapes = [text(16, top, title, weight="bold")]
    for x, color, words in ((16, GREY, key[0]), (300, BLUE, key[1])):
        shapes.append(f'<rect x="{x}" y="{top + 12}" width="11" height="11" fill="{color}"/>')
        shapes.append(text(x + 17, top + 22, words))
    for number, (name, first, second) in enumerate(data):
        y = top + 38 + number * (2 * ROW + 8)
        shapes.append(text(LEFT - 8, y + ROW + 3, name, "end"))
        for place, (value, color) in enumerate(((first, GREY), (second, BLUE))):
            shapes.append(
                f'<rect x="{LEFT}" y="{y + place * ROW}" width="{value * unit:.1f}" height="{ROW - 3}" fill="{color}"/>'
            )
            shapes.append(text(LEFT + value * unit + 6, y + place * ROW + 13, form.format(value)))
    return shapes


def draw() -> str:
    """The picture."""
    fast, right = speeds(), accuracies()
    second = 60 + len(right) * (2 * ROW + 8) + 40
    height = second + 50 + len(fast) * (2 * ROW + 8)
    shapes = bars(
        28, "Accuracy in 8 bits, calibrated, not trained", ("float", "fxqat, int8"), right, "{:.1f} %", WIDTH / 100
    )
    largest = max(value for _, *values in fast for value in values)
    title = "Times as fast as float in ONNX Runtime (CPU, 2 threads)"
    shapes += bars(second, title, ("ONNX Runtime's quantize_static", "fxqat, int8"), fast, "{:.2f}", WIDTH / largest)
    shapes.append(
        f'<line x1="{LEFT + WIDTH / largest:.1f}" y1="{second + 32}" x2="{LEFT + WIDTH / largest:.1f}" '
        f'y2="{height - 16}" stroke="{INK}" stroke-dasharray="3 3"/>'
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 600 {height}" font-family="sans-serif" font-size="13">'
    )
    return "\n".join(
        [head, f'<rect width="600" height="{height}" rx="6" fill="white" stroke="{LIGHT}"/>', *shapes, "</svg>", ""]
    )


if __name__ == "__main__":
    OUTPUT.write_text(draw(), encoding="utf-8")

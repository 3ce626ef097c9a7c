r"""Measure the accuracy of a detector: a float model, a quantized checkpoint, or an ONNX file in ONNX Runtime.

python example/yolov5_example/test.py --weights yolov5s.pt --data coco.yaml --device 0
python example/yolov5_example/test.py --weights checkpoint/yolov5n_bestonnx_quantization.onnx
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "common"))  # what the examples share

import torch
from argument_types import integer, number
from dataset import read_description
from detection import HEADLINE, Scores
from detector import open_detector
from embedded import embedded_description
from errors import UserError, leaving
from logs import set_up_logging
from task import evaluate


def build_parser() -> argparse.ArgumentParser:
    """All flags."""
    parser = argparse.ArgumentParser(description="Measure a detector: precision, recall and mean average precision.")
    add = parser.add_argument
    add("--weights", type=Path, required=True, help="float weights, a checkpoint of train_qat.py, or its ONNX file")
    add("--data", type=Path, help="YOLO data.yaml, or its folder (default: the embedded digits)")
    add("--device", default="cpu", help="cpu, cuda, or the number of a GPU (default: cpu)")
    add("--img", "--img-size", type=integer(32), help="longer side in px (default: the file's, or 640, digits 160)")
    add("--batch", "--batch-size", type=integer(1), default=32, help="pictures per batch (default: 32)")
    add("--conf", type=number(0, 1), default=0.001, help="minimum confidence of a detection (default: 0.001)")
    add("--iou", type=number(0, 1), default=0.6, help="IoU above which two boxes are one object (default: 0.6)")
    add(
        "--square",
        action="store_true",
        help="pad pictures to squares, as for ONNX files (default: as little as possible)",
    )
    add("--unoptimized", action="store_true", help="run an ONNX file without ONNX Runtime's graph optimizations")
    add("--workers", type=integer(0), default=0, help="processes that load pictures (default: 0)")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    with leaving():
        flags = build_parser().parse_args(sys.argv[1:] if argv is None else argv)
        print(f"{HEADLINE}\n{measure(flags)}")


def measure(flags: argparse.Namespace) -> Scores:
    """The scores for the flags."""
    set_up_logging(1, first=True)
    description = read_description(flags.data or embedded_description())
    device = torch.device(f"cuda:{flags.device}" if flags.device.isdigit() else flags.device)
    detector = open_detector(flags.weights, device, optimize=not flags.unoptimized)
    if detector.num_classes != len(description.names):
        raise UserError(
            f"--weights {flags.weights} has {detector.num_classes} classes, {description.file} has "
            f"{len(description.names)}"
        )
    if detector.size is not None and flags.img not in (None, detector.size):
        raise UserError(f"--img {flags.img}: {flags.weights} takes images of {detector.size} px")
    size = detector.size or flags.img or (160 if flags.data is None else 640)
    rectangular = not flags.square and detector.size is None
    return evaluate(
        detector, description.pictures("val"), size, flags.batch, flags.workers, rectangular, flags.conf, flags.iou
    )  # fmt: skip


if __name__ == "__main__":
    main()

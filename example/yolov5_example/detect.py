r"""Draw the boxes that a detector finds in pictures; two detectors are drawn side by side.

    python example/yolov5_example/detect.py --weights yolov5n.pt --source street.jpg --output found
    python example/yolov5_example/detect.py --weights yolov5n.pt --beside checkpoint/yolov5n_onnx_quantization.onnx \
        --source photos --output found
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "common"))  # what the examples share

import numpy as np
import torch
from argument_types import integer, number
from dataset import SUFFIXES, File, Picture
from detection import detect
from detector import Detector, open_detector
from errors import UserError, leaving
from logs import LOG, set_up_logging
from pictures import Letterboxed
from PIL import Image
from task import in_batches, loader
from torchvision.transforms.functional import pil_to_tensor, to_pil_image
from torchvision.utils import draw_bounding_boxes

PALETTE = ("#e6194b", "#3cb44b", "#4363d8", "#f58231", "#911eb4", "#008080", "#9a6324", "#800000", "#808000", "#000075")


def build_parser() -> argparse.ArgumentParser:
    """All flags."""
    parser = argparse.ArgumentParser(description="Draw the boxes that a detector finds in pictures.")
    add = parser.add_argument
    add("--weights", type=Path, required=True, help="float weights, a checkpoint of train_qat.py, or its ONNX file")
    add("--beside", type=Path, metavar="WEIGHTS", help="second detector, drawn on the right")
    add("--source", type=Path, nargs="+", required=True, help="pictures, or folders of pictures")
    add("--output", type=Path, default=Path("found"), help="folder for the drawings (default: found)")
    add("--device", default="cpu", help="cpu, cuda, or the number of a GPU (default: cpu)")
    add("--img", "--img-size", type=integer(32), default=640, help="longer side in px (default: 640, or the file's)")
    add("--conf", type=number(0, 1), default=0.25, help="minimum confidence of a detection (default: 0.25)")
    add("--iou", type=number(0, 1), default=0.45, help="IoU above which two boxes are one object (default: 0.45)")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    with leaving():
        flags = build_parser().parse_args(sys.argv[1:] if argv is None else argv)
        set_up_logging(1, first=True)
        device = torch.device(f"cuda:{flags.device}" if flags.device.isdigit() else flags.device)
        weights = [flags.weights, *([flags.beside] if flags.beside else [])]
        detectors = [open_detector(path, device) for path in weights]
        pictures = read_pictures(flags.source)
        found = [find(detector, pictures, flags) for detector in detectors]
        flags.output.mkdir(parents=True, exist_ok=True)
        names = next((detector.names for detector in detectors if detector.names), None)
        for index, picture in enumerate(pictures):
            drawn = [draw(picture, detections[index], names) for detections in found]
            path = flags.output / f"{Path(picture.file.name).stem}.jpg"
            Image.fromarray(np.concatenate(drawn, 1)).save(path, quality=90)
            LOG.info("%s: %s", path, " | ".join(counts_of(detections[index], names) for detections in found))


def read_pictures(sources: Sequence[Path]) -> list[Picture]:
    """The pictures of files and folders; files that are not images are skipped with a warning.

    Raises:
        UserError: there are no pictures.
    """
    files = [file for source in sources for file in (sorted(source.iterdir()) if source.is_dir() else [source])]
    found = []
    for file in files:
        if file.suffix.lower() in SUFFIXES:
            try:
                found.append(Picture(File(str(file)), Image.open(file).size, np.zeros((0, 5), np.float32)))
            except (OSError, SyntaxError) as error:
                LOG.warning("%s is skipped: %s", file, error)
    if not found:
        raise UserError(f"--source {' '.join(map(str, sources))}: no pictures ({', '.join(SUFFIXES)})")
    return found


def find(detector: Detector, pictures: Sequence[Picture], flags: argparse.Namespace) -> dict[int, torch.Tensor]:
    """The detections in each picture."""
    letterboxed = Letterboxed(pictures, detector.size or flags.img, 1, rectangular=detector.size is None)
    return detect(detector, loader(letterboxed, in_batches(letterboxed.order, 1), 0), pictures, flags.conf, flags.iou)


def name_of(kind: float, names: tuple[str, ...] | None) -> str:
    """The name of a class, or its number."""
    return names[int(kind)] if names else str(int(kind))


def draw(picture: Picture, found: torch.Tensor, names: tuple[str, ...] | None) -> np.ndarray:
    """The picture with boxes, (height, width, 3)."""
    image = pil_to_tensor(picture.load())
    labels = [f"{name_of(kind, names)} {confidence:.2f}" for *_, confidence, kind in found.tolist()]
    colors = [PALETTE[int(kind) % len(PALETTE)] for kind in found[:, 5]]
    if labels:
        image = draw_bounding_boxes(
            image, found[:, :4], labels, colors, width=2, label_colors="white", fill_labels=True
        )
    return np.asarray(to_pil_image(image))


def counts_of(found: torch.Tensor, names: tuple[str, ...] | None) -> str:
    """The number of detections of each class, as text."""
    kinds, counts = found[:, 5].unique(return_counts=True)
    return ", ".join(f"{count} {name_of(kind, names)}" for kind, count in zip(kinds, counts, strict=True)) or "nothing"


if __name__ == "__main__":
    main()

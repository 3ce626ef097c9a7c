r"""Train a YOLOv5 detector: in float, or with --quantize from float weights to a verified ONNX file.

Without --data it uses scikit-learn's digits on its sample photos. For your own pictures give a YOLO `data.yaml`.

    python example/yolov5_example/train_qat.py --epochs 30
    python example/yolov5_example/train_qat.py --quantize --weights checkpoint/yolov5n_model_best.pth
    python example/yolov5_example/train_qat.py --quantize --weights yolov5s.pt --data coco.yaml --epochs 10 \
        --batch-size 49 --device 0,1,2 --distill
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "common"))  # what the examples share

import torch
from checkpointing import open_output
from dataset import read_description
from detection import HEADLINE
from distributed import Process, launch
from embedded import embedded_description
from errors import UserError, leaving
from logs import LOG, set_up_logging
from model import Yolo
from options import Options, parse_options
from run import Run
from weights import build_for, read_weights


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    rank = int(os.environ.get("RANK", "0"))  # torchrun sets it
    with leaving(rank):
        set_up_logging(1, first=rank == 0)
        options = parse_options(sys.argv[1:] if argv is None else argv)
        launch(train, options)


def train(options: Options, process: Process) -> None:
    """Do one training in this process."""
    set_up_logging(options.log_level, process.is_first)
    torch.manual_seed(options.seed)  # the same weights in all processes
    description = read_description(options.data or embedded_description())
    weights = options.resume or options.weights
    if weights:
        LOG.info("weights: %s", weights)
        content = read_weights(weights)
        model = build_for(content["state_dict"], f"--weights {weights}")
    else:
        model, content = Yolo(options.size, len(description.names), options.generation), {"names": None, "extra": {}}
    if model.num_classes != len(description.names):
        raise UserError(
            f"--weights {weights} has {model.num_classes} classes, {description.file} has {len(description.names)}"
        )
    files = open_output(options.output_dir, f"yolov5{model.size}")
    pictures = {part: description.pictures(part) for part in ("train", "val")}
    LOG.info(
        "yolov5%s %s: %d classes, %d training and %d validation pictures at %d px; %s, seed %d",
        *(model.size, model.generation, model.num_classes, len(pictures["train"]), len(pictures["val"]), options.img),
        *(process.device, options.seed),
    )
    torch.manual_seed(options.seed + process.rank)
    run = Run(options, process, files, description.names, pictures, content["extra"] if options.resume else None)
    scores = run.quantized(model) if options.quantize else run.float(model)
    if process.is_first:
        print(f"{HEADLINE}\n{scores}")


if __name__ == "__main__":
    main()

r"""Quantize an image classifier: from float training to a verified ONNX file.

Without arguments it trains a float model on scikit-learn's handwritten digits, quantizes and finetunes it, exports a
QDQ ONNX file with its JSON, runs the file in ONNX Runtime, and prints a table. `--data PATH` takes an ImageFolder tree.

    python example/imagenet_example/main.py
    python example/imagenet_example/main.py -a mobilenet_v3_small --data imagenet --model-path float.pth \
        --optim adam --lr 1e-4 --epochs 10 --distill-method logits
    python example/imagenet_example/main.py -e --resume example/imagenet_example/checkpoint/resnet18_model_best.pth
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "common"))  # what the examples share

import torch
from checkpointing import open_output
from data import Loaders, open_data
from distributed import Process, launch
from errors import UserError, leaving
from float_job import run_float
from job import Job
from logs import LOG, Board, set_up_logging
from model_zoo import build_model, load_weights
from options import Options, parse_options
from quantized_job import run_quantized
from summary import make_table
from torch import nn


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    with leaving(int(os.environ.get("RANK", "0"))):  # torchrun sets it
        options = parse_options(sys.argv[1:] if argv is None else argv)
        launch(run, options)


def run(options: Options, process: Process) -> None:
    """Do one run in this process and print its table."""
    set_up_logging(options.log_level, process.is_first)
    job, model = start(options, process)
    rows = run_float(job, model) if options.not_qat else run_quantized(job, model)
    job.board.close()
    if process.is_first:
        print(make_table(rows, options.onnx_batch))


def start(options: Options, process: Process) -> tuple[Job, nn.Module]:
    """The run's shared objects and its float model, with weights if the flags name some.

    Raises:
        UserError: data, model, weights or output folder do not fit the flags.
    """
    torch.manual_seed(options.seed + process.rank)
    files = open_output(options.output_dir, options.arch)
    data = open_data(options.data, options.seed, options.image_size, options.workers)
    if options.num_classes not in (None, data.num_classes):
        raise UserError(
            f"-nc {options.num_classes}: {options.data or 'the digits data set'} has {data.num_classes} classes"
        )
    LOG.info(
        "%s on %s: %d training and %d validation images of %d px, %d classes; %s, seed %d",
        *(options.arch, options.data or "the embedded digits", len(data.train), len(data.val), data.image_size),
        *(data.num_classes, process.device, options.seed),
    )
    torch.manual_seed(options.seed)  # the same weights in all processes
    model = build_model(
        options.model_zoo, options.arch, data.num_classes, data.image_size, pretrained=options.pretrained
    )
    torch.manual_seed(options.seed + process.rank)
    weights = options.model_path or options.resume
    if weights:
        load_weights(model, weights)
    if options.sync_bn:
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model.to(process.device)
    loaders = Loaders(data, options.batch_size, options.seed, process.rank, process.world)
    board = Board(options.tensorboard if process.is_first else None)
    example = loaders.example(options.onnx_batch, process.device)
    return Job(options, process, loaders, files, board, example), model


if __name__ == "__main__":
    main()

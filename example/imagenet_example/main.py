r"""Quantize an image classifier, from float training to a proven ONNX file.

Without arguments: trains a small float model on scikit-learn's handwritten digits, quantizes and finetunes it, exports
a QDQ ONNX file with its JSON, runs that with ONNX Runtime, and prints one table. `--data PATH` takes an ImageFolder
tree.

    python example/imagenet_example/main.py
    python example/imagenet_example/main.py -a mobilenet_v3_small --data imagenet --model-path float.pth \
        --optim adam --lr 1e-4 --epochs 10
    python example/imagenet_example/main.py -e --resume example/imagenet_example/checkpoint/resnet18_model_best.pth
"""

import sys
from collections.abc import Sequence

import torch
from arguments import Options, parse_arguments
from checkpointing import open_output
from data import Loaders, open_data
from errors import UserError
from jobs import Job, run_float, run_quantized
from model_zoo import build_model, load_weights
from summary import Row, make_table
from tqdm import tqdm

from fxqat.errors import FxqatError


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    try:
        options = parse_arguments(argv)
        rows = run(options)
    except (UserError, FxqatError) as error:
        sys.exit(f"error: {error}")
    print(make_table(rows, options.onnx_batch))


def run(options: Options) -> list[Row]:
    """Set up one run and do it; returns the rows of its table."""
    torch.manual_seed(options.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    files = open_output(options.output_dir, options.arch)
    data = open_data(options.data, options.seed)
    tqdm.write(
        f"{options.arch} on {options.data or 'the embedded digits'}: {len(data.train)} training and {len(data.val)} "
        f"validation images of {data.image_size} px, {data.num_classes} classes; {device}, seed {options.seed}"
    )
    model = build_model(options.arch, data.num_classes, data.image_size)
    weights = options.model_path or options.resume
    if weights:
        load_weights(model, weights)
    model.to(device)
    loaders = Loaders(data, options.batch_size, options.seed)
    job = Job(options, loaders, files, example=loaders.example(options.onnx_batch, device))
    return run_float(job, model) if options.not_qat else run_quantized(job, model)


if __name__ == "__main__":
    main()

"""The flags of the command line. None means "not given": the default depends on the data, or on what is resumed."""

import argparse
from collections.abc import Callable
from pathlib import Path

from argument_types import OPSETS, SWITCH, integer, number
from distillation import METHODS
from logs import LOG_LEVELS
from recipes import DIGITS_FLOAT, DIGITS_QAT
from schedules import SCHEDULES

from fxqat import BackendType

CHECKPOINTS = Path(__file__).resolve().parent / "checkpoint"


def build_parser() -> argparse.ArgumentParser:
    """All flags in groups."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [flags], see -h",
        description="Train a float image classifier, quantize it, finetune it, and export a proven QDQ ONNX file. "
        "Without arguments: on scikit-learn's handwritten digits at 32 px, in a few minutes.",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file of flags; the command line wins")
    add_task(parser.add_argument_group("model and data").add_argument)
    add_weights(parser.add_argument_group("weights to start from"))
    add_training(parser.add_argument_group("training").add_argument)
    add_distillation(parser.add_argument_group("distillation").add_argument)
    add_quantization(parser.add_argument_group("quantization and export").add_argument)
    add_machine(parser.add_argument_group("machine").add_argument)
    add_output(parser.add_argument_group("output").add_argument)
    return parser


def add_task(add: Callable[..., object]) -> None:
    """Which model on which images."""
    add("--data", type=Path, help="ImageFolder tree with train/ and val/ (default: the embedded digits)")
    add("--model-zoo", choices=("torchvision", "timm"), help="where --arch is looked up (default: torchvision)")
    add("-a", "--arch", help="a classification model of the zoo, or FILE.py:NAME for your own (default: resnet18)")
    add("-nc", "--num-classes", type=integer(2), help="classes of the model (default: as many as the data has)")
    add("--image-size", type=integer(16), help="pixels of the images that the model sees (default: 224; digits 32)")
    add(
        "-j",
        "--workers",
        type=integer(0),
        help="processes that load images (default: 4, or a core each if there are fewer; digits none)",
    )


def add_weights(group: argparse._ArgumentGroup) -> None:
    """At most one of them."""
    weights = group.add_mutually_exclusive_group()
    weights.add_argument("--model-path", type=Path, help="float weights: a state dict, bare or wrapped")
    weights.add_argument("--pretrained", **SWITCH, help="the zoo's own weights (downloaded)")
    weights.add_argument("--resume", type=Path, help="checkpoint to continue (or with -e to evaluate), with its flags")


def add_training(add: Callable[..., object]) -> None:
    """How it is trained."""
    digits = "on the embedded digits"
    add(
        "--epochs",
        type=integer(1),
        help="epochs of quantization-aware training, or of float training with --not-qat (default: 90; "
        f"{digits} {DIGITS_QAT.epochs}, or {DIGITS_FLOAT.epochs}). If no weights are given, a float model is trained "
        f"first: for {DIGITS_FLOAT.epochs} epochs {digits}, for as many as --epochs with --data",
    )
    add("--start-epoch", type=integer(0), help="number of the first epoch: the schedule begins there (default: 0)")
    add(
        *("-b", "--batch-size"),
        type=integer(1),
        help=f"images of a step, of all processes together (default: 256; {digits} {DIGITS_QAT.batch_size})",
    )
    add(
        *("--lr", "--learning-rate"),
        type=number(0, above=True),
        help="highest learning rate (default: 0.1, which trains from scratch: to finetune trained weights give 1e-3 or "
        f"less; {digits} sgd {DIGITS_QAT.lr['sgd']}, adam {DIGITS_QAT.lr['adam']}; or with --not-qat "
        f"sgd {DIGITS_FLOAT.lr['sgd']}, adam {DIGITS_FLOAT.lr['adam']})",
    )
    add("--lr-schedule", choices=tuple(SCHEDULES), help="to 0, a tenth every 30 epochs, none (default: cosine)")
    add("--warmup-epochs", type=number(0), help="epochs in which the rate rises from 0 (default: 0)")
    add("--optim", choices=("sgd", "adam"), help="optimizer (default: sgd)")
    add("--momentum", type=number(0, 0.9999), help="of sgd, and beta 1 of adam (default: 0.9)")
    add("--wd", "--weight-decay", type=number(0), help="weight decay, not of biases and scales (default: 1e-4)")
    add("--label-smoothing", type=number(0, 0.9999), help="of the cross entropy (default: 0)")
    add("--ema", type=number(0, 0.999999, above=True), help="decay of averaged weights, which are evaluated")
    add("--seed", type=integer(0), help=f"seed of the run (default: 0 {digits}, else drawn and printed)")


def add_distillation(add: Callable[..., object]) -> None:
    """What it learns from, beside the labels."""
    add("--distill-method", choices=tuple(METHODS), help="learn from a float teacher, in the way named")
    add("--teacher-arch", help="the teacher's model, in the zoo (default: the float model itself)")
    add("--teacher-path", type=Path, help="the teacher's weights (default: the zoo's own, or those of the float model)")
    add("--distill-alpha", type=number(0, 1), help="share of the teacher in the loss (default: 0.95)")
    add("--temperature", type=number(0, above=True), help="softens the probabilities of both (default: 6)")


def add_quantization(add: Callable[..., object]) -> None:
    """How it is quantized and exported."""
    add("--not-qat", **SWITCH, help="no quantization: the float model alone")
    add("--backend", choices=[backend.name for backend in BackendType], help="whom to quantize for (default: TSQAT)")
    add("--quant-config", type=Path, metavar="FILE", help="YAML of prepare_by_platform's configuration")
    add("--calib-batches", type=integer(1), help="batches to calibrate with (default: 512 images)")
    add("--onnx-batch", type=integer(1), help="batch size of the exported ONNX files (default: 1)")
    add(
        "--opset-version",
        type=integer(*OPSETS),
        help="opset of the exported ONNX files, 13 or later (default: 18, or 21 if a tensor needs it)",
    )
    add("--profile", **SWITCH, help="compare every layer with float: a table and a page")


def add_machine(add: Callable[..., object]) -> None:
    """On what it runs."""
    add("--device", help="cpu, cuda, cuda:1, ... (default: cuda if there is one)")
    add("--gpu", type=integer(0), help="number of the one GPU to use, as --device cuda:N")
    add("--amp", **SWITCH, help="automatic mixed precision")
    add("--amp-dtype", choices=("float16", "bfloat16"), help="of --amp (default: float16 on CUDA, else bfloat16)")
    add("--compile", **SWITCH, help="train through torch.compile")
    add("--multiprocessing-distributed", **SWITCH, help="a process for each GPU of this node")
    add(
        "--world-size",
        type=integer(-1),
        help="nodes (default: -1, one); on the CPU without --rank the processes of this one",
    )
    add("--rank", type=integer(-1), help="number of this node (default: -1, the first)")
    add("--dist-url", help="where the processes meet (default: tcp://127.0.0.1 and a free port, or torchrun's)")
    add("--dist-backend", choices=("nccl", "gloo"), help="of torch.distributed (default: nccl on CUDA, else gloo)")
    add("--sync-bn", **SWITCH, help="batch statistics over all processes")


def add_output(add: Callable[..., object]) -> None:
    """What it prints and writes."""
    add("-e", "--evaluate", **SWITCH, help="train nothing: evaluate and export")
    add("-p", "--print-freq", type=integer(1), help="a line every so many steps (default: 100)")
    add("-l", "--log-level", type=int, choices=tuple(LOG_LEVELS), help="0 debug to 3 error (default: 1, info)")
    add("--tensorboard", type=Path, metavar="DIR", help="write loss, rates and accuracies for TensorBoard")
    add("--output-dir", type=Path, help="where the files go (default: checkpoint/ beside main.py)")

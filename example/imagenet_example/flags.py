"""The flags of the command line. None means "not given": the default depends on the data or on the checkpoint."""

import argparse
from collections.abc import Callable
from pathlib import Path

from argument_types import OPSETS, SWITCH, integer, number
from distillation import METHODS
from logs import LOG_LEVELS
from onnx_files import RUNTIME_HELP, RUNTIMES
from recipes import DIGITS_FLOAT, DIGITS_QAT
from schedules import SCHEDULES

from fxqat import BackendType

CHECKPOINTS = Path(__file__).resolve().parent / "checkpoint"


def build_parser() -> argparse.ArgumentParser:
    """All flags in groups."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [flags], see -h",
        description="Train a float image classifier, quantize and finetune it, and export a verified QDQ ONNX file. "
        "Without arguments it uses scikit-learn's handwritten digits at 32 px and takes a few minutes.",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file of flags; the command line overrides it")
    add_task(parser.add_argument_group("model and data").add_argument)
    add_weights(parser.add_argument_group("weights to start from"))
    add_training(parser.add_argument_group("training").add_argument)
    add_distillation(parser.add_argument_group("distillation").add_argument)
    add_quantization(parser.add_argument_group("quantization and export").add_argument)
    add_machine(parser.add_argument_group("machine").add_argument)
    add_output(parser.add_argument_group("output").add_argument)
    return parser


def add_task(add: Callable[..., object]) -> None:
    """Flags about the model and the images."""
    add("--data", type=Path, help="ImageFolder tree with train/ and val/ (default: the embedded digits)")
    add("--model-zoo", choices=("torchvision", "timm"), help="package that has --arch (default: torchvision)")
    add("-a", "--arch", help="classification model of the zoo, or FILE.py:NAME for your own (default: resnet18)")
    add("-nc", "--num-classes", type=integer(2), help="number of classes (default: that of the data)")
    add("--image-size", type=integer(16), help="height and width of the model's input in px (default: 224; digits 32)")
    add(
        "-j",
        "--workers",
        type=integer(0),
        help="processes that load images (default: 4, or the number of cores if that is less; digits 0)",
    )


def add_weights(group: argparse._ArgumentGroup) -> None:
    """Flags about the initial weights; at most one may be given."""
    weights = group.add_mutually_exclusive_group()
    weights.add_argument("--model-path", type=Path, help='float weights: a state dict, or one under "state_dict"')
    weights.add_argument("--pretrained", **SWITCH, help="download the zoo's weights")
    weights.add_argument(
        "--resume", type=Path, help="checkpoint to continue, or to evaluate with -e; its flags are used again"
    )


def add_training(add: Callable[..., object]) -> None:
    """Flags about training."""
    digits = "on the embedded digits"
    add(
        "--epochs",
        type=integer(1),
        help="epochs of quantization-aware training, or of float training with --not-qat (default: 90; "
        f"{digits} {DIGITS_QAT.epochs}, with --not-qat {DIGITS_FLOAT.epochs}). Without weights a float model is "
        f"trained first: {DIGITS_FLOAT.epochs} epochs {digits}, --epochs epochs with --data",
    )
    add("--start-epoch", type=integer(0), help="number of the first epoch; the schedule starts there (default: 0)")
    add(
        *("-b", "--batch-size"),
        type=integer(1),
        help=f"images per step, in all processes together (default: 256; {digits} {DIGITS_QAT.batch_size})",
    )
    add(
        *("--lr", "--learning-rate"),
        type=number(0, above=True),
        help="highest learning rate (default: 0.1, for training from scratch; to finetune trained weights give 1e-3 or "
        f"less; {digits} sgd {DIGITS_QAT.lr['sgd']}, adam {DIGITS_QAT.lr['adam']}, with --not-qat "
        f"sgd {DIGITS_FLOAT.lr['sgd']}, adam {DIGITS_FLOAT.lr['adam']})",
    )
    add(
        "--lr-schedule",
        choices=tuple(SCHEDULES),
        help="cosine falls to 0, step divides by 10 every 30 epochs (default: cosine)",
    )
    add("--warmup-epochs", type=number(0), help="epochs in which the learning rate rises from 0 (default: 0)")
    add("--optim", choices=("sgd", "adam"), help="optimizer (default: sgd)")
    add("--momentum", type=number(0, 0.9999), help="momentum of sgd, beta 1 of adam (default: 0.9)")
    add("--wd", "--weight-decay", type=number(0), help="weight decay; not applied to biases and scales (default: 1e-4)")
    add("--label-smoothing", type=number(0, 0.9999), help="label smoothing of the cross entropy (default: 0)")
    add(
        "--ema",
        type=number(0, 0.999999, above=True),
        help="decay of a moving average of the weights, which is evaluated and exported (default: none)",
    )
    add("--seed", type=integer(0), help=f"seed of the run (default: 0 {digits}, otherwise random and printed)")


def add_distillation(add: Callable[..., object]) -> None:
    """Flags about learning from a teacher."""
    add("--distill-method", choices=tuple(METHODS), help="loss to learn from a float teacher (default: no teacher)")
    add("--teacher-arch", help="model of the teacher, as for --arch (default: the float model itself)")
    add("--teacher-path", type=Path, help="weights of the teacher (default: the zoo's, or those of the float model)")
    add("--distill-alpha", type=number(0, 1), help="share of the teacher in the loss (default: 0.95)")
    add("--temperature", type=number(0, above=True), help="temperature of the probabilities (default: 6)")


def add_quantization(add: Callable[..., object]) -> None:
    """Flags about quantization and export."""
    add("--not-qat", **SWITCH, help="train or evaluate the float model only")
    add("--backend", choices=[backend.name for backend in BackendType], help="deployment backend (default: TSQAT)")
    add("--quant-config", type=Path, metavar="FILE", help="YAML file with the configuration of prepare_by_platform")
    add("--calib-batches", type=integer(1), help="batches for calibration (default: 512 images)")
    add("--onnx-batch", type=integer(1), help="batch size of the exported ONNX files (default: 1)")
    add(
        "--opset-version",
        type=integer(*OPSETS),
        help="opset of the exported ONNX files, 13 or later (default: 18, or 21 if a tensor needs it)",
    )
    add("--runtime", choices=RUNTIMES, help=RUNTIME_HELP)
    add("--profile", **SWITCH, help="compare every layer with the float model, in a CSV table and an HTML page")


def add_machine(add: Callable[..., object]) -> None:
    """Flags about devices and processes."""
    add("--device", help="cpu, cuda, cuda:1, ... (default: cuda if available, otherwise cpu)")
    add("--gpu", type=integer(0), help="use only this GPU; the same as --device cuda:N")
    add("--amp", **SWITCH, help="automatic mixed precision")
    add(
        "--amp-dtype",
        choices=("float16", "bfloat16"),
        help="type for --amp (default: float16 on CUDA, otherwise bfloat16)",
    )
    add("--compile", **SWITCH, help="train with torch.compile")
    add("--multiprocessing-distributed", **SWITCH, help="start one process for each GPU of this node")
    add(
        "--world-size",
        type=integer(-1),
        help="number of nodes (default: -1, one); on the CPU without --rank, number of processes on this node",
    )
    add("--rank", type=integer(-1), help="number of this node, from 0 (default: -1, a single node)")
    add("--dist-url", help="address where processes connect (default: tcp://127.0.0.1 and a free port, or torchrun's)")
    add(
        "--dist-backend",
        choices=("nccl", "gloo"),
        help="backend of torch.distributed (default: nccl on CUDA, otherwise gloo)",
    )
    add("--sync-bn", **SWITCH, help="batch norm statistics over all processes")


def add_output(add: Callable[..., object]) -> None:
    """Flags about output."""
    add("-e", "--evaluate", **SWITCH, help="only evaluate and export; train nothing")
    add("-p", "--print-freq", type=integer(1), help="steps between two log lines (default: 100)")
    add(
        "--profile-step",
        **SWITCH,
        help="log where the time of the first epoch's steps goes: data, fake-quant, the rest",
    )
    add(
        *("-l", "--log-level"),
        type=int,
        choices=tuple(LOG_LEVELS),
        help="0 debug, 1 info, 2 warning, 3 error (default: 1)",
    )
    add("--tensorboard", type=Path, metavar="DIR", help="write loss, learning rate and accuracy for TensorBoard")
    add("--output-dir", type=Path, help="folder for the files (default: checkpoint/ next to main.py)")

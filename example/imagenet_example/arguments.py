"""The command line: flags, their defaults, and which of them go together."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnx
import torch
from checkpointing import read_extra
from errors import UserError

from fxqat import BackendType

CHECKPOINTS = Path(__file__).resolve().parent / "checkpoint"


@dataclass(frozen=True)
class Recipe:
    """Defaults of one kind of training; `lr` is by optimizer."""

    epochs: int
    batch_size: int
    lr: Mapping[str, float]


# The embedded digits are small: minutes on two cores. Everything else has the guide's defaults.
DIGITS_FLOAT = Recipe(epochs=6, batch_size=32, lr={"sgd": 0.01, "adam": 1e-3})
DIGITS_QAT = Recipe(epochs=3, batch_size=32, lr={"sgd": 1e-3, "adam": 1e-4})
GUIDE = Recipe(epochs=90, batch_size=256, lr={"sgd": 0.1, "adam": 0.1})


@dataclass(frozen=True)
class Options:
    """The flags of one run, every default filled in."""

    data: Path | None
    arch: str
    epochs: int
    batch_size: int
    lr: float
    optim: str
    evaluate: bool
    not_qat: bool
    backend: str
    onnx_batch: int
    opset_version: int
    model_path: Path | None
    resume: Path | None
    seed: int
    output_dir: Path

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint remembers of them, so that `--resume` needs no other flag."""
        state = {name: value for name, value in asdict(self).items() if name in REMEMBERED}
        return {**state, "data": None if self.data is None else str(self.data.resolve())}

    @property
    def float_recipe(self) -> tuple[int, float]:
        """Epochs and learning rate (SGD) of the float training that comes first when no weights are given."""
        if self.data is None:
            return DIGITS_FLOAT.epochs, DIGITS_FLOAT.lr["sgd"]
        return self.epochs, GUIDE.lr["sgd"]


OPSETS = (13, onnx.defs.onnx_opset_version())
REMEMBERED = ("data", "arch", "epochs", "batch_size", "lr", "optim", "backend", "onnx_batch", "opset_version", "seed")
# With any of these changed, a resumed training is not the one that was interrupted. The seed also splits the digits.
FIXED_IN_TRAINING = ("arch", "backend", "seed", "batch_size", "lr", "optim")
FIXED_IN_EVALUATION = ("arch", "backend", "seed")
TRAINING_ONLY = ("epochs", "lr", "optim")


def integer(minimum: int, maximum: int = 2**31 - 1) -> Callable[[str], int]:
    """An argparse type: a whole number within the bounds."""

    def integer(text: str) -> int:
        value = int(text)
        if not minimum <= value <= maximum:
            raise argparse.ArgumentTypeError(f"{value} is not within {minimum} .. {maximum}")
        return value

    return integer


def positive(text: str) -> float:
    """An argparse type: a finite number above zero."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number above 0")
    return value


def build_parser() -> argparse.ArgumentParser:
    """The flags. None means "not given": the default depends on the data, or on the checkpoint that is resumed."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [flags], see -h",
        description="Train a float image classifier, quantize it, finetune it, and export a proven QDQ ONNX file. "
        "Without arguments: on scikit-learn's handwritten digits at 32 px, in a minute or two.",
    )
    add = parser.add_argument
    digits = "on the embedded digits"
    add("--data", type=Path, help="ImageFolder tree with train/ and val/ (default: the embedded digits)")
    add("-a", "--arch", help="torchvision classification model (default: resnet18)")
    add(
        "--epochs",
        type=integer(1),
        help="epochs of quantization-aware training, or of float training with --not-qat (default: 90; "
        f"{digits} {DIGITS_QAT.epochs}, or {DIGITS_FLOAT.epochs}). If no weights are given, a float model is trained "
        f"first: for {DIGITS_FLOAT.epochs} epochs {digits}, for as many as --epochs with --data",
    )
    add("-b", "--batch-size", type=integer(1), help=f"images per step (default: 256; {digits} {DIGITS_QAT.batch_size})")
    add(
        "--lr",
        "--learning-rate",
        type=positive,
        help="learning rate of the first step, falling to 0 by a cosine (default: 0.1, which trains from scratch: to "
        "finetune trained weights give 1e-3 or less; "
        f"{digits} sgd {DIGITS_QAT.lr['sgd']}, adam {DIGITS_QAT.lr['adam']}; or with --not-qat "
        f"sgd {DIGITS_FLOAT.lr['sgd']}, adam {DIGITS_FLOAT.lr['adam']})",
    )
    add("--optim", choices=("sgd", "adam"), help="optimizer (default: sgd)")
    add("-e", "--evaluate", action="store_true", help="train nothing: evaluate, export, and print the table")
    add("--not-qat", action="store_true", help="no quantization: train (or with -e evaluate) the float model")
    add("--backend", choices=[backend.name for backend in BackendType], help="whom to quantize for (default: TSQAT)")
    add("--onnx-batch", type=integer(1), help="batch size of the exported ONNX files (default: 1)")
    add("--opset-version", type=integer(*OPSETS), help="opset of the exported ONNX files, 13 or later (default: 18)")
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument("--model-path", type=Path, help="float weights to start from: a state dict, bare or wrapped")
    weights.add_argument("--resume", type=Path, help="checkpoint to continue (or with -e to evaluate), with its flags")
    add("--seed", type=integer(0), help=f"seed of the run (default: 0 {digits}, else drawn and printed)")
    add("--output-dir", type=Path, default=CHECKPOINTS, help="where the files go (default: checkpoint/ beside main.py)")
    return parser


def parse_arguments(argv: Sequence[str] | None = None) -> Options:
    """Read the command line; UserError if flags do not go together, or not with the checkpoint that is resumed."""
    flags = vars(build_parser().parse_args(argv))
    check_combination(flags)
    return fill_defaults(flags, remembered_options(flags) if flags["resume"] else {})


def check_combination(flags: Mapping[str, Any]) -> None:
    """Refuse a flag that would have no effect, rather than ignore it."""
    if flags["not_qat"] and flags["backend"] is not None:
        raise UserError("--backend has no effect with --not-qat: drop one of them")
    if not flags["evaluate"]:
        if flags["batch_size"] == 1:
            raise UserError("-b 1 cannot train: batch norm takes its statistics over the batch; give 2 or more")
        return
    for name in TRAINING_ONLY:
        if flags[name] is not None:
            raise UserError(f"--{name} has no effect with -e, which trains nothing: drop one of them")
    if flags["model_path"] is None and flags["resume"] is None:
        raise UserError("-e trains nothing, so it needs weights: give --model-path or --resume")


def remembered_options(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the checkpoint that is resumed, checked against those given."""
    path, extra = flags["resume"], read_extra(flags["resume"])
    remembered, quantized = extra["options"], extra["quantized"]
    if not quantized and not flags["not_qat"]:
        raise UserError(f"{path} is a float checkpoint: give it with --model-path, or add --not-qat")
    if quantized and flags["not_qat"] and not flags["evaluate"]:
        raise UserError(f"{path} is a checkpoint of a quantized model: drop --not-qat, or give it with --model-path")
    for name in FIXED_IN_EVALUATION if flags["evaluate"] else FIXED_IN_TRAINING:
        if flags[name] is not None and flags[name] != remembered[name]:
            flag = "--" + name.replace("_", "-")
            raise UserError(f"{flag} {flags[name]}: {path} was trained with {flag} {remembered[name]}; drop the flag")
    epochs, done = flags["epochs"] or remembered["epochs"], extra["training"]["epochs_done"]
    if done >= epochs and not flags["evaluate"]:
        raise UserError(f"{path} has all of its {epochs} epochs behind it: give more --epochs, or evaluate it with -e")
    return remembered


def fill_defaults(flags: Mapping[str, Any], remembered: Mapping[str, Any]) -> Options:
    """The value of each flag: as given, else as the checkpoint remembers it, else the default for the data."""
    known = {name: value for name, value in remembered.items() if name in REMEMBERED}
    known.update((name, value) for name, value in flags.items() if value is not None)
    known["data"] = None if known.get("data") is None else Path(known["data"])
    digits = DIGITS_FLOAT if flags["not_qat"] else DIGITS_QAT
    recipe = digits if known["data"] is None else GUIDE
    optim = known.get("optim", "sgd")
    defaults = {
        "arch": "resnet18",
        "epochs": recipe.epochs,
        "batch_size": recipe.batch_size,
        "lr": recipe.lr[optim],
        "optim": optim,
        "backend": "TSQAT",
        "onnx_batch": 1,
        "opset_version": 18,
        "model_path": None,
        "resume": None,
        "seed": 0 if known["data"] is None else torch.seed() % 2**31,
    }
    return Options(**{**defaults, **known})

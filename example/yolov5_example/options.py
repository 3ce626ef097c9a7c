"""The flags of a training, with every default filled in."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from argument_types import OPSETS, integer, number
from checkpointing import read_extra
from errors import UserError
from hyperparameters import FOLDER, Hyperparameters, read_hyperparameters
from logs import LOG_LEVELS
from model import GENERATIONS, SIZES
from onnx_files import RUNTIME_HELP, RUNTIMES

from fxqat import BackendType

CHECKPOINTS = Path(__file__).resolve().parent / "checkpoint"
PUBLISHED = Path("yolov5s.pt")
"""Weights for `--quantize --data ...` without `--weights`, in the working directory."""
ALLOWED_WITH_RESUME = ("resume", "output_dir", "device", "workers", "print_freq", "log_level", "epochs")
"""Flags about one run, its machine and its length; all others come from the checkpoint."""


@dataclass(frozen=True)
class Options:
    """The flags of `train_qat.py`; see its -h."""

    data: Path | None
    weights: Path | None
    resume: Path | None
    size: str
    generation: str
    img: int
    epochs: int
    batch_size: int
    workers: int
    seed: int
    hyp: Hyperparameters
    quantize: bool
    backend: str
    quant_config: str | None
    calib_pictures: int
    distill: bool
    amp: bool
    ema: float | None
    with_decode: bool
    opset_version: int | None
    runtime: str
    device: str | None
    print_freq: int
    log_level: int
    output_dir: Path

    # Options that the shared modules need and this example has no flags for.
    gpu = amp_dtype = dist_url = dist_backend = None
    world_size = rank = -1
    sync_bn = False
    start_epoch = 0
    multiprocessing_distributed: bool = False

    @property
    def optim(self) -> str:
        """The optimizer; this and the following come from the hyperparameters."""
        return self.hyp.optim

    @property
    def lr(self) -> float:
        """Highest learning rate."""
        return self.hyp.lr

    @property
    def lr_schedule(self) -> str:
        """The learning rate schedule."""
        return self.hyp.lr_schedule

    @property
    def lrf(self) -> float:
        """Share of the highest learning rate where the schedule ends."""
        return self.hyp.lrf

    @property
    def warmup_epochs(self) -> float:
        """Epochs in which the learning rate rises."""
        return self.hyp.warmup_epochs

    @property
    def momentum(self) -> float:
        """Momentum of sgd, beta 1 of adam."""
        return self.hyp.momentum

    @property
    def wd(self) -> float:
        """Weight decay."""
        return self.hyp.wd

    def state_dict(self) -> dict[str, Any]:
        """The options as plain values, for a checkpoint."""
        plain = asdict(self) | {"hyp": self.hyp.state_dict()}
        return {name: str(value.resolve()) if isinstance(value, Path) else value for name, value in plain.items()}


def build_parser() -> argparse.ArgumentParser:
    """All flags; None means "not given"."""
    parser = argparse.ArgumentParser(
        description="Train a YOLOv5 detector in float, or quantize and finetune one and export a verified QDQ ONNX "
        "file. Without --data it uses scikit-learn's digits on its sample photos.",
        argument_default=None,
    )
    add = parser.add_argument
    switch: dict[str, Any] = {"action": "store_true", "default": None}
    add("--data", type=Path, help="YOLO data.yaml, or its folder (default: the embedded digits)")
    add(
        "--weights",
        type=Path,
        help="initial weights: a checkpoint of this example, a state dict, or a published .pt (default with --quantize "
        f"and --data: {PUBLISHED} in the working directory)",
    )
    add("--resume", type=Path, help="checkpoint of an interrupted training to continue; its flags are used again")
    add("--size", choices=tuple(SIZES), help="size of the model without --weights (default: n)")
    add("--generation", choices=tuple(GENERATIONS), help="release of the model without --weights (default: v6.0)")
    add("--img", "--img-size", type=integer(32), help="longer side of an image in px (default: 640, digits 160)")
    add("--epochs", type=integer(0), help="training epochs (default: 30, with --quantize 10; there 0 only calibrates)")
    add("--batch-size", type=integer(1), help="images per step, in all processes together (default: 16)")
    add("--workers", type=integer(0), help="processes that load pictures (default: 4, digits 0)")
    add("--seed", type=integer(0), help="seed of the run (default: 0)")
    add("--hyp", type=Path, metavar="FILE", help="YAML of learning rate, loss, augmentation (default: data/hyp.*.yaml)")
    add("--quantize", **switch, help="quantize, finetune and export the model of --weights")
    add("--backend", choices=[backend.name for backend in BackendType], help="deployment backend (default: TSQAT)")
    add("--quant-config", metavar="FILE", help="YAML for prepare_by_platform (default: see detector.py)")
    add("--calib-pictures", type=integer(1), help="pictures for calibration (default: 64)")
    add("--distill", **switch, help="learn from the float model; --hyp sets the weights of the labels")
    add("--amp", **switch, help="automatic mixed precision")
    add(
        "--ema",
        type=number(0, 0.999999, above=True),
        help="decay of a moving average of the weights, which is evaluated and exported (default: none)",
    )
    add("--with-decode", **switch, help="the ONNX file returns boxes (default: maps)")
    add("--opset-version", type=integer(*OPSETS), help="opset of the ONNX file (default: 18, or 21 if needed)")
    add("--runtime", choices=RUNTIMES, help=RUNTIME_HELP)
    add("--device", help="cpu, cuda, 0, or 0,1,2 for one process on each GPU (default: cuda if available)")
    add("--print-freq", type=integer(1), help="steps between two log lines (default: 20)")
    add("--log-level", type=int, choices=tuple(LOG_LEVELS), help="0 debug, 1 info, 2 warning, 3 error (default: 1)")
    add(
        "--output_dir", "--output-dir", type=Path, help="folder for the files (default: checkpoint/ next to the script)"
    )
    return parser


def parse_options(argv: Sequence[str]) -> Options:
    """Read the command line.

    Raises:
        UserError: flags do not fit each other or the checkpoint that is resumed.
    """
    given = {name: value for name, value in vars(build_parser().parse_args(argv)).items() if value is not None}
    if "resume" in given:
        wrong = [name for name in given if name not in ALLOWED_WITH_RESUME]
        if wrong:
            flag = f"--{wrong[0].replace('_', '-')}"
            raise UserError(f"{flag} has no effect with --resume, which uses the checkpoint's flags: drop it")
        known = read_extra(given["resume"])["options"]
        known = {name: value for name, value in known.items() if name not in ALLOWED_WITH_RESUME or name == "epochs"}
        hyp = Hyperparameters(**known.pop("hyp"))
        paths = {name: Path(known[name]) for name in ("data", "weights") if known.get(name)}
        return fill({**known, **paths, **given}, hyp)
    if given.get("quantize") and "weights" not in given:
        given["weights"] = published_weights(given)
    check_combination(given)
    name = "scratch" if not given.get("quantize") else "distill" if given.get("distill") else "qat"
    hyp = given.pop("hyp", FOLDER / f"hyp.{name}.yaml")
    return fill(given, read_hyperparameters(hyp))


def published_weights(given: dict[str, Any]) -> Path:
    """The weights to quantize where none are given.

    Raises:
        UserError: they do not exist, or --data is not given: they have no class of the embedded digits.
    """
    if "data" in given and PUBLISHED.is_file():
        return PUBLISHED
    download = f"https://github.com/ultralytics/yolov5/releases/download/{given.get('generation', 'v6.0')}/{PUBLISHED}"
    raise UserError(
        "--quantize needs --weights: a trained float model. Train one with the same command without --quantize"
        + (f", or download {download} (trained on COCO) into this folder" if "data" in given else "")
    )


def check_combination(given: dict[str, Any]) -> None:
    """Refuse flags that would have no effect, missing flags, and impossible values.

    Raises:
        UserError: the flags do not fit each other.
    """
    of_quantization = ("backend", "quant_config", "calib_pictures", "distill", "with_decode")
    of_quantization = (*of_quantization, "opset_version", "runtime")
    unused = {"without --quantize": () if given.get("quantize") else of_quantization}
    unused["with --weights, which determines it"] = ("size", "generation") if "weights" in given else ()
    for why, names in unused.items():
        for name in names:
            if name in given:
                raise UserError(f"--{name.replace('_', '-')} has no effect {why}: drop one of them")
    if given.get("epochs") == 0 and not given.get("quantize"):
        raise UserError("--epochs 0 trains nothing: give 1 or more, or --quantize to calibrate only")
    if given.get("img", 32) % 32:
        raise UserError(f"--img {given['img']}: give a multiple of 32, the largest stride")


def fill(given: dict[str, Any], hyp: Hyperparameters) -> Options:
    """All options, with defaults."""
    embedded, quantize = given.get("data") is None, given.get("quantize", False)
    defaults = {
        **dict.fromkeys(field.name for field in fields(Options)),
        **dict.fromkeys(("quantize", "distill", "amp", "with_decode", "multiprocessing_distributed"), False),
        **{"size": "n", "generation": "v6.0", "img": 160 if embedded else 640, "epochs": 10 if quantize else 30},
        **{"batch_size": 16, "workers": 0 if embedded else 4, "seed": 0, "backend": "TSQAT", "calib_pictures": 64},
        **{"runtime": "auto", "print_freq": 20, "log_level": 1, "output_dir": CHECKPOINTS, "hyp": hyp},
    }
    options = {**defaults, **given}
    numbers = options["device"].split(",") if options["device"] else []
    if numbers and all(number.isdigit() for number in numbers):
        os.environ["CUDA_VISIBLE_DEVICES"] = options["device"]
        options |= {"device": "cuda", "multiprocessing_distributed": len(numbers) > 1}
    return Options(**options)

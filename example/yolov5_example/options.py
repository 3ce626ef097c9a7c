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

from fxqat import BackendType

CHECKPOINTS = Path(__file__).resolve().parent / "checkpoint"
GIVEN_ALONE = ("resume", "output_dir", "device", "workers", "print_freq", "log_level", "epochs")
"""What may stand beside --resume: it concerns one run and its machine, or how long it goes on."""


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
    device: str | None
    print_freq: int
    log_level: int
    output_dir: Path

    # What the shared modules ask for, and this example has no flag for.
    gpu = amp_dtype = dist_url = dist_backend = None
    world_size = rank = -1
    sync_bn = False
    start_epoch = 0
    multiprocessing_distributed: bool = False

    @property
    def optim(self) -> str:
        """Of the numbers of the training, as the next ones."""
        return self.hyp.optim

    @property
    def lr(self) -> float:
        """Highest learning rate."""
        return self.hyp.lr

    @property
    def lr_schedule(self) -> str:
        """How it goes."""
        return self.hyp.lr_schedule

    @property
    def warmup_epochs(self) -> float:
        """In which it rises."""
        return self.hyp.warmup_epochs

    @property
    def momentum(self) -> float:
        """Of the optimizer."""
        return self.hyp.momentum

    @property
    def wd(self) -> float:
        """Weight decay."""
        return self.hyp.wd

    def state_dict(self) -> dict[str, Any]:
        """In plain values, for a checkpoint."""
        plain = asdict(self) | {"hyp": self.hyp.state_dict()}
        return {name: str(value.resolve()) if isinstance(value, Path) else value for name, value in plain.items()}


def build_parser() -> argparse.ArgumentParser:
    """All flags; None means "not given"."""
    parser = argparse.ArgumentParser(
        description="Train a YOLOv5 detector in float, or quantize and finetune one and export a proven QDQ ONNX file. "
        "Without --data: scikit-learn's digits on its sample photos.",
        argument_default=None,
    )
    add = parser.add_argument
    add("--data", type=Path, help="a YOLO data.yaml, or the folder of one (default: the embedded digits)")
    add("--weights", type=Path, help="weights to start from: of this example, tensors by name, or a published .pt")
    add("--resume", type=Path, help="a checkpoint of an interrupted training, which goes on with its flags")
    add("--size", choices=tuple(SIZES), help="of a model without --weights (default: n)")
    add("--generation", choices=tuple(GENERATIONS), help="of a model without --weights (default: v6.0)")
    add("--img", "--img-size", type=integer(32), help="longer side of an image in px (default: 640, digits 160)")
    add("--epochs", type=integer(0), help="with --quantize 0 only calibrates (default: 10; of a float training 30)")
    add("--batch-size", type=integer(1), help="of all processes together (default: 16)")
    add("--workers", type=integer(0), help="processes that load pictures (default: 4, digits 0)")
    add("--seed", type=integer(0), help="of the run (default: 0)")
    add("--hyp", type=Path, metavar="FILE", help="YAML of learning rate, loss, augmentation (default: hyp/*.yaml)")
    add("--quantize", action="store_true", default=None, help="quantization-aware training, and export")
    add("--backend", choices=[backend.name for backend in BackendType], help="whom to quantize for (default: TSQAT)")
    add("--quant-config", metavar="FILE", help="YAML for prepare_by_platform (default: in detector.py)")
    add("--calib-pictures", type=integer(1), help="pictures to calibrate with (default: 64)")
    add("--distill", action="store_true", default=None, help="learn from the float model (labels, too, by --hyp)")
    add("--amp", action="store_true", default=None, help="automatic mixed precision")
    add("--ema", type=number(0, 0.999999, above=True), help="decay of averaged weights, which are evaluated")
    add("--with-decode", action="store_true", default=None, help="the ONNX file gives boxes (default: maps)")
    add("--opset-version", type=integer(*OPSETS), help="of the ONNX file (default: 18, or 21 if a tensor needs it)")
    add("--device", help="cpu, cuda, 0, or 0,1,2 for a process on each of these GPUs (default: cuda if there is one)")
    add("--print-freq", type=integer(1), help="a line every so many steps (default: 20)")
    add("--log-level", type=int, choices=tuple(LOG_LEVELS), help="0 debug to 3 error (default: 1, info)")
    add("--output_dir", "--output-dir", type=Path, help="where the files go (default: checkpoint/ beside the script)")
    return parser


def parse_options(argv: Sequence[str]) -> Options:
    """Read the command line.

    Raises:
        UserError: flags do not go together.
    """
    given = {name: value for name, value in vars(build_parser().parse_args(argv)).items() if value is not None}
    if "resume" in given:
        wrong = [name for name in given if name not in GIVEN_ALONE]
        if wrong:
            raise UserError(f"--{wrong[0].replace('_', '-')} has no effect with --resume, which has its flags: drop it")
        known = read_extra(given["resume"])["options"]
        known = {name: value for name, value in known.items() if name not in GIVEN_ALONE or name == "epochs"}
        hyp = Hyperparameters(**known.pop("hyp"))
        paths = {name: Path(known[name]) for name in ("data", "weights") if known.get(name)}
        return fill({**known, **paths, **given}, hyp)
    refuse_idle(given)
    name = "scratch" if not given.get("quantize") else "distill" if given.get("distill") else "qat"
    hyp = given.pop("hyp", FOLDER / f"{name}.yaml")
    return fill(given, read_hyperparameters(hyp))


def refuse_idle(given: dict[str, Any]) -> None:
    """Refuse a flag that would have no effect, rather than ignore it."""
    of_quantization = ("backend", "quant_config", "calib_pictures", "distill", "with_decode", "opset_version")
    idle = {"without --quantize": [] if given.get("quantize") else of_quantization}
    idle["with --weights, which tell it"] = ("size", "generation") if "weights" in given else ()
    for why, names in idle.items():
        for name in names:
            if name in given:
                raise UserError(f"--{name.replace('_', '-')} has no effect {why}: drop one of them")
    if given.get("quantize") and "weights" not in given:
        raise UserError("--quantize needs --weights: a float model that was trained, by this script or published")
    if given.get("epochs") == 0 and not given.get("quantize"):
        raise UserError("--epochs 0 trains nothing: give 1 or more, or --quantize, which calibrates then")
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
        **{"print_freq": 20, "log_level": 1, "output_dir": CHECKPOINTS, "hyp": hyp},
    }
    options = {**defaults, **given}
    numbers = options["device"].split(",") if options["device"] else []
    if numbers and all(number.isdigit() for number in numbers):
        os.environ["CUDA_VISIBLE_DEVICES"] = options["device"]
        options |= {"device": "cuda", "multiprocessing_distributed": len(numbers) > 1}
    return Options(**options)

"""The options of a run: the flags with every default filled in."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from combinations import check_combination, remembered_options
from errors import UserError
from flags import CHECKPOINTS, build_parser
from recipes import DIGITS_FLOAT, DIGITS_QAT, IMAGE_FOLDER


@dataclass(frozen=True)
class Options:
    """The flags of one run; see `main.py -h`. None: no default."""

    data: Path | None
    model_zoo: str
    arch: str
    num_classes: int | None
    image_size: int | None
    workers: int | None
    model_path: Path | None
    pretrained: bool
    resume: Path | None
    epochs: int
    start_epoch: int
    batch_size: int
    lr: float
    lr_schedule: str
    warmup_epochs: float
    optim: str
    momentum: float
    wd: float
    label_smoothing: float
    ema: float | None
    seed: int
    distill_method: str | None
    teacher_arch: str | None
    teacher_path: Path | None
    distill_alpha: float
    temperature: float
    not_qat: bool
    backend: str
    quant_config: Path | None
    calib_batches: int | None
    onnx_batch: int
    opset_version: int | None
    runtime: str
    profile: bool
    device: str | None
    gpu: int | None
    amp: bool
    amp_dtype: str | None
    compile: bool
    multiprocessing_distributed: bool
    world_size: int
    rank: int
    dist_url: str | None
    dist_backend: str | None
    sync_bn: bool
    evaluate: bool
    print_freq: int
    profile_step: bool
    log_level: int
    tensorboard: Path | None
    output_dir: Path

    lrf = 0.0  # the shared training needs it and this example has no flag for it

    def state_dict(self) -> dict[str, Any]:
        """The options that a checkpoint stores, so that `--resume` needs no other flag."""
        state = {name: value for name, value in asdict(self).items() if name not in NOT_STORED}
        return {name: str(value.resolve()) if isinstance(value, Path) else value for name, value in state.items()}

    @property
    def float_first(self) -> "Options":
        """The options of the float training before quantization, if no weights are given: SGD with its default rate."""
        recipe = DIGITS_FLOAT if self.data is None else replace(IMAGE_FOLDER, epochs=self.epochs)
        return replace(self, epochs=recipe.epochs, start_epoch=0, optim="sgd", momentum=0.9, lr=recipe.lr["sgd"])


DEFAULTS: Mapping[str, Any] = {
    **dict.fromkeys(Options.__dataclass_fields__),
    **dict.fromkeys(
        ("pretrained", "not_qat", "profile", "profile_step", "amp", "compile", "sync_bn", "evaluate"), False
    ),
    "multiprocessing_distributed": False,
    "model_zoo": "torchvision",
    "arch": "resnet18",
    "start_epoch": 0,
    "lr_schedule": "cosine",
    "warmup_epochs": 0.0,
    "optim": "sgd",
    "momentum": 0.9,
    "wd": 1e-4,
    "label_smoothing": 0.0,
    "distill_alpha": 0.95,
    "temperature": 6.0,
    "backend": "TSQAT",
    "onnx_batch": 1,
    "runtime": "auto",
    "world_size": -1,
    "rank": -1,
    "print_freq": 100,
    "log_level": 1,
    "output_dir": CHECKPOINTS,
}

# These concern one run and its machine, not the training.
NOT_STORED = (
    *(
        "model_path",
        "pretrained",
        "resume",
        "output_dir",
        "evaluate",
        "profile",
        "profile_step",
        "workers",
        "print_freq",
    ),
    *("device", "gpu", "multiprocessing_distributed", "world_size", "rank", "dist_url", "dist_backend"),
    *("log_level", "tensorboard"),
)


def parse_options(argv: Sequence[str]) -> Options:
    """Read the command line and the `--config` file.

    Raises:
        UserError: flags do not fit each other or the checkpoint that is resumed.
    """
    parser = build_parser()
    config = parser.parse_known_args(argv)[0].config
    flags = vars(parser.parse_args([*(flags_of_file(config) if config else []), *argv]))
    flags.pop("config")
    check_combination(flags)
    return fill_defaults(flags, remembered_options(flags) if flags["resume"] else {})


def flags_of_file(path: Path) -> list[str]:
    """The flags in a YAML file: `lr: 0.1` is `--lr 0.1`, and `amp: true` is `--amp`."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"--config {path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise UserError(f"--config {path}: expected lines like `lr: 0.1`, got {type(content).__name__}")
    flags: list[str] = []
    for name, value in content.items():
        if isinstance(value, (dict, list)):
            raise UserError(f"--config {path}: expected a single value for {name}, got {type(value).__name__}")
        if value is not None and value is not False:
            flags += [f"--{str(name).replace('_', '-')}"] + ([] if value is True else [str(value)])
    return flags


def fill_defaults(flags: Mapping[str, Any], remembered: Mapping[str, Any]) -> Options:
    """All options: the flag if given, otherwise the checkpoint's value, otherwise the default for the data."""
    known = {name: value for name, value in remembered.items() if name in DEFAULTS}
    known.update((name, value) for name, value in flags.items() if value is not None)
    data = known.get("data")
    digits = DIGITS_FLOAT if known.get("not_qat") else DIGITS_QAT
    recipe = digits if data is None else IMAGE_FOLDER
    by_data = {
        "epochs": recipe.epochs,
        "batch_size": recipe.batch_size,
        "lr": recipe.lr[known.get("optim", DEFAULTS["optim"])],
        "seed": 0 if data is None else torch.seed() % 2**31,
    }
    return Options(**{**DEFAULTS, **by_data, **known})

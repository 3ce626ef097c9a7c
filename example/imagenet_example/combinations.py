"""Which flags may be combined, with each other and with the checkpoint that is resumed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpointing import read_extra
from errors import UserError

# A resumed training must not change these. The seed also splits the digits.
FIXED_IN_EVALUATION = ("arch", "model_zoo", "num_classes", "backend", "quant_config", "seed")
TRAINING = (
    *("start_epoch", "lr", "lr_schedule", "warmup_epochs", "optim", "momentum", "wd", "label_smoothing", "ema"),
    *("distill_method", "teacher_arch", "teacher_path", "distill_alpha", "temperature", "amp", "amp_dtype"),
    *("compile", "sync_bn"),
)
FIXED_IN_TRAINING = (*FIXED_IN_EVALUATION, "batch_size", *TRAINING)
DISTILLATION = ("teacher_arch", "teacher_path", "distill_alpha", "temperature")
QUANTIZATION = ("backend", "quant_config", "calib_batches", "profile", "distill_method", *DISTILLATION)
PATHS = ("data", "teacher_path", "quant_config")  # the paths that a checkpoint stores


def check_combination(flags: Mapping[str, Any]) -> None:
    """Refuse flags that would have no effect.

    Raises:
        UserError: a flag has no effect beside the others, or one is missing.
    """
    unused: dict[str, tuple[str, ...]] = {}
    if flags["not_qat"]:
        unused["with --not-qat"] = QUANTIZATION
    if flags["evaluate"]:
        unused["with -e, which trains nothing"] = (
            "epochs",
            "profile_step",
            *(name for name in TRAINING if name != "amp"),
        )
    if not flags["distill_method"]:
        unused["without --distill-method"] = DISTILLATION
    if not flags["amp"]:
        unused["without --amp"] = ("amp_dtype",)
    if flags["resume"]:
        unused["with --resume, which continues at its own epoch"] = ("start_epoch",)
    if flags["gpu"] is not None:
        unused["with --gpu"] = ("device",)
    for why, names in unused.items():
        given = [name for name in names if flags[name] is not None and not (flags["resume"] and name in DISTILLATION)]
        if given:
            raise UserError(f"{flag_of(given[0])} has no effect {why}: drop one of them")
    if not flags["evaluate"] and flags["batch_size"] == 1:
        raise UserError("-b 1 cannot train: batch norm needs statistics over several images; give 2 or more")
    if flags["evaluate"] and not (flags["model_path"] or flags["pretrained"] or flags["resume"]):
        raise UserError("-e trains nothing and needs weights: give --model-path, --pretrained or --resume")


def remembered_options(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The options in the checkpoint that is resumed.

    Raises:
        UserError: a given flag differs from the checkpoint's, or nothing is left to train.
    """
    path, extra = flags["resume"], read_extra(flags["resume"])
    remembered, quantized = extra["options"], extra["quantized"]
    float_first = not quantized and not remembered["not_qat"]  # interrupted in the float training before quantization
    if flags["evaluate"] and float_first and not flags["not_qat"]:
        raise UserError(f"{path} was saved before quantization: evaluate it in float with --not-qat")
    if not flags["evaluate"] and flags["not_qat"] and not remembered["not_qat"]:
        raise UserError(f"{path} is a checkpoint of a quantized training: drop --not-qat, or give it with --model-path")
    for name in FIXED_IN_EVALUATION if flags["evaluate"] else FIXED_IN_TRAINING:
        given = str(flags[name].resolve()) if isinstance(flags[name], Path) else flags[name]
        if given is not None and given != remembered[name]:
            flag = flag_of(name)
            raise UserError(f"{flag} {given}: {path} was trained with {flag} {remembered[name]}; drop the flag")
    epochs, done = flags["epochs"] or remembered["epochs"], extra["training"]["epochs_done"]
    if done >= epochs and not flags["evaluate"] and not float_first:
        raise UserError(f"{path} has finished all {epochs} epochs: give more --epochs, or evaluate it with -e")
    return {name: Path(value) if name in PATHS and value else value for name, value in remembered.items()}


def flag_of(name: str) -> str:
    """The flag of an option: `--batch-size` for `batch_size`."""
    return "--" + name.replace("_", "-")

"""Which flags go together, and with the checkpoint that is resumed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpointing import read_extra
from errors import UserError

# With any of these changed, a resumed training is not the one that was interrupted. The seed also splits the digits.
FIXED_IN_EVALUATION = ("arch", "model_zoo", "num_classes", "backend", "quant_config", "seed")
TRAINING = (
    *("start_epoch", "lr", "lr_schedule", "warmup_epochs", "optim", "momentum", "wd", "label_smoothing", "ema"),
    *("distill_method", "teacher_arch", "teacher_path", "distill_alpha", "temperature", "amp", "amp_dtype"),
    *("compile", "sync_bn"),
)
FIXED_IN_TRAINING = (*FIXED_IN_EVALUATION, "batch_size", *TRAINING)
OF_DISTILLATION = ("teacher_arch", "teacher_path", "distill_alpha", "temperature")
OF_QUANTIZATION = ("backend", "quant_config", "calib_batches", "profile", "distill_method", *OF_DISTILLATION)
PATHS = ("data", "teacher_path", "quant_config")  # those that a checkpoint remembers


def check_combination(flags: Mapping[str, Any]) -> None:
    """Refuse a flag that would have no effect, rather than ignore it."""
    without: dict[str, tuple[str, ...]] = {}
    if flags["not_qat"]:
        without["with --not-qat"] = OF_QUANTIZATION
    if flags["evaluate"]:
        without["with -e, which trains nothing"] = ("epochs", *(name for name in TRAINING if name != "amp"))
    if not flags["distill_method"]:
        without["without --distill-method"] = OF_DISTILLATION
    if not flags["amp"]:
        without["without --amp"] = ("amp_dtype",)
    if flags["resume"]:
        without["with --resume, which knows where it was"] = ("start_epoch",)
    if flags["gpu"] is not None:
        without["beside --gpu"] = ("device",)
    for why, names in without.items():
        given = [
            name for name in names if flags[name] is not None and not (flags["resume"] and name in OF_DISTILLATION)
        ]
        if given:
            raise UserError(f"{flag_of(given[0])} has no effect {why}: drop one of them")
    if not flags["evaluate"] and flags["batch_size"] == 1:
        raise UserError("-b 1 cannot train: batch norm takes its statistics over the batch; give 2 or more")
    if flags["evaluate"] and not (flags["model_path"] or flags["pretrained"] or flags["resume"]):
        raise UserError("-e trains nothing, so it needs weights: give --model-path, --pretrained or --resume")


def remembered_options(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the checkpoint that is resumed, checked against those given."""
    path, extra = flags["resume"], read_extra(flags["resume"])
    remembered, quantized = extra["options"], extra["quantized"]
    float_first = not quantized and not remembered["not_qat"]  # a float training, and quantization is still to come
    if flags["evaluate"] and float_first and not flags["not_qat"]:
        raise UserError(f"{path} is from before the quantization: evaluate it in float with --not-qat")
    if not flags["evaluate"] and flags["not_qat"] and not remembered["not_qat"]:
        raise UserError(f"{path} is a checkpoint of a quantized training: drop --not-qat, or give it with --model-path")
    for name in FIXED_IN_EVALUATION if flags["evaluate"] else FIXED_IN_TRAINING:
        given = str(flags[name].resolve()) if isinstance(flags[name], Path) else flags[name]
        if given is not None and given != remembered[name]:
            flag = flag_of(name)
            raise UserError(f"{flag} {given}: {path} was trained with {flag} {remembered[name]}; drop the flag")
    epochs, done = flags["epochs"] or remembered["epochs"], extra["training"]["epochs_done"]
    if done >= epochs and not flags["evaluate"] and not float_first:
        raise UserError(f"{path} has all of its {epochs} epochs behind it: give more --epochs, or evaluate it with -e")
    return {name: Path(value) if name in PATHS and value else value for name, value in remembered.items()}


def flag_of(name: str) -> str:
    """An option's name as it is written on the command line."""
    return "--" + name.replace("_", "-")

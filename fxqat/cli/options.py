"""Options that several subcommands have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from fxqat.cli.load_data import is_named, kind_of
from fxqat.cli.preprocessing import Preprocessing
from fxqat.custom_quantizer.backend_type import BackendType

Command = TypeVar("Command", bound=Callable[..., Any])

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


def all_of(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Several options as one decorator, in this order in the help."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


model_options = all_of(
    click.argument("model"),
    click.option("--weights", type=FILE, help="State dict: .safetensors, or saved by torch."),
    click.option("--config", type=FILE, help="YAML file with a prepare_custom_config_dict."),
)

input_option = click.option(
    "--input", "inputs", multiple=True, metavar="[NAME=]SHAPE[:DTYPE]",
    help="Shape of an input, such as 1x3x224x224 or tokens=1x16:int64; once for each input. "
    "Not needed for torchvision: and timm: models.",
)  # fmt: skip

dynamic_shapes_option = click.option(
    "--dynamic-shapes", multiple=True, metavar="[INPUT=]AXIS:SIZE,...",
    help="Leave sizes open, such as 2:height,3:width or tokens=1:length; once for each input, by name or in order. "
    "Sizes of one name are equal.",
)  # fmt: skip

backend_option = click.option(
    "-b", "--backend", default="TSQAT", show_default=True,
    type=click.Choice([backend.name for backend in BackendType], case_sensitive=False),
    help="The chip or engine that the file is for.",
)  # fmt: skip

calib_option = click.option(
    "--calib", required=True, metavar="DATA",
    help="A folder or a .tar of images, an .npz or .npy of inputs, or FILE.py:NAME, package.module:NAME with batches.",
)  # fmt: skip

image_options = all_of(
    click.option("--resize", type=click.IntRange(1), help="Shorter side of an image, in pixels."),
    click.option("--crop", type=click.IntRange(1), help="Height and width of the centre crop."),
    click.option("--mean", help="Mean of each channel of pixels in 0..1, such as 0.485,0.456,0.406."),
    click.option("--std", help="Standard deviation of each channel, the same way."),
)

data_options = all_of(
    click.option(
        "--samples",
        default=64,
        show_default=True,
        type=click.IntRange(1),
        help="Samples to calibrate on; of a loader, batches.",
    ),
    click.option(
        "--batch-size", type=click.IntRange(1), help="Samples in a batch; 8 by default, or as an ONNX file has it."
    ),
    image_options,
)


def check_batch_size(batch_size: int | None, data: Sequence[str]) -> None:
    """Refuse ``--batch-size`` where nothing is put into batches."""
    if batch_size is not None and all(is_named(each) for each in data):
        raise click.UsageError(
            "--batch-size is for images and arrays; a loader gives batches, and a function has its own"
        )


def preprocessing_of(
    known: Preprocessing | None,
    data: Sequence[str],
    resize: int | None,
    crop: int | None,
    mean: str | None,
    std: str | None,
) -> Preprocessing | None:
    """The preprocessing of the model's library, with what the options change; None if neither says anything."""
    kinds = {kind_of(each) for each in data}
    if (resize is not None or crop is not None) and "images" not in kinds:
        raise click.UsageError(
            "--resize and --crop are for images; arrays and what a loader gives are taken as they are"
        )
    if (mean is not None or std is not None) and not kinds & {"images", "pixels"}:
        raise click.UsageError(
            "--mean and --std are for images and arrays of uint8; other inputs are taken as they are"
        )
    given = {"resize": resize, "crop": crop, "mean": _numbers("--mean", mean), "std": _numbers("--std", std)}
    if known is None and all(value is None for value in given.values()):
        return None
    return (known or Preprocessing()).changed(**given)


def _numbers(option: str, text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        return tuple(float(number) for number in text.split(","))
    except ValueError:
        raise click.BadParameter(
            f"expected numbers with commas between them, got {text!r}", param_hint=option
        ) from None

"""The hyperparameters in a file (`--hyp FILE.yaml`)."""

import difflib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import yaml
from errors import UserError
from loss import Gains

FOLDER = Path(__file__).with_name("hyp")


@dataclass(frozen=True)
class Hyperparameters:
    """Hyperparameters of a training; `box` to `anchor_t` are the :class:`Gains` of the loss.

    Args:
        optim: sgd or adam.
        lr: highest learning rate.
        lr_schedule: cosine, step or constant, as in the ImageNet example.
        warmup_epochs: epochs in which the learning rate rises from 0.
        momentum: momentum of sgd, beta 1 of adam.
        wd: weight decay; not applied to biases and scales.
        distill: weight of the loss from the float model, with --distill.
        mosaic: probability of joining four pictures.
        fliplr: probability of mirroring a picture.
        scale: mosaics scale pictures by 1 - scale to 1 + scale.
    """

    optim: str = "sgd"
    lr: float = 1e-3
    lr_schedule: str = "cosine"
    warmup_epochs: float = 0.0
    momentum: float = 0.937
    wd: float = 5e-4
    box: float = 0.05
    obj: float = 1.0
    cls: float = 0.5
    anchor_t: float = 4.0
    distill: float = 1.0
    mosaic: float = 1.0
    fliplr: float = 0.5
    scale: float = 0.5

    @property
    def gains(self) -> Gains:
        """The weights of the loss."""
        return Gains(**{field.name: getattr(self, field.name) for field in fields(Gains)})

    def state_dict(self) -> dict[str, Any]:
        """The values by name, as in a file."""
        return asdict(self)


def read_hyperparameters(path: Path) -> Hyperparameters:
    """Read a file; missing values have their defaults.

    Raises:
        UserError: the file cannot be read, or has an unknown name or a value of the wrong type.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"--hyp {path} cannot be read: {' '.join(str(error).split())}") from error
    known = {field.name: field.default for field in fields(Hyperparameters)}
    if not isinstance(content, dict):
        raise UserError(f"--hyp {path}: expected lines like `lr: 0.001`, got {type(content).__name__}")
    for name, value in content.items():
        if name not in known:
            near = "".join(f" (did you mean {close}?)" for close in difflib.get_close_matches(str(name), known, 1))
            raise UserError(f"--hyp {path}: unknown name {name!r}{near}; valid names: {', '.join(known)}")
        wanted = str if isinstance(known[name], str) else (int, float)
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise UserError(f"--hyp {path}: {name} is {value!r}; expected something like {known[name]!r}")
    return Hyperparameters(**{name: type(known[name])(value) for name, value in content.items()})

"""The numbers of a training that a file gives (`--hyp FILE.yaml`)."""

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
    """Numbers of a training; `box` to `anchor_t` are the :class:`Gains` of the loss.

    Args:
        optim: sgd or adam.
        lr: highest learning rate.
        lr_schedule: as of the ImageNet example.
        warmup_epochs: in which the rate rises from 0.
        momentum: of sgd, and beta 1 of adam.
        wd: weight decay, not of biases and scales.
        distill: share of the float model's part in the loss, with --distill.
        mosaic: how often four pictures are put together.
        fliplr: how often a picture is mirrored.
        scale: of mosaics: 1 - this to 1 + this.
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
        """Those of the loss."""
        return Gains(**{field.name: getattr(self, field.name) for field in fields(Gains)})

    def state_dict(self) -> dict[str, Any]:
        """As in a file."""
        return asdict(self)


def read_hyperparameters(path: Path) -> Hyperparameters:
    """Read a file; what it does not name has its default.

    Raises:
        UserError: it cannot be read, or names something else.
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
            near = "".join(f"; near it: {close}" for close in difflib.get_close_matches(str(name), known, 1))
            raise UserError(f"--hyp {path}: unknown {name!r}{near}. Known are {', '.join(known)}")
        wanted = str if isinstance(known[name], str) else (int, float)
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise UserError(f"--hyp {path}: {name} is {value!r}; expected something like {known[name]!r}")
    return Hyperparameters(**{name: type(known[name])(value) for name, value in content.items()})

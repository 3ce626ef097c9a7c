"""The hyperparameters in a file (`--hyp FILE.yaml`)."""

import difflib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import yaml
from errors import UserError
from logs import LOG
from loss import Gains
from schedules import SCHEDULES

FOLDER = Path(__file__).with_name("data")
UPSTREAM = {"lr0": "lr", "weight_decay": "wd", "giou": "box"}
"""Upstream's names of hyperparameters that have another name here."""
WITHOUT_EFFECT: dict[str, float | None] = {
    **dict.fromkeys(("warmup_momentum", "warmup_bias_lr", "iou_t", "anchors")),
    **dict.fromkeys(("cls_pw", "obj_pw"), 1.0),
    **dict.fromkeys(("fl_gamma", "label_smoothing", "hsv_h", "hsv_s", "hsv_v", "degrees", "translate", "shear"), 0.0),
    **dict.fromkeys(("perspective", "flipud", "mixup", "copy_paste"), 0.0),
}
"""Upstream's hyperparameters that this trainer does not have, with the value that turns each off (None: no value)."""
CHOICES = {"optim": ("sgd", "adam"), "lr_schedule": tuple(SCHEDULES)}


@dataclass(frozen=True)
class Hyperparameters:
    """Hyperparameters of a training; `box` to `anchor_t` are the :class:`Gains` of the loss.

    Args:
        optim: sgd or adam.
        lr: highest learning rate.
        lr_schedule: cosine, step or constant, as in the ImageNet example.
        lrf: share of `lr`, 0 to 1, to which the schedule falls.
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
    lrf: float = 0.0
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
    """Read a file, with names of this example or of upstream; missing values have their defaults.

    A warning lists the hyperparameters of upstream that this trainer does not have, if the file turns them on.

    Raises:
        UserError: the file cannot be read, or has an unknown name, a name twice, or a wrong value.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"--hyp {path} cannot be read: {' '.join(str(error).split())}") from error
    known = {field.name: field.default for field in fields(Hyperparameters)}
    if not isinstance(content, dict):
        raise UserError(f"--hyp {path}: expected lines like `lr: 0.001`, got {type(content).__name__}")
    values: dict[str, Any] = {}
    unused = []
    for written, value in content.items():
        name = UPSTREAM.get(written, written)
        if name in WITHOUT_EFFECT:
            if value != WITHOUT_EFFECT[name]:
                unused.append(f"{name} {value}")
            continue
        if name not in known:
            every = (*known, *UPSTREAM, *WITHOUT_EFFECT)
            near = "".join(f" (did you mean {close}?)" for close in difflib.get_close_matches(str(name), every, 1))
            raise UserError(f"--hyp {path}: unknown name {name!r}{near}; valid names: {', '.join(known)}")
        wanted = str if isinstance(known[name], str) else (int, float)
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise UserError(f"--hyp {path}: {written} is {value!r}; expected something like {known[name]!r}")
        if value not in CHOICES.get(name, (value,)):
            raise UserError(f"--hyp {path}: {name} is {value!r}; expected {' or '.join(CHOICES[name])}")
        if name in values:
            raise UserError(f"--hyp {path}: {name} is given twice, here as {written}")
        values[name] = type(known[name])(value)
    found = Hyperparameters(**values)
    if not 0 <= found.lrf <= 1:
        raise UserError(f"--hyp {path}: lrf is {found.lrf}; expected the share of lr at the end, 0 to 1")
    if found.lr_schedule == "constant" and "lrf" in values:
        raise UserError(f"--hyp {path}: lrf has no effect with lr_schedule constant: drop one of them")
    if unused:
        LOG.warning("--hyp %s: this trainer does not have, and leaves out: %s", path, ", ".join(unused))
    return found

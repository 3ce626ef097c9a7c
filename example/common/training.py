"""The state of a training besides the model: optimizer, schedule, loss scaler, averaged weights, progress."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from logs import LOG
from schedules import lr_factor
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class Options(Protocol):
    """The flags about training; see `imagenet_example/main.py -h`."""

    lr: float
    lr_schedule: str
    lrf: float
    warmup_epochs: float
    epochs: int
    start_epoch: int
    optim: str
    momentum: float
    wd: float
    ema: float | None
    amp: bool
    amp_dtype: str | None


@dataclass(frozen=True)
class Precision:
    """Automatic mixed precision: the type of the device, and the dtype under autocast (None: float32)."""

    device: str
    dtype: torch.dtype | None

    @classmethod
    def of(cls, options: Options, device: torch.device) -> "Precision":
        """The precision that the flags ask for."""
        default = "float16" if device.type == "cuda" else "bfloat16"
        return cls(device.type, getattr(torch, options.amp_dtype or default) if options.amp else None)

    def autocast(self) -> torch.autocast:
        """The context of a forward pass."""
        return torch.autocast(self.device, self.dtype, enabled=self.dtype is not None)


class Training:
    """Optimizer, learning rate, loss scaler, averaged weights, and progress of one training.

    Weight decay leaves out parameters with one dimension or none: biases, batch norm, scales.

    Args:
        model: the trained model, without wrappers.
        options: the flags.
        precision: precision of the forward passes; float16 scales the loss.
        steps_per_epoch: batches in an epoch.
        extra: more parameters to train, such as the regressors of a distillation.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        precision: Precision,
        steps_per_epoch: int,
        extra: nn.Module | None = None,
    ) -> None:
        self.model, self.precision, self.extra = model, precision, extra
        parameters = [p for p in (*model.parameters(), *(extra.parameters() if extra else ())) if p.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": options.wd},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        if options.optim == "sgd":
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, options.lr, momentum=options.momentum)
        else:
            self.optimizer = torch.optim.Adam(groups, options.lr, betas=(options.momentum, 0.999))
        self.scheduler = LambdaLR(
            self.optimizer,
            lambda step: lr_factor(
                options.lr_schedule,
                options.warmup_epochs,
                options.start_epoch + step / steps_per_epoch,
                options.epochs,
                options.lrf,
            ),
        )
        self.scaler = torch.amp.GradScaler(precision.device, enabled=precision.dtype == torch.float16)
        self.average = None
        if options.ema is not None:
            self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(options.ema))
        self.epochs = options.epochs
        self.epochs_done = options.start_epoch
        self.steps_done = 0  # in the current epoch
        self.best = -math.inf  # score

    @property
    def evaluated(self) -> nn.Module:
        """The model that is evaluated, exported and saved as the best: the averaged one, if there is one."""
        return self.model if self.average is None else self.average.module

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return float(self.scheduler.get_last_lr()[0])

    def step(self, accepted: bool) -> None:
        """Update the weights after `backward`; a step that is not accepted is only counted."""
        if accepted:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if self.average is not None:
                self.average.update_parameters(self.model)
        self.scheduler.step()
        self.steps_done += 1

    def state_dict(self) -> dict[str, Any]:
        """Everything except the model that the next step depends on, as tensors and plain values."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "average": None if self.average is None else plain_state(self.average),
            "extra": None if self.extra is None else self.extra.state_dict(),
            "epochs_done": self.epochs_done,
            "steps_done": self.steps_done,
            "best": self.best,
            "rng_cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }

    def load_state_dict(self, state: dict[str, Any], rank: int = 0) -> None:
        """Restore what `state_dict` returned; "rng" holds the random state of each process."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.scaler.load_state_dict(state["scaler"])
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        if self.extra is not None:
            self.extra.load_state_dict(state["extra"])
        self.epochs_done, self.steps_done = state["epochs_done"], state["steps_done"]
        self.best = state["best"]
        torch.set_rng_state(state["rng"][min(rank, len(state["rng"]) - 1)].cpu())
        if state["rng_cuda"] and torch.cuda.is_available():
            torch.cuda.set_rng_state_all([rng.cpu() for rng in state["rng_cuda"]])

    def resume(self, checkpoint: Path, state: dict[str, Any], folder: Path, rank: int) -> None:
        """Continue from the state in a checkpoint, as the process of a rank, with `folder` for the output."""
        self.load_state_dict(state, rank)
        if checkpoint.resolve().parent != folder.resolve():
            self.best = -math.inf  # the best model so far is not in this folder
        LOG.info("resuming %s after %d of %d epochs", checkpoint, self.epochs_done, self.epochs)


def plain_state(module: nn.Module) -> dict[str, Any]:
    """A state dict that `torch.load(..., weights_only=True)` can read."""
    return dict(module.state_dict())

"""Training programs that use Lightning."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from job import Job, Outcome, check_same_state, optimizer_of
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from torch import Tensor, nn

DECAY = 0.7


class Task(pl.LightningModule):
    """Classification with any model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.losses: list[float] = []
        self.snapshots: list[dict[str, Tensor]] = []
        self.starts: list[dict[str, Tensor]] = []

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """The loss of a batch."""
        x, y = batch
        loss = nn.functional.cross_entropy(self.model(x).float(), y)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        """Log the loss of a batch."""
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self.model(x).float(), y))

    def on_train_epoch_start(self) -> None:
        """Keep the parameters."""
        self.starts.append(self._parameters_now())

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        """Keep the parameters."""
        self.snapshots.append(self._parameters_now())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer."""
        return optimizer_of(self)

    def _parameters_now(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.model.named_parameters()}


def fit(job: Job, task: Task, resume: str | None = None, **options: Any) -> pl.Trainer:
    """Train two epochs, or more on request."""
    defaults = {"max_epochs": 2, "devices": 1, "num_sanity_val_steps": 0}
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(job.folder),
        **(defaults | options),
    )
    trainer.fit(task, job.loader(), job.loader(), ckpt_path=resume)
    return trainer


def lightning_checkpoint(job: Job) -> Outcome:
    """``ModelCheckpoint`` at each epoch, resumed from the first one in a fresh model."""
    task, keep = Task(job.model), ModelCheckpoint(job.folder, filename="{epoch}", save_top_k=-1)
    fit(job, task, callbacks=[keep])
    resumed = Task(job.fresh())
    fit(job, resumed, resume=str(job.folder / "epoch=0.ckpt"))
    checked = [check_same_state(resumed.model, job.model, "resumed = uninterrupted")]
    return Outcome({"model": resumed.model}, task.losses, checked)


def lightning_ema(job: Job) -> Outcome:
    """``EMAWeightAveraging``, whose average is in the model at the end."""
    task = Task(job.model)
    fit(job, task, callbacks=[EMAWeightAveraging(decay=DECAY)])
    average = task.snapshots[0]
    for snapshot in task.snapshots[1:]:
        average = {name: value.lerp(snapshot[name], 1 - DECAY) for name, value in average.items()}
    for name, value in task.model.named_parameters():
        torch.testing.assert_close(value.detach(), average[name])
    return Outcome({"model": task.model}, task.losses, ["average = average by hand"])


def lightning_swa(job: Job) -> Outcome:
    """``StochasticWeightAveraging`` from the second of four epochs."""
    task = Task(job.model)
    fit(job, task, max_epochs=4, callbacks=[StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2)])
    for name, value in task.model.named_parameters():
        torch.testing.assert_close(value.detach(), torch.stack([start[name] for start in task.starts[1:4]]).mean(0))
    statistics = {name: value for name, value in task.model.named_buffers() if "running" in name}
    assert statistics, "the model has no BatchNorm"
    assert all(value.isfinite().all() for value in statistics.values())
    return Outcome({"model": task.model}, task.losses, ["average = average by hand"])


def lightning_ddp(job: Job) -> Outcome:
    """Two processes (gloo)."""
    task = Task(job.model)
    before = loss_by_hand(task, job)
    fit(job, task, max_epochs=4, devices=2, strategy="ddp_spawn")
    return Outcome({"model": task.model}, [before, loss_by_hand(task, job)], ["the main process has the trained model"])


def loss_by_hand(task: Task, job: Job) -> float:
    """The mean loss of the model over all samples, in eval mode."""
    task.eval()
    with torch.no_grad():
        losses = [nn.functional.cross_entropy(task.model(x), y) for x, y in job.loader()]
    return torch.stack(losses).mean().item()


def lightning_bf16(job: Job) -> Outcome:
    """``precision="bf16-true"``: the whole model in bfloat16."""
    task = Task(job.model)
    fit(job, task, precision="bf16-true", max_epochs=4)
    kinds = {str(value.dtype) for value in task.model.parameters()}
    return Outcome({"model": task.model.float()}, task.losses, [f"parameters are {', '.join(sorted(kinds))}"])

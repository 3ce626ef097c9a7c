"""Training programs that use timm."""

from __future__ import annotations

import torch
from job import Job, Outcome, check_same_state, optimizer_of, train_epoch, train_step
from timm.models import resume_checkpoint
from timm.utils import CheckpointSaver, ModelEmaV2, ModelEmaV3, NativeScaler
from torch import Tensor, nn

DECAY = 0.7


def average_by_hand(job: Job, ema: ModelEmaV2 | ModelEmaV3) -> tuple[list[float], dict[str, Tensor]]:
    """Train two epochs with an average of the model; return the losses and the average of the floats, by hand."""
    optimizer = optimizer_of(job.model)
    average = {name: value.clone() for name, value in job.model.state_dict().items()}
    losses = []
    for _ in range(2):
        job.model.train()
        for x, y in job.loader():
            losses.append(train_step(job.model, optimizer, x, y))
            ema.update(job.model)
            for name, value in job.model.state_dict().items():
                mixed = average[name].lerp(value, 1 - DECAY) if value.is_floating_point() else value
                average[name] = mixed.clone()
    return losses, average


def with_average(job: Job, ema: ModelEmaV2 | ModelEmaV3) -> Outcome:
    """Train with an average, and check the average."""
    losses, average = average_by_hand(job, ema)
    for name, value in ema.module.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(value, average[name], msg=lambda text, name=name: f"{name}: {text}")
    return Outcome({"model": job.model, "average": ema.module}, losses, ["average = average by hand"])


def model_ema_v2(job: Job) -> Outcome:
    """``ModelEmaV2``."""
    return with_average(job, ModelEmaV2(job.model, decay=DECAY))


def model_ema_v3(job: Job) -> Outcome:
    """``ModelEmaV3``."""
    return with_average(job, ModelEmaV3(job.model, decay=DECAY))


def native_scaler(job: Job) -> Outcome:
    """``NativeScaler`` with gradient clipping, under autocast in bfloat16."""
    optimizer, scaler = optimizer_of(job.model), NativeScaler(device="cpu")
    losses = []
    for _ in range(2):
        job.model.train()
        for x, y in job.loader():
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.cross_entropy(job.model(x), y)
            scaler(loss, optimizer, clip_grad=1.0, parameters=job.model.parameters())
            losses.append(loss.item())
    assert scaler.state_dict()["_growth_tracker"] == len(losses), "a step was skipped"
    return Outcome({"model": job.model}, losses, ["no step skipped"])


def checkpoint_saver(job: Job) -> Outcome:
    """``CheckpointSaver`` with an average and a scaler, and ``resume_checkpoint`` in a fresh model."""
    optimizer, scaler = optimizer_of(job.model), NativeScaler(device="cpu")
    ema = ModelEmaV2(job.model, decay=DECAY)
    saver = CheckpointSaver(
        job.model, optimizer, model_ema=ema, amp_scaler=scaler, checkpoint_dir=job.folder, recovery_dir=job.folder
    )
    losses = train_epoch(job.model, optimizer, job)
    ema.update(job.model)
    saver.save_checkpoint(0, metric=-losses[-1])
    losses += train_epoch(job.model, optimizer, job)

    resumed, average = job.fresh(), job.fresh()
    again = optimizer_of(resumed)
    epoch = resume_checkpoint(resumed, job.folder / "last.pth.tar", again, NativeScaler(device="cpu"))
    assert epoch == 1, f"resumed at epoch {epoch}"
    average.load_state_dict(torch.load(job.folder / "last.pth.tar", weights_only=True)["state_dict_ema"])
    checked = [check_same_state(average, ema.module, "average = saved average")]
    train_epoch(resumed, again, job)
    checked.append(check_same_state(resumed, job.model, "resumed = uninterrupted"))
    return Outcome({"model": resumed}, losses, checked)

"""Training loops with a prepared model. Each function takes a prepared, calibrated model and returns its last loss."""

import copy
import os
import tempfile

import torch
from torch import nn

from fxqat import (
    disable_all,
    enable_quantization,
    load_checkpoint,
    prepare_by_platform,
    save_checkpoint,
)
from fxqat.tools import train_rounding


# [plain]
def plain(gm, loader):
    enable_quantization(gm)
    gm.train()
    optimizer = torch.optim.SGD(gm.parameters(), lr=1e-3, momentum=0.9)
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(gm(x), y)
        loss.backward()
        optimizer.step()
    return loss.item()


# [amp]
def mixed_precision(gm, loader, device="cpu"):
    enable_quantization(gm)
    gm.to(device).train()
    optimizer = torch.optim.SGD(gm.parameters(), lr=1e-3, momentum=0.9)
    scaler = torch.amp.GradScaler(device)  # needed for float16; harmless for bfloat16
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            loss = nn.functional.cross_entropy(gm(x.to(device)), y.to(device))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return loss.item()


# [ddp]
def data_parallel(gm, loader):
    """What each process of ``torchrun --nproc-per-node N train.py`` does."""
    torch.distributed.init_process_group("gloo")  # "nccl" on GPUs
    enable_quantization(gm)
    wrapped = nn.parallel.DistributedDataParallel(gm.train())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-3, momentum=0.9)
    for x, y in loader:  # a loader with a DistributedSampler
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(wrapped(x), y)
        loss.backward()
        optimizer.step()
    if torch.distributed.get_rank() == 0:
        save_checkpoint(wrapped, "model.pth")
    torch.distributed.destroy_process_group()
    return loss.item()


# [distill]
def distilled(gm, loader, temperature=2.0):
    teacher = copy.deepcopy(gm).eval()  # the float model; any other float model will do
    disable_all(teacher)
    enable_quantization(gm)
    gm.train()
    optimizer = torch.optim.SGD(gm.parameters(), lr=1e-3, momentum=0.9)
    for x, _ in loader:  # no labels needed
        with torch.no_grad():
            target = (teacher(x) / temperature).softmax(1)
        optimizer.zero_grad()
        logits = gm(x) / temperature
        loss = nn.functional.cross_entropy(logits, target) * temperature**2
        loss.backward()
        optimizer.step()
    return loss.item()


# [rounding]
def learned_rounding(gm, loader):
    teacher = copy.deepcopy(gm).eval()
    disable_all(teacher)
    enable_quantization(gm)
    gm.train()
    with train_rounding(gm, steps=len(loader)) as rounding:
        optimizer = torch.optim.Adam(rounding.parameter_groups())
        for x, _ in loader:
            with torch.no_grad():
                target = teacher(x).softmax(1)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(gm(x), target)
            loss.backward()
            rounding.pull()
            optimizer.step()
    return loss.item()


# [resume]
def resumed(model, gm, loader):
    loss = plain(gm, loader)
    optimizer = torch.optim.SGD(gm.parameters(), lr=1e-3, momentum=0.9)
    save_checkpoint(gm, "model.pth", extra={"epoch": 1, "optimizer": optimizer.state_dict()})

    again = prepare_by_platform(model)  # in another process: the same model, backend and configuration
    extra = load_checkpoint(again, "model.pth")
    optimizer = torch.optim.SGD(again.parameters(), lr=1e-3, momentum=0.9)
    optimizer.load_state_dict(extra["optimizer"])
    assert extra["epoch"] == 1
    return loss


# [timm]
def with_timm(gm, loader):
    from timm.utils import ModelEmaV3, NativeScaler

    enable_quantization(gm)
    gm.train()
    ema = ModelEmaV3(gm, decay=0.99)  # after enable_quantization: the average is a copy with switches of its own
    scaler = NativeScaler(device="cpu")
    optimizer = torch.optim.SGD(gm.parameters(), lr=1e-3, momentum=0.9)
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(gm(x), y)
        scaler(loss, optimizer, clip_grad=1.0, parameters=gm.parameters())
        ema.update(gm)
    save_checkpoint(ema.module, "average.pth")
    return loss.item()


# [lightning]
def with_lightning(gm, loader):
    import lightning.pytorch as pl

    class Task(pl.LightningModule):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def training_step(self, batch, index):
            x, y = batch
            return nn.functional.cross_entropy(self.model(x), y)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)

    enable_quantization(gm)
    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False)
    trainer.fit(Task(gm), loader)
    return float(trainer.callback_metrics.get("loss", 0.0))


# [trainer]
def with_transformers(gm, loader):
    from transformers import Trainer, TrainingArguments

    class Logits(nn.Module):
        """The model with the name that the data has; a prepared transformers model needs no such wrapper."""

        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, pixel_values):
            return {"logits": self.model(pixel_values)}

    enable_quantization(gm)
    rows = [{"pixel_values": x, "labels": y} for images, labels in loader for x, y in zip(images, labels, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, num_train_epochs=1, learning_rate=1e-3, report_to=[], label_names=["labels"], use_cpu=True
        )
        trainer = Trainer(
            model=Logits(gm),
            args=arguments,
            train_dataset=rows,
            compute_loss_func=lambda outputs, labels, **_: nn.functional.cross_entropy(outputs["logits"], labels),
        )
        return trainer.train().training_loss


# [end]
def one_process():
    """The settings that torchrun gives to a process, for a single one."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29513", RANK="0", WORLD_SIZE="1")

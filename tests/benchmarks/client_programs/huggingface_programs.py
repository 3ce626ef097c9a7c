"""Training programs that use transformers and accelerate."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from accelerate import Accelerator
from job import Job, Outcome, check_same_state, optimizer_of
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments


def trainer_of(model: nn.Module, job: Job, **options: Any) -> Trainer:
    """A trainer that knows only the model and the samples, which have a column that the model does not take."""
    columns = {**job.samples, "index": torch.arange(len(job.samples["labels"]))}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    arguments = TrainingArguments(
        output_dir=str(job.folder),
        per_device_train_batch_size=job.batch_size,
        per_device_eval_batch_size=job.batch_size,
        num_train_epochs=4,
        learning_rate=1e-2,
        save_strategy="epoch",
        eval_strategy="epoch",
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        label_names=None if "labels" in inspect.signature(model.forward).parameters else ["labels"],
    )
    return Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows, **options)


def hf_trainer(job: Job, **options: Any) -> Outcome:
    """``Trainer`` that trains, evaluates and saves at each epoch, and resumes from the first one in a fresh model."""
    trainer = trainer_of(job.model, job, **options)
    trainer.train()
    history = trainer.state.log_history
    losses = [entry["loss"] for entry in history if "loss" in entry]
    evaluated = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    assert len(evaluated) == 4, history
    assert evaluated[-1] < evaluated[0], evaluated
    expected = loss_by_hand(job.model, job)
    assert abs(trainer.evaluate()["eval_loss"] - expected) < 1e-4, expected
    predictions = trainer.predict(trainer.eval_dataset)
    assert predictions.predictions.shape == (len(job.samples["labels"]), 4), predictions.predictions.shape

    resumed = job.fresh()
    first = min(job.folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    trainer_of(resumed, job, **options).train(resume_from_checkpoint=str(first))
    checked = ["evaluation = loss by hand", check_same_state(resumed, job.model, "resumed = uninterrupted")]
    return Outcome({"model": resumed}, losses, checked)


def hf_trainer_without_labels(job: Job) -> Outcome:
    """The same with a model that takes no labels, and ``compute_loss_func``."""
    return hf_trainer(job, compute_loss_func=loss_of)


def loss_of(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Cross entropy of the logits; ``num_items_in_batch`` is the number of samples, as one step has one batch."""
    return nn.functional.cross_entropy(outputs.logits, labels)


def loss_by_hand(model: nn.Module, job: Job) -> float:
    """The mean loss of the model over all samples."""
    model.eval()
    losses = []
    for batch in job.loader():
        arguments = dict(zip(job.samples, batch, strict=True))
        taken = {name: arguments[name] for name in inspect.signature(model.forward).parameters}
        with torch.no_grad():
            losses.append(loss_of(model(**taken), arguments["labels"]))
    return torch.stack(losses).mean().item()


def accelerate_bf16(job: Job) -> Outcome:
    """As :func:`accelerate_state`, under autocast: ``prepare`` replaces ``forward`` of the model by a wrapper."""
    return accelerate_state(job, "bf16")


def accelerate_state(job: Job, precision: str = "no") -> Outcome:
    """``prepare``, ``save_state`` and ``load_state`` in a fresh model."""
    accelerator = Accelerator(cpu=True, mixed_precision=precision)

    def epoch(model: nn.Module, optimizer: Any, loader: DataLoader[Any]) -> list[float]:
        losses = []
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        return losses

    prepared = accelerator.prepare(job.model, optimizer_of(job.model), job.loader())
    losses = epoch(*prepared)
    accelerator.save_state(str(job.folder / "state"))
    losses += epoch(*prepared)
    accelerator.free_memory()

    fresh = job.fresh()
    resumed = accelerator.prepare(fresh, optimizer_of(fresh), job.loader())
    accelerator.load_state(str(job.folder / "state"))
    epoch(*resumed)
    unwrapped = accelerator.unwrap_model(resumed[0])
    checked = [check_same_state(unwrapped, accelerator.unwrap_model(prepared[0]), "resumed = uninterrupted")]
    accelerator.save_model(unwrapped, str(job.folder / "model"))
    return Outcome({"model": unwrapped}, losses, checked)

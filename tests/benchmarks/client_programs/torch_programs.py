"""Training programs that use torch, safetensors, torchmetrics and ignite."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver
from ignite.metrics import Accuracy as IgniteAccuracy
from job import Job, Outcome, check_same_state, optimizer_of, train_epoch, train_epochs, train_step
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

WORLD = 2


def averaged_model(job: Job) -> Outcome:
    """``AveragedModel`` with the exponential average and with the equal one, and ``update_bn``."""
    optimizer = optimizer_of(job.model)
    equal, exponential = AveragedModel(job.model), AveragedModel(job.model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    losses, seen = [], []
    for _ in range(3):
        losses += train_epoch(job.model, optimizer, job)
        equal.update_parameters(job.model)
        exponential.update_parameters(job.model)
        seen.append({name: value.detach().clone() for name, value in job.model.named_parameters()})
    for name, value in equal.module.named_parameters():
        torch.testing.assert_close(value, torch.stack([each[name] for each in seen]).mean(0))
    for name, value in exponential.module.named_parameters():
        expected = seen[0][name].lerp(seen[1][name], 0.3).lerp(seen[2][name], 0.3)
        torch.testing.assert_close(value, expected)
    before = {name: value.clone() for name, value in equal.module.named_buffers() if name.endswith("running_mean")}
    update_bn(job.loader(), equal)
    after = dict(equal.module.named_buffers())
    assert before, "the model has no BatchNorm"
    assert not any(torch.equal(after[name], value) for name, value in before.items()), "update_bn changed nothing"
    models = {"model": job.model, "equal average": equal.module, "exponential average": exponential.module}
    return Outcome(models, losses, ["averages = averages by hand", "update_bn changed the statistics"])


def safetensors_model(job: Job) -> Outcome:
    """``save_model`` and ``load_model``."""
    losses = train_epochs(job.model, 2, job)
    save_model(job.model, str(job.folder / "model.safetensors"))
    loaded = job.fresh()
    missing, unexpected = load_model(loaded, job.folder / "model.safetensors")
    assert not missing, missing
    assert not unexpected, unexpected
    return Outcome({"loaded": loaded}, losses, [check_same_state(loaded, job.model, "loaded = saved")])


def safetensors_file(job: Job) -> Outcome:
    """``save_file`` of the state dict, and ``load_file``."""
    losses = train_epochs(job.model, 2, job)
    save_file(job.model.state_dict(), job.folder / "model.safetensors")
    loaded = job.fresh()
    loaded.load_state_dict(load_file(job.folder / "model.safetensors"))
    return Outcome({"loaded": loaded}, losses, [check_same_state(loaded, job.model, "loaded = saved")])


def distributed_checkpoint(job: Job) -> Outcome:
    """``torch.distributed.checkpoint`` of model and optimizer in one process."""
    optimizer = optimizer_of(job.model)
    losses = train_epoch(job.model, optimizer, job)
    model_state, optimizer_state = get_state_dict(job.model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=job.folder)
    losses += train_epoch(job.model, optimizer, job)

    resumed = job.fresh()
    again = optimizer_of(resumed)
    model_state, optimizer_state = get_state_dict(resumed, again)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=job.folder)
    set_state_dict(resumed, again, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    train_epoch(resumed, again, job)
    return Outcome({"model": resumed}, losses, [check_same_state(resumed, job.model, "resumed = uninterrupted")])


def metrics_loop(job: Job) -> Outcome:
    """A loop with metrics of torchmetrics, in training and in evaluation."""
    optimizer, mean = optimizer_of(job.model), MeanMetric()
    metrics = MetricCollection([MulticlassAccuracy(4, average="micro"), MulticlassConfusionMatrix(4)])
    losses = []
    for _ in range(2):
        job.model.train()
        for x, y in job.loader():
            losses.append(train_step(job.model, optimizer, x, y))
            mean.update(losses[-1])
    job.model.eval()
    right = 0
    with torch.no_grad():
        for x, y in job.loader():
            logits = job.model(x)
            metrics.update(logits, y)
            right += int((logits.argmax(1) == y).sum())
    found = metrics.compute()
    count = len(next(iter(job.samples.values())))
    assert found["MulticlassConfusionMatrix"].sum() == count
    assert abs(found["MulticlassAccuracy"].item() - right / count) < 1e-6
    assert abs(mean.compute().item() - sum(losses) / len(losses)) < 1e-5
    return Outcome({"model": job.model}, losses, ["metrics = metrics by hand"])


def ignite_trainer(job: Job) -> Outcome:
    """A supervised trainer of ignite with an evaluator and ``Checkpoint``, resumed in a fresh model."""

    def trainer_of(model: nn.Module, losses: list[float]) -> tuple[object, dict[str, object]]:
        optimizer = optimizer_of(model)
        trainer = create_supervised_trainer(model, optimizer, nn.functional.cross_entropy)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output))
        return trainer, {"model": model, "optimizer": optimizer, "trainer": trainer}

    losses: list[float] = []
    trainer, saved = trainer_of(job.model, losses)
    evaluator = create_supervised_evaluator(job.model, {"accuracy": IgniteAccuracy()})
    accuracies = []
    keep = Checkpoint(saved, DiskSaver(str(job.folder), require_empty=False), n_saved=None)
    trainer.add_event_handler(Events.EPOCH_COMPLETED(once=1), keep)
    trainer.add_event_handler(
        Events.EPOCH_COMPLETED, lambda _: accuracies.append(evaluator.run(job.loader()).metrics["accuracy"])
    )
    trainer.run(job.loader(), max_epochs=2)
    assert accuracies[-1] >= accuracies[0], accuracies

    resumed = job.fresh()
    again, restored = trainer_of(resumed, [])
    (file,) = job.folder.glob("checkpoint*.pt")
    Checkpoint.load_objects(restored, torch.load(file, weights_only=True))
    again.run(job.loader(), max_epochs=2)
    return Outcome({"model": resumed}, losses, [check_same_state(resumed, job.model, "resumed = uninterrupted")])


def compiled_step(job: Job) -> Outcome:
    """A training step compiled with ``fullgraph=True``, and the same steps without the compiler."""
    eager = copy.deepcopy(job.model)
    compiled = torch.compile(job.model, fullgraph=True)
    losses, expected = train_epochs(compiled, 2, job), train_epochs(eager, 2, job)
    # The compiler sums in another order; where that moves a value over a rounding boundary, it moves by a step.
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=0.02, atol=0.02)
    compiled.eval()
    with torch.no_grad():
        assert compiled(next(iter(job.loader()))[0]).isfinite().all()
    torch.save(compiled.state_dict(), job.folder / "compiled.pth")
    loaded = torch.compile(job.fresh())
    loaded.load_state_dict(torch.load(job.folder / "compiled.pth", weights_only=True))
    checked = [check_same_state(loaded, compiled, "loaded = saved")]
    return Outcome({"compiled": compiled}, losses, ["losses = losses without the compiler, within 2 %", *checked])


def ddp(job: Job) -> Outcome:
    """``DistributedDataParallel`` on two processes."""
    torch.multiprocessing.spawn(_one_rank, (job, str(job.folder)), nprocs=WORLD)
    results = [torch.load(job.folder / f"rank{rank}.pth", weights_only=True) for rank in range(WORLD)]
    for name, _ in job.model.named_parameters():
        assert torch.equal(results[0]["state"][name], results[1]["state"][name]), f"the ranks differ at {name}"
    job.model.load_state_dict(results[0]["state"])
    losses = [sum(both) / WORLD for both in zip(*(each["losses"] for each in results), strict=True)]
    return Outcome({"model": job.model}, losses, ["parameters equal on both ranks"])


def ddp_with_dropout(job: Job) -> Outcome:
    """``DistributedDataParallel`` on two processes, of a model that drops attention in training and not in eval."""
    outcome = ddp(job)
    x = next(iter(job.loader()))[0]
    for training in (True, False):
        job.model.train(training)
        with torch.no_grad():
            random = not torch.equal(job.model(x), job.model(x))
        assert random is training, f"attention dropout is {'on' if random else 'off'} with training={training}"
    return Outcome(outcome.models, outcome.losses, [*outcome.checked, "attention drops in training only"])


def _one_rank(rank: int, job: Job, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    torch.manual_seed(rank)
    wrapped = DistributedDataParallel(copy.deepcopy(job.model).train())  # spawn shares the memory of tensors
    optimizer = optimizer_of(wrapped)
    losses = []
    for _ in range(3):
        for x, y in job.loader():
            losses.append(train_step(wrapped, optimizer, x[rank::WORLD], y[rank::WORLD]))
    state: dict[str, Tensor] = wrapped.module.state_dict()
    torch.save({"state": state, "losses": losses}, Path(folder) / f"rank{rank}.pth")
    dist.destroy_process_group()

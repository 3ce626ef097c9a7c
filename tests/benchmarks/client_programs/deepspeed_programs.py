"""A training program that uses DeepSpeed on CPUs."""

from __future__ import annotations

import copy
import os
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist
from job import Job, Outcome, optimizer_of, train_step
from torch.nn.parallel import DistributedDataParallel

WORLD = 2

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,  # the program makes the batches itself
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,  # torch's SGD
    "gradient_clipping": 0.0,  # DeepSpeed 0.19 clips to a norm of 1 without it
}


def zero(job: Job) -> Outcome:
    """ZeRO stage 2 on two processes, and the same steps with ``DistributedDataParallel``."""
    torch.multiprocessing.spawn(_one_rank, (job, str(job.folder)), nprocs=WORLD)
    results = [torch.load(job.folder / f"rank{rank}.pth", weights_only=True) for rank in range(WORLD)]
    for way in ("zero", "ddp"):
        for name, _ in job.model.named_parameters():
            states = [result[way]["state"][name] for result in results]
            assert torch.equal(*states), f"{way}: the ranks differ at {name}"
    found, expected = results[0]["zero"], results[0]["ddp"]
    torch.testing.assert_close(torch.tensor(found["losses"]), torch.tensor(expected["losses"]), rtol=1e-5, atol=1e-5)
    for name, value in expected["state"].items():
        torch.testing.assert_close(found["state"][name], value, rtol=1e-5, atol=1e-5, msg=name)
    job.model.load_state_dict(found["state"])
    losses = [sum(both) / WORLD for both in zip(*(each["zero"]["losses"] for each in results), strict=True)]
    return Outcome({"model": job.model}, losses, ["parameters equal on both ranks", "losses and parameters = DDP's"])


def _one_rank(rank: int, job: Job, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    init_method = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=WORLD)
    deepspeed.init_distributed("gloo")
    results = {}

    model = copy.deepcopy(job.model).train()  # spawn shares the memory of tensors
    for parameter in model.parameters():
        if parameter.dim() == 0:  # DeepSpeed 0.19 fails to broadcast these; all ranks have the same
            parameter.ds_optim_param = True
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer_of(model), config=CONFIG)
    torch.manual_seed(rank)
    losses = []
    for x, y in _shares(job, rank):
        loss = torch.nn.functional.cross_entropy(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    results["zero"] = {"state": copy.deepcopy(model.state_dict()), "losses": losses}

    wrapped = DistributedDataParallel(copy.deepcopy(job.model).train())
    optimizer = optimizer_of(wrapped)
    torch.manual_seed(rank)
    losses = [train_step(wrapped, optimizer, x, y) for x, y in _shares(job, rank)]
    results["ddp"] = {"state": wrapped.module.state_dict(), "losses": losses}
    torch.save(results, Path(folder) / f"rank{rank}.pth")
    dist.destroy_process_group()


def _shares(job: Job, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The rank's part of each batch, for three epochs."""
    return [(x[rank::WORLD], y[rank::WORLD]) for _ in range(3) for x, y in job.loader()]

"""Processes under gloo that train the same model by DDP and sharded by FSDP2.

    python -m tests.tools.training.sharding_worker FOLDER

Torch and fxqat are imported once; the ranks are forks of this process.
"""

import multiprocessing
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import fxqat
from fxqat.tools import round_weights_once
from fxqat.tools.training.sharding import shard

WORLDS = (4, 2)
STEPS = 20
SAVED = 10
"""The step after which four ranks write a checkpoint, from which two go on."""
WHOLE = StateDictOptions(full_state_dict=True)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5)),
    )


def data() -> tuple[Tensor, Tensor]:
    """The batches of all ranks, each image the pattern of its class plus noise, and the classes."""
    generator = torch.Generator().manual_seed(1)
    classes = torch.arange(STEPS * 8).reshape(STEPS, 8) % 5
    patterns = torch.randn(5, 3, 6, 6, generator=generator)
    return patterns[classes] + 0.5 * torch.randn(STEPS, 8, 3, 6, 6, generator=generator), classes


def prepared() -> nn.Module:
    """Learned scales and zero points; the range of all ranks is that of all data."""
    config = {"extra_qconfig_dict": {"w_observer": "MinMax", "a_observer": "MinMax"}}
    return fxqat.prepare_by_platform(network(), "Experimental", config, example_inputs=(data()[0][0],)).train()


def share(batch: Tensor, rank: int, world: int) -> Tensor:
    return batch.chunk(world)[rank]


def calibrate(gm: nn.Module, rank: int = 0, world: int = 1) -> nn.Module:
    fxqat.calibrate(gm, [share(batch, rank, world) for batch in data()[0][:4]], progress=False)
    fxqat.enable_quantization(gm)
    return gm


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """With tensors of a kind in a group: ``foreach``, the default on GPUs, takes no others."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in model.parameters():
        groups[isinstance(parameter, DTensor)].append(parameter)
    options = {"lr": 0.01, "momentum": 0.9, "foreach": True}
    return torch.optim.SGD([{"params": group} for group in groups.values() if group], **options)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int = 0, world: int = 1
) -> list[float]:
    """The loss of each step over all ranks."""
    losses = []
    for x, y in zip(*(tensor[steps.start : steps.stop] for tensor in data()), strict=True):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(share(x, rank, world)), share(y, rank, world))
        loss.backward()
        optimizer.step()
        total = loss.detach()
        if world > 1:
            dist.all_reduce(total)
        losses.append(total.item() / world)
    return losses


def accumulate(rank: int, world: int, once: bool) -> list[Tensor]:
    """The parameters after five steps of DDP, each of two micro-batches."""
    gm = calibrate(prepared(), rank, world)
    model = DistributedDataParallel(gm)
    optimizer = optimizer_of(model)
    for x, y in zip(*(tensor[:5] for tensor in data()), strict=True):
        optimizer.zero_grad()
        parts = list(zip(share(x, rank, world).chunk(2), share(y, rank, world).chunk(2), strict=True))
        with round_weights_once(model) if once else nullcontext():
            for number, (images, classes) in enumerate(parts):
                with model.no_sync() if number < len(parts) - 1 else nullcontext():
                    (nn.functional.cross_entropy(model(images), classes) / len(parts)).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in gm.parameters()]


def refusal(action: Callable[[], object]) -> str:
    """The error of an action, in words."""
    try:
        action()
    except fxqat.errors.FxqatError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def run(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{world}", rank=rank, world_size=world)
    result: dict[str, Any] = {}

    gm = calibrate(prepared(), rank, world)
    model = DistributedDataParallel(gm)
    result["ddp"] = train(model, optimizer_of(model), range(STEPS), rank, world)
    if rank == 0:
        fxqat.save_checkpoint(model, folder / f"ddp{world}.pth")

    for name, once in (("once", True), ("each time", False)):
        result[name] = accumulate(rank, world, once)
    config = {"extra_qconfig_dict": {"a_fakequantize": "Fixed"}}  # it takes no scale of a whole tensor as a parameter
    old = calibrate(fxqat.prepare_by_platform(network(), "Experimental", config), rank, world)
    FullyShardedDataParallel(old, device_id=torch.device("cpu"), use_orig_params=True)
    result["flattened"] = refusal(lambda: round_weights_once(old).__enter__())
    for option in ("find_unused_parameters", "static_graph"):
        model = DistributedDataParallel(calibrate(prepared(), rank, world), **{option: True})
        result[option] = refusal(lambda: round_weights_once(model).__enter__())  # noqa: B023  called at once

    gm = shard(calibrate(prepared(), rank, world))
    optimizer = optimizer_of(gm)
    result["fsdp"] = train(gm, optimizer, range(SAVED), rank, world)
    state = get_optimizer_state_dict(gm, optimizer, options=WHOLE)
    fxqat.save_checkpoint(gm, folder / f"fsdp{world}_{SAVED}.pth", extra={"optimizer": state})
    result["fsdp"] += train(gm, optimizer, range(SAVED, STEPS), rank, world)
    fxqat.save_checkpoint(gm, folder / f"fsdp{world}.pth")
    result["held"] = sum(
        parameter.to_local().numel() if isinstance(parameter, DTensor) else parameter.numel()
        for parameter in gm.parameters()
    )

    if world == 2:
        gm = shard(prepared())
        optimizer = optimizer_of(gm)
        extra = fxqat.load_checkpoint(gm, folder / f"fsdp4_{SAVED}.pth")
        set_optimizer_state_dict(gm, optimizer, extra["optimizer"], options=WHOLE)
        result["resumed"] = train(gm, optimizer, range(SAVED, STEPS), rank, world)
        for name, refused in (
            ("export", lambda: fxqat.convert_export(gm, (data()[0][0],), folder / "model.onnx")),
            ("accumulation", lambda: round_weights_once(gm).__enter__()),
            ("json", lambda: fxqat.save_checkpoint(gm, folder / "c.pth", folder / "c.json")),
        ):
            result[name] = refusal(refused)
    torch.save(result, folder / f"{world}_rank{rank}.pth")
    dist.barrier()
    dist.destroy_process_group()


def main(folder: Path) -> None:
    context = multiprocessing.get_context("fork")
    for world in WORLDS:
        ranks = [context.Process(target=run, args=(rank, world, folder)) for rank in range(world)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            sys.exit(f"{world} ranks: exit codes {[process.exitcode for process in ranks]}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

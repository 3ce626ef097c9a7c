"""One of two processes under gloo: calibrates observers, and calibrates, trains and saves models under DDP.

    python -m tests.distributed_worker RANK WORLD_SIZE FOLDER

Even ranks import fxqat before the process group exists, odd ranks afterwards.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

WORLD = 2
BATCHES = 2
CASES = {"TSQAT": False, "Experimental": True}  # backend: calibrated without torch.no_grad(), as one forgets it
SHARE = 4  # samples of a rank in a batch
CONFIG = {"extra_qconfig_dict": {"w_observer": "MinMax", "a_observer": "MinMax"}, "bn_mode": "freeze"}


def data(rank: int, world: int) -> list[Tensor]:
    """The batches of a rank; the largest values are in the first batch of the last rank."""
    torch.manual_seed(0)
    every = torch.randn(world, BATCHES, SHARE, 3, 12, 12)
    every[-1, 0] *= 3.0
    return list(every[rank])


def targets(rank: int) -> Tensor:
    return torch.linspace(-1, 1, SHARE * 5).reshape(SHARE, 5) * (rank + 1)


def train_step(model: nn.Module, inputs: Tensor, wanted: Tensor) -> float:
    """One step of plain SGD on the mean squared error; the loss before it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loss = ((model.train()(inputs) - wanted) ** 2).mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def calibrate(fxqat: Any, model: nn.Module, batches: list[Tensor], gradients: bool) -> None:
    model.eval()
    fxqat.enable_calibration(model)
    with torch.set_grad_enabled(gradients):
        for batch in batches:
            model(batch)
    fxqat.enable_quantization(model)


def snapshot(model: nn.Module) -> dict[str, Any]:
    return {key: value.clone() for key, value in model.state_dict().items() if isinstance(value, Tensor)}


def one_case(fxqat: Any, rank: int, world: int, folder: Path, backend: str) -> dict[str, Any]:
    build = importlib.import_module("tests.export_models").build
    gm = fxqat.prepare_by_platform(build("residual"), backend, CONFIG)
    model = nn.parallel.DistributedDataParallel(gm)
    batches = data(rank, world)
    calibrate(fxqat, model, batches, CASES[backend])
    result: dict[str, Any] = {"calibrated": snapshot(gm)}
    result["loss"] = train_step(model, batches[1], targets(rank))
    result["trained"] = snapshot(gm)
    if rank == 0:
        fxqat.save_checkpoint(model, folder / "ddp.pth", folder / "ddp.json", extra={"epoch": 1})
        fxqat.convert_export(model, (batches[1],), folder / "model.onnx", folder / "model.json")
    dist.barrier()
    result["extra"] = fxqat.load_checkpoint(model, folder / "ddp.pth")
    result["loaded"] = snapshot(gm)
    return result


def main(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    if rank % 2 == 0:
        importlib.import_module("fxqat")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    fxqat = importlib.import_module("fxqat")
    torch.save(importlib.import_module("tests.observer.gloo_worker").results(rank), folder / f"observers{rank}.pt")
    for backend in CASES:
        (folder / backend).mkdir(exist_ok=True)
        torch.save(one_case(fxqat, rank, world, folder / backend, backend), folder / backend / f"rank{rank}.pth")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))

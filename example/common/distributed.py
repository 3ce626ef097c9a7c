"""Distributed training: processes started by `--multiprocessing-distributed` or by torchrun."""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from errors import UserError, leaving
from torch import Tensor, nn


class Options(Protocol):
    """The flags about machines and processes; see `imagenet_example/main.py -h`."""

    device: str | None
    gpu: int | None
    multiprocessing_distributed: bool
    world_size: int
    rank: int
    dist_url: str | None
    dist_backend: str | None
    sync_bn: bool
    batch_size: int


@dataclass(frozen=True)
class Process:
    """One of the processes that train the model.

    Args:
        rank: number of this process.
        world: number of processes.
        device: device of this process.
    """

    rank: int
    world: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this process prints and writes files."""
        return self.rank == 0

    def wrapped(self, model: nn.Module) -> nn.Module:
        """The model in DistributedDataParallel; the model itself if there is one process."""
        if self.world == 1:
            return model
        ids = [self.device.index] if self.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(model, device_ids=ids)


def choose_device(options: Options, local_rank: int, alone: bool) -> torch.device:
    """The device of a process.

    Args:
        options: the flags.
        local_rank: number of the process on this node.
        alone: whether the device is taken as given; otherwise each process on CUDA takes the GPU of its local rank.

    Raises:
        UserError: this machine has no such device.
    """
    if options.gpu is not None:
        wanted = f"cuda:{options.gpu}"
    else:
        wanted = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
        if device.type == "cuda" and not alone:
            device = torch.device("cuda", local_rank)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        flag = f"--gpu {options.gpu}" if options.gpu is not None else f"--device {wanted}"
        raise UserError(f"{flag}: this machine has no such device ({str(error).splitlines()[0]})") from error
    return device


def launch(job: Callable[[Any, Process], Any], options: Options) -> Any:
    """Run a job in as many processes as the flags or torchrun ask for.

    Returns:
        The result of the job; None if it ran in processes that were started here.

    Raises:
        UserError: flags that have no effect here, or too few images for each process.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return run_one(int(os.environ["LOCAL_RANK"]), job, options, rank, world, "env://")
    if not options.multiprocessing_distributed:
        if options.world_size > 1 or options.dist_url:
            raise UserError("--world-size and --dist-url have no effect without --multiprocessing-distributed: add it")
        if options.sync_bn:
            raise UserError("--sync-bn has no effect in one process: drop it, or add --multiprocessing-distributed")
        return job(options, Process(0, 1, choose_device(options, 0, alone=True)))
    nodes, local = nodes_and_processes(options)
    if options.batch_size < nodes * local:
        raise UserError(f"-b {options.batch_size} gives less than one image to each of {nodes * local} processes")
    url = options.dist_url or f"tcp://127.0.0.1:{free_port()}"
    first = max(0, options.rank) * local
    place = (job, options, first, nodes * local, url)
    context: Any = mp.start_processes(spawned, place, local, join=False, start_method="spawn")
    with leaving_signals_to(context.processes):
        try:
            while not context.join():
                pass
        except mp.ProcessExitedException as error:
            raise SystemExit(error.exit_code) from error
    return None


@contextmanager
def leaving_signals_to(processes: list[Any]) -> Iterator[None]:
    """In the block, leave signals to the child processes, which then write their checkpoint.

    The terminal sends Ctrl-C to all processes, so this one ignores it; SIGTERM is passed on.
    """

    def terminate(number: int, frame: FrameType | None) -> None:
        for process in processes:
            process.terminate()

    before = {signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN)}
    before[signal.SIGTERM] = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def nodes_and_processes(options: Options) -> tuple[int, int]:
    """The number of nodes, and of processes on this one.

    With GPUs: one process for each GPU. On the CPU: one process per node if `--rank` is given; otherwise all
    `--world-size` processes run here.

    Raises:
        UserError: `--rank` or `--dist-url` is missing or does not fit.
    """
    on_gpu, nodes = choose_device(options, 0, alone=True).type == "cuda", max(1, options.world_size)
    if options.rank < 0 and not on_gpu:
        return 1, nodes
    if nodes > 1 and (options.rank < 0 or not options.dist_url):
        raise UserError(
            "--world-size above 1 needs --rank (the number of this node) and --dist-url (where the nodes connect)"
        )
    if options.rank >= nodes:
        raise UserError(f"--rank {options.rank}: --world-size {nodes} numbers its nodes from 0 to {nodes - 1}")
    return nodes, torch.cuda.device_count() if on_gpu else 1


def spawned(local_rank: int, job: Callable[[Any, Process], Any], options: Options, *place: Any) -> None:
    """Run the job in a child process; a user error ends it with one line, as in a single process."""
    first, world, url = place
    rank = first + local_rank
    with leaving(rank):
        run_one(local_rank, job, options, rank, world, url)


def run_one(
    local_rank: int, job: Callable[[Any, Process], Any], options: Options, rank: int, world: int, url: str
) -> Any:
    """Join the process group, run the job, and leave the group."""
    device = choose_device(options, local_rank, alone=False)
    if options.sync_bn and device.type == "cpu":
        raise UserError("--sync-bn: torch's SyncBatchNorm does not train on the CPU; drop the flag")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = options.dist_backend or ("nccl" if device.type == "cuda" else "gloo")
    try:
        dist.init_process_group(backend, init_method=url, rank=rank, world_size=world)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"--dist-backend {backend}, --dist-url {url}: {str(error).splitlines()[0]}") from error
    try:
        return job(options, Process(rank, world, device))
    finally:
        dist.destroy_process_group()


def free_port() -> int:
    """A free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def load_in_first(process: Process, model: torch.nn.Module, load: Callable[[], Any]) -> None:
    """Call `load` in the first process, which wrote the file, and broadcast the model's tensors to the others.

    Other nodes may not see the file.
    """
    if process.is_first:
        load()
    if process.world > 1:
        for value in model.state_dict().values():
            if isinstance(value, Tensor):
                dist.broadcast(value, 0)


def add_up(values: Tensor) -> Tensor:
    """The sum over all processes."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def gather(value: Any) -> list[Any]:
    """The values of all processes, by rank."""
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found

"""Tensors that FSDP2 has sharded (DTensors), gathered and distributed again. Every rank must call each function."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor


def whole(tensor: Tensor) -> Tensor:
    """A tensor on every rank: a sharded one gathered, on the CPU; any other as it is, detached."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor.detach() if gather is None else gather().detach().cpu()


def sharded_as(tensor: Any, pattern: Any) -> Any:
    """A value that every rank holds, sharded as a DTensor is; if the pattern is no DTensor, the value itself."""
    from torch.distributed.tensor import DTensor, distribute_tensor  # here: importing torch's DTensor takes a while

    if not isinstance(pattern, DTensor):
        return tensor
    local = tensor.to(pattern.device, pattern.dtype)
    return distribute_tensor(local, pattern.device_mesh, pattern.placements, src_data_rank=None)


@contextmanager
def on_one_rank(active: bool) -> Iterator[bool]:
    """A block whose value tells this rank whether it is the one that writes; the others wait for its end.

    Args:
        active: False: every rank writes, and none waits.
    """
    try:
        yield not active or dist.get_rank() == 0
    finally:
        if active:
            dist.barrier()
